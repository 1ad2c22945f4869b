"""Cross-entropy for large vocabularies without [tokens, vocabulary] logits: some tokens at a time, recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORE = -100


def shift(labels: Tensor) -> Tensor:
    """The label of each position is the next token."""
    return F.pad(labels, (0, 1), value=IGNORE)[..., 1:].contiguous()


def chunked_loss(
    hidden: Tensor,  # [B, T, hidden]
    targets: Tensor,  # [B, T], shifted already
    head: Callable[[Tensor], Tensor],
    chunk: int,
    count: Tensor | int | None = None,
) -> Tensor:
    """Sum of the cross-entropies over `count`, by default the number of targets that are not ignored."""

    def part(h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(head(h).float(), target, ignore_index=IGNORE, reduction="sum")

    flat, targets = hidden.flatten(0, 1), targets.flatten().to(hidden.device)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for h, target in zip(flat.split(chunk), targets.split(chunk), strict=True):
        total = total + checkpoint(part, h, target, use_reentrant=False, preserve_rng_state=False)
    if count is None:
        count = (targets != IGNORE).sum()
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)
