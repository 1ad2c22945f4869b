"""What a run says while it goes: metrics.jsonl always, a progress line or bar, and a tracker if the recipe names one.

A row of metrics.jsonl is one JSON object with `kind` and `step` (steps done):

    start        parameters, processes, and the machine and versions of the first start
    train        loss (nats, mean over the batch), lr, grad_norm, tokens, tokens_per_second, utilization, epoch
    evaluation   loss on the validation split, bits_per_byte; for MQAR accuracy, also for each task
    probe        layers: [{output_norm, clip_rate}, ...]
    event        message: a checkpoint that failed, a step that was skipped
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

METRICS = "metrics.jsonl"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run; a last line that a kill cut off is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number != len(lines):  # every whole line ends with a line feed
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
    return rows


class MetricsFile:
    """Appends rows. Opened again at a step, it forgets what came after it: a resumed run writes that anew."""

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / METRICS
        kept = [row for row in read_metrics(folder) if row["step"] <= step]
        partial = path.with_name(METRICS + ".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(partial, path)
        self._file = path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Tracker:
    """A tracker by name: tensorboard writes into the run's folder; trackio and wandb have the same three functions."""

    def __init__(self, name: str, folder: Path, run: str, config: dict[str, Any]) -> None:
        self._writer: Any = None
        self._module: Any = None
        try:
            if name == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(folder / "tensorboard"))
            elif name != "none":
                import importlib

                self._module = importlib.import_module(name)
                self._module.init(project="rla", name=run, config=config)
        except ImportError as error:
            raise ValueError(f"log.tracker: {name} is not installed: pip install {name} ({error})") from error

    def write(self, row: dict[str, Any]) -> None:
        prefix, step = row["kind"], row["step"]
        numbers = {f"{prefix}/{k}": v for k, v in row.items() if k != "step" and isinstance(v, (int, float))}
        for i, layer in enumerate(row.get("layers", ())):
            numbers |= {f"{prefix}/{k}/layer{i}": v for k, v in layer.items()}
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
        elif self._module is not None and numbers:
            self._module.log(numbers, step=step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        elif self._module is not None:
            self._module.finish()


class Display:
    """A bar on a terminal, lines elsewhere."""

    def __init__(self, name: str, total: int, done: int, *, quiet: bool) -> None:
        self.console = Console(quiet=quiet, highlight=False, stderr=True)
        self.live = self.console.is_terminal and not quiet
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console, disable=not self.live)
        self.task = self.progress.add_task(name, total=total, completed=done, text="")
        self.progress.start()

    def message(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def step(self, done: int, row: dict[str, Any] | None) -> None:
        if row is None:
            self.progress.update(self.task, completed=done)
            return
        what = "share of sgemm" if row.get("utilization_of") == "sgemm" else "MFU"
        text = f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s"
        if row.get("utilization") is not None:
            text += f"  {what} {row['utilization']:.2f}"
        self.progress.update(self.task, completed=done, text=text)
        if not self.live:
            self.message(f"step {done}/{self.progress.tasks[0].total:.0f}  {text}  lr {row['lr']:.2e}  left {row['left']}")

    def close(self) -> None:
        self.progress.stop()
