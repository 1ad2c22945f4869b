"""Parameters and floating-point operations of a model, by part, counted from its configuration.

A multiply-add is two operations. Of the op the products of the chunked form are counted (rla.bench.workload), of softmax
attention the lower triangle. A backward pass takes twice its forward in all parts but the op, whose backward computes the
states again: three times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..bench.workload import Contender, multiply_adds
from ..models import RLAConfig, RLAForCausalLM
from ..models.configuration_rla import SOFTMAX

BACKWARD = {"projections": 2, "mlp": 2, "op": 3, "head": 2}


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters; the parts add up to the total."""

    embedding: int
    mixers: int
    mlps: int
    head: int  # 0 where it is the embedding
    rest: int  # norms

    @property
    def total(self) -> int:
        return self.embedding + self.mixers + self.mlps + self.head + self.rest


def meta_model(config: RLAConfig) -> RLAForCausalLM:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return RLAForCausalLM(config)


def count_parameters(config: RLAConfig) -> Parameters:
    counts = dict.fromkeys(("embedding", "mixers", "mlps", "head", "rest"), 0)
    for name, p in meta_model(config).named_parameters():
        part = (
            "embedding" if "embed_tokens" in name
            else "mixers" if ".mixer." in name
            else "mlps" if ".mlp." in name
            else "head" if "lm_head" in name
            else "rest"
        )  # fmt: skip
        counts[part] += p.numel()
    return Parameters(**counts)


def forward_flops(config: RLAConfig, length: int) -> dict[str, float]:
    """Per token of a sequence of that length, forward."""
    parameters = count_parameters(config)
    linear = config.linear_num_heads or config.num_attention_heads
    op = 0.0
    for mixer in config.mixers:
        heads = config.num_attention_heads if mixer == SOFTMAX else linear
        adds = multiply_adds(Contender(mixer, "any"), length, config.resolved_head_dim, "forward")
        assert adds is not None
        op += 2 * heads * adds
    return {
        "projections": 2 * parameters.mixers,
        "op": op,
        "mlp": 2 * parameters.mlps,
        "head": 2 * config.vocab_size * config.hidden_size,
    }


def backward_flops(config: RLAConfig, length: int) -> dict[str, float]:
    """Per token, backward."""
    return {part: flops * BACKWARD[part] for part, flops in forward_flops(config, length).items()}


def recomputed_flops(config: RLAConfig, length: int) -> dict[str, float]:
    """Per token, what activation checkpointing computes a second time: the blocks' forward pass."""
    return {part: flops for part, flops in forward_flops(config, length).items() if part != "head"}


def training_flops(config: RLAConfig, length: int) -> dict[str, float]:
    """Per token, forward and backward, nothing computed again but the op's states."""
    return {part: flops * (1 + BACKWARD[part]) for part, flops in forward_flops(config, length).items()}
