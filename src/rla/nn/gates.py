"""Gates: what alpha, beta and gamma are for each `Method`, from the layer's input x.

    decay   none     alpha = 1
            fixed    alpha = 1 - 2^(-5-h) for head h (RetNet)
            scalar   alpha = exp(-exp(A_log) * dt),  dt = softplus(W x + dt_bias) (Mamba-2)
            vector   alpha = sigmoid(W2 W1 x + b)^(1/16), one per key channel, rank 16 (GLA)
    rate    one      beta = 1
            sigmoid  beta = sigmoid(W x)
            dt       beta = dt, that of the decay
    gamma   own      gamma = sigmoid(W x);   tied: beta, which the op sees to

Gates are computed in float32 whatever the model's dtype.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..method import Method
from .norms import no_weight_decay

RANK = 16  # of GLA's gate
TEMPERATURE = 16.0  # of GLA's gate
DT_MIN, DT_MAX = 1e-3, 1e-1  # Mamba-2 draws its first steps from here, uniformly in the logarithm


def initial_A_log(heads: int) -> Tensor:
    """Mamba-2's: A uniform in [1, 16]."""
    return torch.empty(heads).uniform_(1, 16).log()


def initial_dt_bias(heads: int) -> Tensor:
    """Mamba-2's: softplus(dt_bias) log-uniform in [0.001, 0.1]."""
    dt = torch.empty(heads).uniform_(math.log(DT_MIN), math.log(DT_MAX)).exp()
    return dt + (-torch.expm1(-dt)).log()


class Gates(nn.Module):
    """The projections a method's gates need, and no others."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, method: Method) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.method = num_heads, head_dim, method
        self.alpha_proj: nn.Module | None = None
        self.beta_proj: nn.Linear | None = None
        self.gamma_proj: nn.Linear | None = None
        if method.decay == "scalar" or method.rate == "dt":
            self.alpha_proj = nn.Linear(hidden_size, num_heads, bias=False)
            self.dt_bias = no_weight_decay(nn.Parameter(initial_dt_bias(num_heads)))
        if method.decay == "scalar":
            self.A_log = no_weight_decay(nn.Parameter(initial_A_log(num_heads)))
        if method.decay == "vector":
            down, up = nn.Linear(hidden_size, RANK, bias=False), nn.Linear(RANK, num_heads * head_dim)
            nn.init.zeros_(no_weight_decay(up.bias))
            self.vector_proj = nn.Sequential(down, up)
        if method.rate == "sigmoid":
            self.beta_proj = nn.Linear(hidden_size, num_heads, bias=False)
        if method.has_residual and method.gamma == "own":
            self.gamma_proj = nn.Linear(hidden_size, num_heads, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """`x` [B, T, hidden]; returns log_alpha [B, T, H] or [B, T, H, K], beta and gamma [B, T, H], or None."""
        log_alpha = dt = beta = None
        if self.alpha_proj is not None:
            dt = F.softplus(_wide(self.alpha_proj(x)) + _wide(self.dt_bias))
        if self.method.decay == "scalar":
            assert dt is not None
            log_alpha = -_wide(self.A_log).exp() * dt
        elif self.method.decay == "fixed":
            heads = torch.arange(self.num_heads, device=x.device, dtype=torch.float32)
            log_alpha = torch.log1p(-torch.exp2(-5 - heads)).expand(*x.shape[:2], -1)
        elif self.method.decay == "vector":
            log_alpha = F.logsigmoid(_wide(self.vector_proj(x))) / TEMPERATURE
            log_alpha = log_alpha.unflatten(-1, (self.num_heads, self.head_dim))
        if self.method.rate == "dt":
            beta = dt
        elif self.beta_proj is not None:
            beta = _wide(self.beta_proj(x)).sigmoid()
        gamma = None if self.gamma_proj is None else _wide(self.gamma_proj(x)).sigmoid()
        return log_alpha, beta, gamma


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
