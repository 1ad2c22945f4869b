"""The layer in a model of your own: torch alone, a loop of ten lines, and text token by token from a state of fixed size.

    python examples/own_model.py

The task is to go on counting: rows like 3 5 7 9 ..., each with its own beginning and stride, modulo the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rla.nn import MixerState, ResidualAttention

VOCABULARY, WIDTH, LENGTH = 32, 64, 24


class Counter(nn.Module):
    """Embedding, two blocks with a residual connection around each, and a head."""

    def __init__(self, method: str = "rdn") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mixers = nn.ModuleList(ResidualAttention(WIDTH, num_heads=2, method=method) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, states: list[MixerState | None] | None = None) -> tuple[Tensor, list[MixerState | None]]:
        x, after = self.embedding(tokens), []  # [B, T, WIDTH]
        for mixer, norm, state in zip(self.mixers, self.norms, states or [None, None], strict=True):
            y, state = mixer(norm(x), state=state)
            x = x + y
            after.append(state)
        return self.head(x), after


def rows(count: int, generator: torch.Generator) -> Tensor:
    """[count, LENGTH] numbers."""
    start, stride = torch.randint(0, VOCABULARY, (2, count, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH)) % VOCABULARY


def train(steps: int = 150) -> Counter:
    torch.manual_seed(0)
    model, generator = Counter(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        batch = rows(64, generator)
        logits, _ = model(batch[:, :-1])
        loss = F.cross_entropy(logits[:, 2:].flatten(0, 1), batch[:, 3:].flatten())  # the stride is known from three numbers on
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    return model


@torch.no_grad()
def go_on(model: Counter, prompt: Tensor, count: int) -> list[int]:
    """Greedy, one token at a time: the state is all that is kept of the past."""
    logits, states = model(prompt)
    said: list[int] = []
    for _ in range(count):
        token = logits[:, -1:].argmax(-1)
        said.append(int(token))
        logits, states = model(token, states)
    return said


if __name__ == "__main__":
    trained = train()
    print("3 5 7 9 goes on:", *go_on(trained, torch.tensor([[3, 5, 7, 9]]), 6))
