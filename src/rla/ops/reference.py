"""The reference: the paper's recurrence, one token at a time, in plain PyTorch. It is the law for every other backend.

For one head (a state is K x V, vectors are rows, alpha_t = exp(log_alpha_t), psi the pseudo-residual of the loss):

    p_t = k_t S_{t-1}
    r_t = psi(v_t - p_t)
    R_t = alpha_t R_{t-1} + gamma_t k_t^T (r_t - [delta: alpha_t k_t R_{t-1}])
    o_t = alpha_t q_t S_{t-1} + gamma_t q_t R_t
    S_t = alpha_t S_{t-1} + beta_t k_t^T (v_t - [delta: alpha_t k_t S_{t-1}])

Autograd differentiates it; any device and dtype. Sums and states are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..method import Method

NORM_EPS = 1e-6  # L2 norm: x / max(|x|, eps)


def psi(e: Tensor, method: Method) -> Tensor:
    """The pseudo-residual: the negative gradient of the loss at the error e = v - p."""
    if method.loss == "huber":
        return e.clamp(-method.clip, method.clip)
    return e.tanh() if method.loss == "logcosh" else e


def forward(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,
    v: Tensor,  # [B, T, HV, V]
    log_alpha: Tensor | None,  # [B, T, HV] or [B, T, HV, K]
    beta: Tensor | None,  # [B, T, HV]
    gamma: Tensor | None,
    S0: Tensor | None,  # [N, HV, K, V]
    R0: Tensor | None,
    cu_seqlens: Tensor | None,
    method: Method,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output [B, T, HV, V] and the final states S and R [N, HV, K, V]."""
    if cu_seqlens is None:
        return _recur(q, k, v, log_alpha, beta, gamma, S0, R0, method)
    bounds = cu_seqlens.tolist()
    runs = []
    for n, (start, end) in enumerate(pairwise(bounds)):
        tokens = [None if x is None else x[:, start:end] for x in (q, k, v, log_alpha, beta, gamma)]
        states = [None if x is None else x[n : n + 1] for x in (S0, R0)]
        runs.append(_recur(*tokens, *states, method))  # type: ignore[arg-type,call-arg]
    o, S, R = zip(*runs, strict=True)
    return torch.cat(o, 1), torch.cat(S), torch.cat(R) if method.has_R else None


def _recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    S0: Tensor | None,
    R0: Tensor | None,
    method: Method,
) -> tuple[Tensor, Tensor, Tensor | None]:
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    dtype, out_dtype = torch.promote_types(q.dtype, torch.float32), q.dtype
    q, k = (x.to(dtype).repeat_interleave(HV // H, 2) for x in (q, k))
    v = v.to(dtype)
    if method.qk_norm:
        q, k = (F.normalize(x, dim=-1, eps=NORM_EPS) for x in (q, k))
    one = q.new_ones(B, T, HV)
    alpha = one if log_alpha is None else log_alpha.to(dtype).exp()
    alpha = alpha[..., None, None] if alpha.dim() == 3 else alpha[..., None]  # scales the rows of a state
    beta, gamma = ((one if x is None else x.to(dtype))[..., None, None] for x in (beta, gamma))
    S = q.new_zeros(B, HV, K, V) if S0 is None else S0
    R = q.new_zeros(B, HV, K, V) if R0 is None else R0

    def absorb(M: Tensor, a: Tensor, rate: Tensor, kt: Tensor, x: Tensor) -> Tensor:
        M = a * M
        if method.rule == "delta":
            x = x - kt @ M
        return M + rate * kt.mT @ x

    o = []
    for t in range(T):
        qt, kt, vt = (x[:, t, :, None] for x in (q, k, v))  # rows [B, HV, 1, K or V]
        a, b, g = alpha[:, t], beta[:, t], gamma[:, t]
        rt = psi(vt - kt @ S, method)
        if method.correction == "fitted":
            R = absorb(R, a, g, kt, rt)
        elif method.correction == "token":
            R = kt.mT @ rt
        base = qt @ (a * S) if method.gate_output else qt @ S
        S = absorb(S, a, b, kt, vt)
        if method.correction == "none":
            o.append(qt @ S)
        else:
            o.append(base + g * (qt @ R) if method.gate_output else base + qt @ R)
    out = torch.cat(o, 2).transpose(1, 2) if o else q.new_zeros(B, 0, HV, V)
    return out.to(out_dtype), S, R if method.has_R else None
