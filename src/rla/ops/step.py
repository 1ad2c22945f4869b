"""step: one token for each sequence of a batch, with the state updated in place. What decoding runs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..method import Method, get_method
from .attend import State, _decode, _encode, attend
from .backends import BACKENDS, choose
from .checks import check


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
    """
    method = get_method(method)
    if state is None:
        raise TypeError("state: expected a rla.State to update; got None")
    check(q, k, v, log_alpha, beta, gamma, method=method, state=state, cu_seqlens=None)
    if q.shape[1] != 1:
        raise ValueError(f"q: expected T = 1, one token for each sequence; got T = {q.shape[1]} (use rla.attend)")
    inputs = (q, k, v, log_alpha, beta, gamma, state.S, state.R)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise ValueError("step: not differentiable; expected torch.no_grad() or tensors that need no gradient")
    name = choose(backend, q, v, method)
    in_place = name == "native" and all(M is None or M.is_contiguous() for M in state)
    if not in_place:
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
