"""step: one token for each sequence of a batch, with the state updated in place. What decoding runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..method import Method, get_method
from . import native
from .attend import State, _decode, _encode, attend
from .backends import BACKENDS, choose
from .checks import check

# Backends with a one-token kernel that updates states in place, and how these must lie in memory.
IN_PLACE: Mapping[str, Callable[[Tensor], bool]] = {"native": native.lies_by_columns, "triton": Tensor.is_contiguous}


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None = None,
    beta: Tensor | None = None,
    gamma: Tensor | None = None,
    *,
    state: State,
    method: str | Method = "rdn",
    backend: str | None = None,
) -> Tensor:
    """`attend` for T = 1 that overwrites `state` with the new one and returns the output `[B, 1, H, V]` alone.

    Arguments are those of `attend`. It is not differentiable: call it under `torch.no_grad()`, or use `attend` to train.
    Give it states that `attend` returned: they lie in memory as the kernel wants them. Others serve too, but are copied.
    """
    method = get_method(method)
    if state is None:
        raise TypeError("state: expected a rla.State to update; got None")
    name = "native"
    plain = backend in (None, name) and not torch.compiler.is_compiling() and not torch.is_grad_enabled()
    if not (plain and _fits(q, k, v, log_alpha, beta, gamma, state, method)):
        check(q, k, v, log_alpha, beta, gamma, method=method, state=state, cu_seqlens=None)
        if q.shape[1] != 1:
            raise ValueError(f"q: expected T = 1, one token for each sequence; got T = {q.shape[1]} (use rla.attend)")
        inputs = (q, k, v, log_alpha, beta, gamma, state.S, state.R)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
            raise ValueError("step: not differentiable; expected torch.no_grad() or tensors that need no gradient")
        name = choose(backend, q, v, method)
        if name not in IN_PLACE or not all(M is None or IN_PLACE[name](M) for M in state):
            o, new = attend(q, k, v, log_alpha, beta, gamma, method=method, state=state, backend=name)
            state.S.copy_(new.S)
            if state.R is not None and new.R is not None:
                state.R.copy_(new.R)
            return o
    gamma = beta if method.gamma == "tied" and method.has_residual else gamma
    tensors = (q, k, v, log_alpha, beta, gamma, state.S, state.R)
    if torch.compiler.is_compiling():
        return _step(*tensors, _encode(method), name)
    return BACKENDS[name].module.step(*tensors, method)


def _fits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    state: State,
    method: Method,
) -> bool:
    """Whether this is the common case, a plain float32 call that the native kernel serves as it is.

    A step takes some 50 microseconds, and the full checks as much again: what fits here would pass them all (the kernel itself
    looks at the values of log_alpha), what doesn't goes through them.
    """
    try:
        (B, T, H, K), (vB, vT, HV, V), S, R = q.shape, v.shape, state.S, state.R
        gate, own = (B, 1, HV), (HV * K * V, K * V, 1, K)
        return (
            BACKENDS["native"].missing is None
            and T == vT == 1
            and vB == B
            and k.shape == q.shape
            and HV % H == 0
            and 0 < K <= native.MAX_SIZE
            and 0 < V <= native.MAX_SIZE
            and S.shape == (B, HV, K, V)
            and S.stride() == own
            and q.dtype == k.dtype == v.dtype == S.dtype == torch.float32
            and q.is_cpu
            and k.is_cpu
            and v.is_cpu
            and S.is_cpu
            and (R is not None) == method.has_R
            and (R is None or (R.shape == S.shape and R.stride() == own and R.dtype == torch.float32 and R.is_cpu))
            and (log_alpha is None or (_is_gate(log_alpha, gate) and method.decay in ("scalar", "fixed")))
            and (beta is None or (_is_gate(beta, gate) and method.rate != "one"))
            and (gamma is None or (_is_gate(gamma, gate) and method.has_residual and method.gamma == "own"))
        )
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):  # not even tensors, or of another rank
        return False


def _is_gate(x: Tensor, shape: tuple[int, ...]) -> bool:
    return x.shape == shape and x.dtype == torch.float32 and x.is_cpu


@torch.library.custom_op("rla::step", mutates_args=("S", "R"))
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    S: Tensor,
    R: Tensor | None,
    method: str,
    backend: str,
) -> Tensor:
    return BACKENDS[backend].module.step(q, k, v, log_alpha, beta, gamma, S, R, _decode(method))


@_step.register_fake
def _(q, k, v, log_alpha, beta, gamma, S, R, method, backend):
    return torch.empty_like(v, memory_format=torch.contiguous_format)
