"""Packing: how the tokens of a batch fall into sequences that must not see each other.

A padded batch and rows of several documents are the same thing to a linear mixer: sequences packed along one row.

    mask    0 0 a b c        packed   a b c d e f g        cu_seqlens   0 3 7
            0 d e f g

`pack` takes the tokens out, `unpack` puts the results back (zeros at the padding). Left, right and no padding are all exact,
and states come out one per sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """`cu_seqlens` [N + 1] bounds the sequences among the packed tokens; `where` says where those lie in the flat batch."""

    cu_seqlens: Tensor
    where: Tensor | None = None  # [M] of B * T; None: every token, in order

    @classmethod
    def from_mask(cls, mask: Tensor) -> Packing:
        """One sequence for each row of a padding mask [B, T], of which the ones (or True) count."""
        mask = mask.bool()
        cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        return cls(cu_seqlens, mask.flatten().nonzero().squeeze(1))

    @classmethod
    def from_positions(cls, position_ids: Tensor) -> Packing | None:
        """A sequence starts wherever positions [B, T] do not go on by one; None if each row is one sequence."""
        starts = torch.ones_like(position_ids, dtype=torch.bool)
        starts[:, 1:] = position_ids.diff() != 1
        if not starts[:, 1:].any():
            return None
        bounds = starts.flatten().nonzero().squeeze(1)
        return cls(torch.cat((bounds, bounds.new_tensor([position_ids.numel()]))))

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] to [1, M, ...]."""
        flat = x.flatten(0, 1)
        return (flat if self.where is None else flat[self.where])[None]

    def unpack(self, y: Tensor, shape: torch.Size) -> Tensor:
        """[1, M, ...] to [B, T, ...], where `shape` begins with B, T."""
        B, T = shape[:2]
        if self.where is None:
            return y[0].unflatten(0, (B, T))
        flat = y.new_zeros(B * T, *y.shape[2:]).index_copy(0, self.where, y[0])
        return flat.unflatten(0, (B, T))


def sequence_of(cu_seqlens: Tensor, T: int, device: torch.device) -> Tensor:
    """The number of the sequence that each of T packed tokens belongs to, [T]."""
    cu_seqlens = cu_seqlens.to(device=device, dtype=torch.int64)
    return torch.searchsorted(cu_seqlens[1:], torch.arange(T, device=device), right=True)


def positions_of(cu_seqlens: Tensor, T: int, device: torch.device) -> Tensor:
    """Positions that restart with every packed sequence, [1, T]."""
    start = cu_seqlens.to(device=device, dtype=torch.int64)[sequence_of(cu_seqlens, T, device)]
    return (torch.arange(T, device=device) - start)[None]
