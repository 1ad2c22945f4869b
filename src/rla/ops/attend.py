"""attend: the one op. It checks its arguments, chooses a backend and runs it under torch's autograd.

Backends are reached through two registered operators, `rla::attend` and `rla::attend_backward`, so that torch.compile
traces through them. A Method travels through their schemas as text, an absent tensor comes back as an empty one.

What a backend keeps for backward is `saved` and, of native, pS and pR. Nobody needs these two once backward has read them, so
it writes the gradients of v and k there (`rla::attend_backward_`), unless autograd keeps the graph for another backward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..method import Method, get_method
from . import native, reference
from .backends import BACKENDS, choose
from .checks import check, state_dtype

_FIELDS = tuple(field.name for field in dataclasses.fields(Method))


class State(NamedTuple):
    """What N sequences leave behind: S, and R for methods with a fitted correction.

    Both are `[N, H, K, V]` with the heads of v, float32, or float64 for float64 inputs.
    """

    S: Tensor
    R: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None = None,
    beta: Tensor | None = None,
    gamma: Tensor | None = None,
    *,
    method: str | Method = "rdn",
    state: State | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Residual linear attention and its family, causal, linear in T.

    Args:
        q, k: `[B, T, H, K]`. L2-normalised here if the method says so (`Method.qk_norm`). There is no scale factor.
        v: `[B, T, H, V]`, or with a multiple of the heads of q and k: value head h then reads key head `h // (HV // H)`,
            and gates and states have the heads of v.
        log_alpha: natural logarithm of the decay, `<= 0`, `-inf` allowed: `[B, T, H]`, or `[B, T, H, K]` for methods with
            vector decay. None: no decay.
        beta, gamma: rates of S and R, `[B, T, H]`. None: 1.
        method: a name in `rla.METHODS` or a `rla.Method`.
        state: what an earlier call returned, to continue from. None: zeros.
        cu_seqlens: `[N + 1]` int, bounds of N sequences packed along T (then B is 1); they don't see each other.
        backend: a name in `rla.backends()`; None chooses the fastest that serves these tensors.

    Returns:
        The output `[B, T, H, V]` in the dtype of q, and the `State` after the last token of each sequence. Both are
        differentiable in every tensor argument. A sequence cut anywhere, with the state handed over, gives the same.

    Example:
        >>> q, k, v = torch.randn(3, 1, 256, 4, 64).unbind()
        >>> out, state = rla.attend(q, k, v, torch.full((1, 256, 4), -0.01), method="rla")
    """
    method = get_method(method)
    check(q, k, v, log_alpha, beta, gamma, method=method, state=state, cu_seqlens=cu_seqlens)
    name = choose(backend, q, v, method)
    gamma = beta if method.gamma == "tied" and method.has_residual else gamma
    S0, R0 = (None, None) if state is None else (state.S, state.R)
    inputs = (q, k, v, log_alpha, beta, gamma, S0, R0)
    if name == "reference":
        o, S, R = reference.forward(*inputs, cu_seqlens, method)
        return o, State(S, R)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    run = torch.ops.rla.attend.default
    arguments = (*inputs, cu_seqlens, _encode(method), name, save, True)
    if save or torch.compiler.is_compiling():
        o, S, R, *_ = run(*arguments)
    else:  # past autograd, which would find nothing to do: a fifth of what a call costs outside the kernel
        with torch._C._AutoDispatchBelowAutograd():
            o, S, R, *_ = run(*arguments)
    return o, State(S, R if method.has_R else None)


def _encode(method: Method) -> str:
    """A Method as text, by means that torch.compile can trace."""
    return " ".join([str(getattr(method, name)) for name in _FIELDS])


@functools.lru_cache
def _decode(text: str) -> Method:
    words = dict(zip(_FIELDS, text.split(), strict=True))
    flags = {name: words.pop(name) == "True" for name in ("gate_output", "qk_norm")}
    clip = float(words.pop("clip"))
    return Method(**words, **flags, clip=clip)  # type: ignore[arg-type]


