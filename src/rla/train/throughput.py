"""`rla bench train`: tokens per second of whole training steps, and where the time goes, beside the Transformer.

A step is what `rla train` does for one pass: batch, forward, loss, backward, clipping, AdamW. Steps of all contenders
alternate, so that a change of clock or load meets all alike. The parts are read off one profiled step each:

    projections   matrix products outside the loss (mixers and MLPs)
    op            rla.attend or scaled-dot-product attention, forward and backward
    loss          head and cross-entropy, with their gradients
    optimizer     clipping and AdamW
    data          reading the batch; timed apart, since `rla train` reads it while the step before runs
    other         the rest: norms, gates, convolution, activations
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from ..bench.kernels import make_console, make_progress
from ..bench.measure import Quantiles, Sgemm, environment, time_in_rounds, time_once, write_csv
from ..data import TokenBatches, builtin_dataset
from ..models import RLAForCausalLM
from . import engine
from .cost import training_flops
from .recipe import Model, Optimizer
from .source import model_inputs

PARTS = ("projections", "op", "loss", "optimizer", "other")
_OPS = ("rla::attend", "rla::attend_backward", "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward")  # fmt: skip
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


@dataclass(frozen=True)
class Contender:
    mixer: str
    backend: str | None = None

    def __str__(self) -> str:
        return self.mixer if self.backend is None else f"{self.mixer} {self.backend}"


@dataclass(frozen=True)
class Cell:
    contender: Contender
    length: int


class Step:
    """One training step, callable over and over."""

    def __init__(self, cell: Cell, model: Model, tokens: int) -> None:
        model = dataclasses.replace(model, mixer=(cell.contender.mixer,), backend=cell.contender.backend)
        self.rows = range(max(1, tokens // cell.length))
        self.batches = TokenBatches(builtin_dataset("train"), length=cell.length, batch=len(self.rows), seed=0)
        self.config = model.config(self.batches.vocab_size)
        torch.manual_seed(0)
        self.model = RLAForCausalLM(self.config).train()
        self.optimizer = engine.make_optimizer(self.model, Optimizer(lr=1e-4, min_lr=1e-5))
        self.tokens, self.number = len(self.rows) * cell.length, 0

    def read(self) -> dict[str, torch.Tensor]:
        self.number += 1
        return model_inputs(self.batches.batch_at(self.number, self.rows), torch.device("cpu"))

    def __call__(self) -> None:
        loss = self.model(**self.read(), num_items_in_batch=self.tokens, use_cache=False).loss
        loss.backward()
        with record_function("optimizer"):
            engine.clip_gradients(self.model, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's library writes to the standard error by itself."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def shares(step: Step) -> dict[str, float]:
    """The parts' shares of one step's time."""
    range_: list[Any] = []

    def enter(*_: object) -> None:
        range_.append(record_function("loss"))
        range_[-1].__enter__()

    def leave(*_: object) -> None:
        range_[-1].__exit__(None, None, None)

    hooks = [step.model.model.register_forward_hook(enter), step.model.register_forward_hook(leave)]
    try:
        with _quiet(), profile(activities=[ProfilerActivity.CPU]) as record, record_function("step"):
            step()
    finally:
        for hook in hooks:
            hook.remove()
    events = record.events()
    assert events is not None
    total = sum(e.cpu_time_total for e in events if e.name == "step")
    in_loss = [e.time_range for e in events if e.name == "loss" or e.name.startswith("_LinearCrossEntropyBackward")]

    in_op = [e.time_range for e in events if e.name in _OPS]

    def apart(event: Any) -> bool:
        """Whether it is outside the loss and the op, whose time has been counted."""
        at = event.time_range
        return not any(r.start <= at.start and at.end <= r.end for r in (*in_loss, *in_op))

    times = {
        "projections": sum(e.cpu_time_total for e in events if e.name in _PRODUCTS and apart(e)),
        "op": sum(r.end - r.start for r in in_op),
        "loss": sum(r.end - r.start for r in in_loss),
        "optimizer": sum(e.cpu_time_total for e in events if e.name == "optimizer"),
    }
    result = {part: time / total for part, time in times.items()}
    return result | {"other": 1 - sum(result.values())}


def main(
    *,
    mixers: tuple[str, ...] = ("softmax", "gdn", "rla", "rdn"),
    chunked: tuple[str, ...] = ("rdn",),
    lengths: tuple[int, ...] = (2048, 8192),
    preset: str = "small",
    vocab_size: int = 4096,
    tokens: int = 8192,
    threads: int | None = None,
    seconds: float = 10.0,
    out: Path = Path("results/train"),
) -> int:
    """Time training steps of several models in one run, on a machine that does nothing else; compare within a run.

    Writes train.csv: quantiles of a step's time, tokens per second, share of sgemm, shares of the parts.

    Example: rla bench train --lengths 2048 8192 --threads 2

    Args:
        mixers: methods, or softmax (the Transformer with SDPA); linear ones on the backend that is chosen for them.
        chunked: methods to time on the chunked backend too.
        lengths: tokens of a sequence.
        preset: sizes of the model: tiny, small, 340m, 1.5b.
        vocab_size: of the model; the text is bytes.
        tokens: of a step; a sequence longer than that is taken whole.
        threads: of the CPU. Default: torch's.
        seconds: time to spend on each cell.
        out: folder for the CSV.
    """
    model = Model(preset=preset, vocab_size=vocab_size, initializer_range=0.02)
    contenders = [*(Contender(m) for m in mixers), *(Contender(m, "chunked") for m in chunked)]
    cells = [Cell(c, n) for n in lengths for c in contenders]
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    console, sgemm = make_console(), Sgemm("cpu")
    samples: dict[Cell, list[float]] = {}
    try:
        with make_progress(console) as progress:
            task = progress.add_task("training steps", total=2 * len(cells))
            steps = {}
            for cell in cells:
                steps[cell] = Step(cell, model, tokens)
                steps[cell]()
                progress.advance(task)
            sgemm.sample()
            time_in_rounds(steps, samples, seconds=seconds, on_done=lambda _: progress.advance(task))
            sgemm.sample()
        rows = [_row(cell, steps[cell], samples[cell], sgemm) for cell in cells]
    except (ValueError, FileNotFoundError) as error:
        print(f"rla bench train: {error}", file=sys.stderr)
        return 2
    finally:
        used = torch.get_num_threads()
        torch.set_num_threads(before)
    console.print(_table(rows), f"{sgemm}; {steps[cells[0]].tokens} tokens a step, preset {preset}, {used} threads")
    write_csv(out / "train.csv", [{**row, **environment("cpu", used)} for row in rows])
    console.print(f"written: {out / 'train.csv'}")
    return 0


def _row(cell: Cell, step: Step, samples: list[float], sgemm: Sgemm) -> dict[str, object]:
    times = Quantiles.of(samples)
    read: Callable[[], object] = step.read
    data = statistics.median(time_once(read) for _ in range(5))
    flops = sum(training_flops(step.config, cell.length).values()) * step.tokens / times.q50
    return {
        "contender": str(cell.contender),
        "length": cell.length,
        "parameters": sum(p.numel() for p in step.model.parameters()),
        **{f"ms_{q}": getattr(times, q) * 1e3 for q in ("q20", "q50", "q80")},
        "repetitions": times.repetitions,
        "tokens_per_second": step.tokens / times.q50,
        "share_of_sgemm": flops / 1e9 / sgemm.median,
        **shares(step),
        "data": data / times.q50,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Training throughput", title_justify="left")
    for name in ("model", "length", "params", "ms/step", "tokens/s", "vs softmax", "of sgemm", *PARTS, "data"):
        table.add_column(name, justify="left" if name == "model" else "right")
    base = {row["length"]: row["tokens_per_second"] for row in rows if row["contender"] == "softmax"}
    for row in rows:
        against = base.get(row["length"])
        table.add_row(
            row["contender"],
            str(row["length"]),
            f"{row['parameters'] / 1e6:.1f}M",
            f"{row['ms_q50']:.0f}",
            f"{row['tokens_per_second']:,.0f}",
            "" if against is None else f"{row['tokens_per_second'] / against:.2f}",
            f"{row['share_of_sgemm']:.2f}",
            *(f"{row[part]:.0%}" for part in PARTS),
            f"{row['data']:.1%}",
        )
    return table
