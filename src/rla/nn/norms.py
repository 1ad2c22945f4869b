"""RMSNorm, plain and with a gate, and the rule for weight decay.

RMSNorm(x) = weight * x / sqrt(mean(x^2) + eps)
GatedRMSNorm(x, gate) = RMSNorm(x) * silu(gate)         over the last dimension: one head
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def no_weight_decay(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that weight decay should leave alone. All of ours are vectors: `p.ndim < 2` finds them too."""
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, with its weight marked as free of weight decay."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__(size, eps=eps)
        no_weight_decay(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        # A float32 weight meets bfloat16 activations under autocast; torch's fused kernel wants one dtype.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class GatedRMSNorm(RMSNorm):
    """RMSNorm of each head, then a SiLU gate."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:  # both [B, T, H, V]
        x = super().forward(x)
        return x if gate is None else torch.mul(x, F.silu(gate))
