"""Layout: what a batch's attention_mask, position_ids and cu_seqlens mean to each kind of layer.

Linear layers get a `Packing` if there is padding or more than one document in a row, softmax layers a mask, both get positions.
It is made once per call of the model. Values are read for it, except under torch.compile: there padding and packed position_ids
are refused by an assertion in the graph (packed documents can be given as cu_seqlens).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..nn.packing import Packing, positions_of, sequence_of
from ..nn.softmax import causal_mask


class Layout(NamedTuple):
    position_ids: Tensor  # [B or 1, T]
    packing: Packing | None = None  # for linear layers; None: every row is one sequence without padding
    mask: Tensor | None = None  # for softmax layers, [B or 1, 1, T, past + T]; None: causal
    padding: Tensor | None = None  # [B, T], False at padding; None: no padding

    def first(self, n: int) -> Layout:
        """The layout of the first n tokens, for linear layers."""
        padding = None if self.padding is None else self.padding[:, :n]
        return Layout(self.position_ids[:, :n], None if padding is None else Packing.from_mask(padding), None, padding)

    @property
    def has_documents(self) -> bool:
        """Whether rows hold several documents, which leave more states behind than there are rows."""
        return self.packing is not None and self.padding is None


def make_layout(
    x: Tensor,  # [B, T, hidden]
    past: int,
    *,
    softmax: bool,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Layout:
    """The layout of T new tokens after `past` others. `softmax`: whether some layer needs a mask."""
    B, T, device = *x.shape[:2], x.device
    compiling = torch.compiler.is_compiling()
    if position_ids is not None:
        _check_positions(position_ids, B, T)
    full = None if attention_mask is None else _check_mask(attention_mask, B, past + T).to(device)  # [B, past + T]
    if full is not None:
        if compiling:
            torch._assert_async(full.all(), "attention_mask: padding can't be handled under torch.compile")
            full = None
        elif full.all():
            full = None

    if cu_seqlens is not None:
        if B != 1:
            raise ValueError(f"cu_seqlens: packed documents lie along one row, expected a batch of 1; got {B}")
        if full is not None:
            raise ValueError("cu_seqlens: packed rows have no padding; leave attention_mask away")
        _refuse_past(past)
        cu_seqlens = cu_seqlens.to(torch.int64)
        positions = positions_of(cu_seqlens, T, device) if position_ids is None else position_ids
        sequence = sequence_of(cu_seqlens, T, device)[None] if softmax else None
        mask = causal_mask(T, 0, device, sequence=sequence) if softmax else None
        return Layout(positions, Packing(cu_seqlens), mask)

    if full is not None:
        if T > 1 or not full[:, -2:].all():
            _check_contiguous(full)
        if position_ids is None:
            position_ids = (full.cumsum(1) - 1).clamp_min(0)[:, past:]
        new = full[:, past:]
        padding = None if new.all() else new
        packing = None if padding is None else Packing.from_mask(padding)
        return Layout(position_ids, packing, causal_mask(T, past, device, padding=full) if softmax else None, padding)

    if position_ids is None:
        return Layout(torch.arange(past, past + T, device=device)[None], None, _plain_mask(T, past, device, softmax))
    if past == 0 and T > 1:
        if compiling:
            torch._assert_async((position_ids.diff() == 1).all(), "position_ids: give packed documents as cu_seqlens")
        elif (packing := Packing.from_positions(position_ids.expand(B, T))) is not None:
            sequence = sequence_of(packing.cu_seqlens, B * T, device).view(B, T)
            return Layout(position_ids, packing, causal_mask(T, 0, device, sequence=sequence) if softmax else None)
    return Layout(position_ids, None, _plain_mask(T, past, device, softmax))


def _plain_mask(T: int, past: int, device: torch.device, softmax: bool) -> Tensor | None:
    return causal_mask(T, past, device) if softmax and past and T > 1 else None


def document_starts(
    T: int, device: torch.device, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor | None:
    """Where a token begins a document that is not the row's first, [B or 1, T - 1] from the second token on."""
    if cu_seqlens is not None:
        return sequence_of(cu_seqlens, T, device)[None].diff() != 0
    return None if position_ids is None else position_ids.diff() != 1


def _refuse_past(past: int) -> None:
    if past:
        raise ValueError("past_key_values: packed documents can't continue a cache; pass each document alone, or pad them")


def _check_mask(mask: Tensor, B: int, length: int) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        got = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: expected a padding mask [B, T], ones at tokens; got {got}")
    if list(mask.shape) != [B, length]:
        raise ValueError(
            f"attention_mask: expected shape [B, tokens in the cache + new tokens] = {[B, length]}; got {list(mask.shape)}"
        )
    return mask.bool()


def _check_contiguous(mask: Tensor) -> None:
    if mask.device.type != "cpu":
        return
    rises = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    if (rises > 1).any():
        row = int((rises > 1).nonzero()[0])
        raise ValueError(
            f"attention_mask: padding in the middle of row {row}; expected all padding on its left or all on its right "
            "(to generate, pad on the left: tokenizer.padding_side = 'left')"
        )


def _check_positions(position_ids: Tensor, B: int, T: int) -> None:
    if position_ids.dim() != 2 or position_ids.shape[1] != T or position_ids.shape[0] not in (1, B):
        raise ValueError(f"position_ids: expected shape [{B} or 1, {T}]; got {list(position_ids.shape)}")
