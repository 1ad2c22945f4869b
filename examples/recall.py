"""How well does each method recall? Every method in `rla.METHODS` on one synthetic stream, as a table.

A stream writes pairs (k, v) into the state: keys are random unit vectors, values random signs, and every pair comes REPEATS
times in random order. Then each key is asked for once, by a token with q = key and k = v = 0, which reads and writes nothing.
The recall error is |c o - v|^2 / |v|^2 with the best common factor c (a layer's output norm takes scale away): 0 for a perfect
memory, 1 for an empty one.

Nothing is trained. Gates are constants, for each method and number of pairs the best of the same small grid; so the table shows
how the update rules differ as memories, not how well a trained model does.
"""

from __future__ import annotations

import itertools

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import rla

K = V = 64
PAIRS = (8, 16, 32, 64, 128)
REPEATS = 4
SEEDS = 8
RATES = (0.1, 0.3, 0.6, 1.0)
DECAYS = (0.99, 0.999, 1.0)


def stream(pairs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys [pairs, K], values [pairs, V], and the order in which the stream shows them [pairs * REPEATS]."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.nn.functional.normalize(torch.randn(pairs, K, generator=generator), dim=-1)
    values = torch.randint(0, 2, (pairs, V), generator=generator) * 2.0 - 1
    order = torch.cat([torch.randperm(pairs, generator=generator) for _ in range(REPEATS)])
    return keys, values, order


def recall_errors(method: rla.Method, pairs: int, alpha: float, beta: float, gamma: float) -> torch.Tensor:
    """The recall error of each seed, [SEEDS]: the seeds are the batch."""
    streams = [stream(pairs, seed) for seed in range(SEEDS)]
    values = torch.stack([v for _, v, _ in streams])
    nothing = torch.zeros(SEEDS, pairs, 1, K)
    k = torch.stack([keys[order] for keys, _, order in streams])[:, :, None]
    v = torch.stack([values[order] for _, values, order in streams])[:, :, None]
    q = torch.stack([keys for keys, _, _ in streams])[:, :, None]
    q, k, v = torch.cat((torch.zeros_like(k), q), 1), torch.cat((k, nothing), 1), torch.cat((v, nothing), 1)
    B, T, H, _ = q.shape
    log_alpha = torch.full((B, T, H), alpha).log()
    log_alpha[:, -pairs:] = 0  # reading takes no time
    if method.decay == "vector":
        log_alpha = log_alpha[..., None].expand(B, T, H, K)
    o, _ = rla.attend(
        q,
        k,
        v,
        log_alpha=None if method.decay == "none" else log_alpha,
        beta=None if method.rate == "one" else torch.full((B, T, H), beta),
        gamma=torch.full((B, T, H), gamma) if method.has_residual and method.gamma == "own" else None,
        method=method,
    )
    o = o[:, -pairs:, 0]
    scale = (o * values).sum((1, 2)) / (o * o).sum((1, 2))
    return (scale[:, None, None] * o - values).square().mean((1, 2))


def best_errors(method: rla.Method, pairs: int) -> torch.Tensor:
    """recall_errors with the constant gates that suit this method best."""
    alphas = (1.0,) if method.decay == "none" else DECAYS
    betas = (1.0,) if method.rate == "one" else RATES
    gammas = RATES if method.has_residual and method.gamma == "own" else (1.0,)
    runs = [recall_errors(method, pairs, *gates) for gates in itertools.product(alphas, betas, gammas)]
    return min(runs, key=lambda errors: errors.mean().item())


def main() -> None:
    console = Console()
    errors = {}
    for name in track(rla.METHODS, description="methods", console=console, transient=True):
        for pairs in PAIRS:
            errors[name, pairs] = best_errors(rla.METHODS[name], pairs)
    best = {pairs: min(errors[name, pairs].mean().item() for name in rla.METHODS) for pairs in PAIRS}
    spread = max(e.std().item() for e in errors.values())
    table = Table(title=f"Recall error by number of pairs, a {K} x {V} state")
    table.add_column("method", no_wrap=True)
    for pairs in PAIRS:
        table.add_column(f"{pairs}", justify="right")
    for name in rla.METHODS:
        cells = [errors[name, pairs].mean().item() for pairs in PAIRS]
        table.add_row(
            name, *(f"[bold]{e:.3f}[/]" if e <= best[n] + 5e-4 else f"{e:.3f}" for n, e in zip(PAIRS, cells, strict=True))
        )
    console.print(table)
    console.print(
        f"0 is a perfect memory, 1 an empty one; bold: the best of a column. Each pair is shown {REPEATS} times. "
        f"Means of {SEEDS} seeds, standard deviation at most {spread:.3f}. "
        "Nothing is trained: constant gates, the best of one small grid for each method."
    )


if __name__ == "__main__":
    main()
