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
    plain = backend in (None, "native") and isinstance(state, State)
    if plain and not torch.compiler.is_compiling() and not torch.is_grad_enabled():
        run = native.plain_step(method)
        done = None if run is None else run(q, k, v, log_alpha, beta, gamma, state.S, state.R)
        if done is not None:
            return done
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
