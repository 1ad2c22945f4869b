"""What a layer does inside, seen on one batch now and then: the paper's Figure 4, for every layer.

    output_norm   L2 norm of a token's attention output, all heads together, before norm and output gate; mean over tokens
    clip_rate     share of residuals v_t - k_t S_{t-1} beyond [-c, c], whether or not the method clips them there

k_t S_{t-1} is the op's own output for q = k, gamma = 0 (R stays 0) and a plain sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..method import Method
from ..models import RLAForCausalLM
from ..nn import ResidualAttention
from ..ops import attend


def clip_rate(method: Method, k: Tensor, v: Tensor, log_alpha: Tensor | None, beta: Tensor | None) -> float:
    """The share of residuals that a clip to `method.clip` changes."""
    plain = dataclasses.replace(method, correction="fitted", gamma="own", gate_output=False)
    gamma = v.new_zeros(v.shape[:3])
    p, _ = attend(k, k, v, log_alpha, beta, gamma, method=plain)
    return ((v - p).abs() > method.clip).float().mean().item()


@contextmanager
def _watch(model: RLAForCausalLM, rows: list[dict[str, float]]) -> Iterator[None]:
    hooks: list[Any] = []
    mixers = [block.mixer for block in model.model.layers]
    for mixer, row in zip(mixers, rows, strict=True):
        linear = isinstance(mixer, ResidualAttention)

        def norm(module: Any, inputs: tuple[Tensor, ...], row: dict[str, float] = row) -> None:
            x = inputs[0].flatten(2) if inputs[0].dim() == 4 else inputs[0]  # [B, T, H * V]
            row["output_norm"] = x.float().norm(dim=-1).mean().item()

        hooks.append((mixer.norm if linear else mixer.o_proj).register_forward_pre_hook(norm))
        if linear and mixer.method.has_residual:

            def observe(
                q: Tensor,
                k: Tensor,
                v: Tensor,
                log_alpha: Tensor | None,
                beta: Tensor | None,
                gamma: Tensor | None,
                mixer: ResidualAttention = mixer,
                row: dict[str, float] = row,
            ) -> None:
                row["clip_rate"] = clip_rate(mixer.method, k, v, log_alpha, beta)

            mixer.observer = observe
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for mixer in mixers:
            if isinstance(mixer, ResidualAttention):
                mixer.observer = None


def probe(model: RLAForCausalLM, input_ids: Tensor) -> list[dict[str, float]]:
    """One forward pass without gradients; a row for each layer. With sharded weights every process must call it."""
    rows: list[dict[str, float]] = [{} for _ in model.model.layers]
    compiled = any(block._compiled_call_impl is not None for block in model.model.layers)
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()  # hooks would compile the blocks again
    with torch.no_grad(), _watch(model, rows), eager:
        model(input_ids=input_ids, use_cache=False, logits_to_keep=1)
    return rows
