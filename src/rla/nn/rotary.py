"""Rotary position embeddings: channels i and i + D/2 of a head turn by the angle position * theta^(-2i/D).

Nothing is stored: the angles are computed in float32 where they are used, so a model moved, cast or loaded on the meta
device has no buffer to lose.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_rotary_dim(head_dim: int) -> None:
    if head_dim % 2:
        raise ValueError(f"head_dim: rotary embeddings turn pairs of channels, so expected an even number; got {head_dim}")


def rotate(x: Tensor, position_ids: Tensor, theta: float = 10000.0) -> Tensor:
    """Turn `x`, [B, T, H, D], by its positions, [B or 1, T]."""
    half = x.shape[-1] // 2
    rates = theta ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = (position_ids[..., None].float() * rates)[:, :, None]  # [B, T, 1, D/2]
    cos, sin = angles.cos(), angles.sin()
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