@torch.library.custom_op("rla::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    S0: Tensor | None,
    R0: Tensor | None,
    cu_seqlens: Tensor | None,
    method: str,
    backend: str,
    save: bool,
    private: bool,  # the caller leaves what is saved to backward, which may overwrite it
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    forward = BACKENDS[backend].module.forward
    o, S, R, kept = forward(q, k, v, log_alpha, beta, gamma, S0, R0, cu_seqlens, _decode(method), save)
    saved, pS, pR = kept if len(kept) == 3 else (*kept, S.new_empty(0), S.new_empty(0))
    return o, S, R, saved, pS, pR


@_attend.register_fake
def _(q, k, v, log_alpha, beta, gamma, S0, R0, cu_seqlens, method, backend, save, private):
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype, m = state_dtype(q.dtype), _decode(method)
    S = native.empty_state(q, v, N) if backend == "native" else q.new_empty(N, HV, K, V, dtype=dtype)
    shapes = BACKENDS[backend].module.saved_shapes(q, v, N, m) if save else ()
    saved, pS, pR = (q.new_empty(shape, dtype=dtype) for shape in (*shapes, (0,), (0,), (0,))[:3])
    return q.new_empty(B, T, HV, V), S, torch.empty_like(S) if m.has_R else S.new_empty(0), saved, pS, pR


@torch.library.custom_op("rla::attend_backward", mutates_args=())
def _attend_backward(
    do: Tensor,
    dS: Tensor | None,
    dR: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    S0: Tensor | None,
    R0: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    pS: Tensor,
    pR: Tensor,
    method: str,
    backend: str,
) -> list[Tensor]:
    inputs = (q, k, v, log_alpha, beta, gamma, S0, R0)
    backward = BACKENDS[backend].module.backward
    grads = backward(do, dS, dR, *inputs, cu_seqlens, (saved, pS, pR), _decode(method))
    return [q.new_empty(0) if grad is None else grad for grad in grads]


@_attend_backward.register_fake
def _(do, dS, dR, q, k, v, log_alpha, beta, gamma, S0, R0, cu_seqlens, saved, pS, pR, method, backend):
    inputs = (q, k, v, log_alpha, beta, gamma, S0, R0)
    return [q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


@torch.library.custom_op("rla::attend_backward_", mutates_args=("pS", "pR"))
def _attend_backward_(
    do: Tensor,
    dS: Tensor | None,
    dR: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    S0: Tensor | None,
    R0: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    pS: Tensor,
    pR: Tensor,
    method: str,
) -> list[Tensor]:
    """As _attend_backward of native, with gradients of v and k in pS and pR where they fit: empty in what is returned."""
    inputs = (q, k, v, log_alpha, beta, gamma, S0, R0)
    grads = native.backward(do, dS, dR, *inputs, cu_seqlens, (saved, pS, pR), _decode(method), overwrite=True)
    return [q.new_empty(0) if grad is None or grad is pS or grad is pR else grad for grad in grads]


# Whether the graph that backward runs on will be used again. A torch that doesn't tell is taken to keep it.
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.method, ctx.backend, _, ctx.private = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[3:])
    ctx.mark_non_differentiable(*output[3:])
    ctx.out_shape = output[0].shape


def _backward(ctx, do, dS, dR, *_):
    *inputs, cu_seqlens, saved, pS, pR = ctx.saved_tensors
    do = inputs[0].new_zeros(ctx.out_shape) if do is None else do
    dR = dR if _decode(ctx.method).has_R else None
    tensors = (do, dS, dR, *inputs, cu_seqlens, saved, pS, pR)
    if ctx.private and type(pS) is Tensor and pS.numel() and not _keeps_graph():  # a tracer's tensor has another type
        grads = _attend_backward_(*tensors, ctx.method)
        grads[1:3] = pR if pR.shape == inputs[1].shape else grads[1], pS
    else:
        grads = _attend_backward(*tensors, ctx.method, ctx.backend)
    return (*(None if x is None else grad for x, grad in zip(inputs, grads, strict=True)), None, None, None, None, None)


_attend.register_autograd(_backward, setup_context=_setup_context)
