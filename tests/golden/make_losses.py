"""Golden losses: 20 steps of each of the paper's presets at a tiny size, with a fixed seed, in float64 on the chunked backend.

A change that is not meant to change the maths must leave them as they are. To write them anew after one that is:

    python tests/golden/make_losses.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from rla.models import RLAConfig, RLAForCausalLM
from rla.models.configuration_rla import PAPER

FILE = Path(__file__).with_name("losses.json")
STEPS = 20
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}


def config(preset: str) -> RLAConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} if preset == "transformer" else {"num_attention_heads": 2}
    return RLAConfig.paper(preset, **SIZES, **heads, linear_num_heads=2, initializer_range=0.1, backend="chunked")


def batches(steps: int) -> torch.Tensor:
    """[steps, 4, 72] tokens with something to learn: a row counts up from a random start, by 1, 2, 3 or 4."""
    start = torch.randint(SIZES["vocab_size"], (steps, 4, 1), generator=torch.Generator().manual_seed(0))
    by = torch.arange(1, 5)[:, None]
    return (start + by * torch.arange(72)) % SIZES["vocab_size"]


def losses(preset: str, steps: int = STEPS) -> list[float]:
    torch.manual_seed(0)
    model = RLAForCausalLM(config(preset)).double().train()  # float32 differs by 1e-4 between CPUs after 20 steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    found = []
    for ids in batches(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(round(loss.item(), 6))
    return found


if __name__ == "__main__":
    rows = [f"  {json.dumps(preset)}: {json.dumps(losses(preset))}" for preset in PAPER]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(f"wrote {FILE}")
