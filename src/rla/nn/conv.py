"""ShortConvolution: a depthwise causal convolution over the last W inputs, with a cache of the last W - 1.

    y_t = sum_i weight[i] * x_{t - W + 1 + i}        for each channel; inputs before the sequence are zero or cached

Packed sequences do not leak into each other: each gets W - 1 slots of its own in front of its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .packing import sequence_of


class ShortConvolution(nn.Module):
    """One convolution for all channels given to it; q, k and v go through it side by side."""

    def __init__(self, channels: int, width: int = 4) -> None:
        super().__init__()
        if width < 2:
            raise ValueError(f"width: expected at least 2 (a layer without convolution has conv_size=0); got {width}")
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(width, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -(self.width**-0.5), self.width**-0.5)

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}"

    def forward(self, x: Tensor, past: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`x` [B, T, C] and the last inputs `past` [N, W - 1, C]; returns y and the new last inputs."""
        W, (B, T, C), weight = self.width, x.shape, self.weight.to(x.dtype)
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        past = x.new_zeros(N, W - 1, C) if past is None else past.to(x.dtype)
        if cu_seqlens is None:
            padded = torch.cat((past, x), 1)  # [B, W - 1 + T, C]
            y = _Convolve.apply(padded, weight)
            # A copy: a view would keep the whole sequence alive.
            return y, padded[:, T:].clone()
        bounds, slots = cu_seqlens.to(device=x.device, dtype=torch.int64), torch.arange(W - 1, device=x.device)
        token = torch.arange(T, device=x.device) + (W - 1) * (1 + sequence_of(bounds, T, x.device))  # [T]
        before = bounds[:-1, None] + (W - 1) * torch.arange(N, device=x.device)[:, None] + slots  # [N, W - 1]
        padded = x.new_zeros(T + N * (W - 1), C).index_copy(0, token, x[0])
        padded = padded.index_copy(0, before.flatten(), past.flatten(0, 1))
        y = _Convolve.apply(padded[None], weight)[:, token - (W - 1)]
        return y, padded[before + bounds.diff()[:, None]]


class _Convolve(torch.autograd.Function):
    """[B, W - 1 + T, C] and [W, C] to [B, T, C]: W passes over the sequence, without a transposition of it.

    The backward is written out because autograd's own, through W slices, is several times slower.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        T = x.shape[1] - weight.shape[0] + 1
        y = x[:, :T] * weight[0]
        for i in range(1, weight.shape[0]):
            y = torch.addcmul(y, x[:, i : i + T], weight[i])
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        T, dx = dy.shape[1], torch.zeros_like(x)
        for i in range(weight.shape[0]):
            dx[:, i : i + T].addcmul_(dy, weight[i])
        dweight = torch.stack([(dy * x[:, i : i + T]).sum((0, 1)) for i in range(weight.shape[0])])
        return dx, dweight
