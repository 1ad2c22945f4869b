"""Cross-entropy for large vocabularies without [tokens, vocabulary] logits: some tokens at a time.

Of a plain linear head the gradients are computed along with the loss, while a chunk's logits are there: three products instead
of the four of a recomputing backward. Any other head (LoRA's, say) is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
    count: Tensor | float | None = None,
) -> Tensor:
    """Sum of the cross-entropies over `count`, by default the number of targets that are not ignored."""
    flat, targets = hidden.flatten(0, 1), targets.flatten().to(hidden.device)
    if count is None:
        count = (targets != IGNORE).sum()
    if hidden.device.type == "cpu" and not torch.compiler.is_compiling():  # where counting them waits for nothing
        labelled = (targets != IGNORE).nonzero().squeeze(1)
        if labelled.numel() < 0.9 * targets.numel():
            flat, targets = flat[labelled], targets[labelled]
    if _is_plain(head) and torch.is_grad_enabled():
        total = _LinearCrossEntropy.apply(flat, head.weight, targets, chunk)  # type: ignore[attr-defined]
    else:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for h, target in zip(flat.split(chunk), targets.split(chunk), strict=True):

            def part(h: Tensor, target: Tensor) -> Tensor:
                return F.cross_entropy(head(h).float(), target, ignore_index=IGNORE, reduction="sum")

            total = total + checkpoint(part, h, target, use_reentrant=False, preserve_rng_state=False)
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def _is_plain(head: Any) -> bool:
    """Whether `head(h)` is `h @ head.weight.T` and nothing else: no bias, no adapter, no hooks (FSDP's, say)."""
    return type(head) is nn.Linear and head.bias is None and not (head._forward_hooks or head._forward_pre_hooks)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of `hidden @ weight.T`; both gradients are ready when it returns."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            h, target = hidden[start : start + chunk], targets[start : start + chunk]
            # Of logits x: loss = logsumexp(x) - x[target], d_x = softmax(x) - onehot(target), both 0 where there is no target.
            x = F.linear(h, weight).float()  # [n, vocabulary]
            log_z = torch.logsumexp(x, -1)
            kept = target != IGNORE
            index = target.clamp_min(0)[:, None]
            total += ((log_z - x.gather(1, index).squeeze(1)) * kept).sum()
            x.sub_(log_z[:, None]).exp_()
            x.scatter_add_(1, index, x.new_full((), -1.0).expand_as(index))
            x.mul_(kept[:, None])
            d_x = x.to(h.dtype)
            torch.mm(d_x, weight.to(h.dtype), out=d_hidden[start : start + chunk])
            d_weight += d_x.T @ h
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_total.to(d_hidden.dtype), (d_weight * d_total).to(ctx.dtype), None, None
