"""A list of recipes, trained one after another or some at a time; each once.

A recipe's folder is named after what the recipe says, so that a second call finds what is finished, goes on with what was
stopped and starts the rest. Runs are processes of their own, forked from a server that has imported torch and Transformers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .metrics import METRICS, read_metrics
from .recipe import Recipe


class SweepError(RuntimeError):
    """Some runs failed; the message names them."""


def place(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with its folder: NAME-HASH in `folder`, the hash of all that decides its results."""
    content = {**recipe.fixed(), "path": recipe.data.path, "evaluate": [recipe.log.evaluate_every, recipe.log.evaluate_tokens]}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]
    return dataclasses.replace(recipe, out=str(folder / f"{recipe.name}-{digest}"))


def finished(recipe: Recipe) -> bool:
    """Whether its folder holds the whole run."""
    return (recipe.folder / "model").exists()


def sweep(recipes: Sequence[Recipe], folder: Path, *, jobs: int = 1, title: str = "runs") -> list[Path]:
    """Train all that are not finished, `jobs` at a time, with the cores shared; the folders, in the recipes' order."""
    placed = [place(recipe, folder) for recipe in recipes]
    todo = [recipe for recipe in dict.fromkeys(placed) if not finished(recipe)]
    if todo:
        folder.mkdir(parents=True, exist_ok=True)
        _train_all(todo, jobs, title, len(placed) - len(todo))
    return [recipe.folder for recipe in placed]


def _train_all(todo: list[Recipe], jobs: int, title: str, done: int) -> None:
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rla.train.loop"])
    alive, kept = context.Pipe(duplex=False)  # `kept` is closed when this process ends, however it ends
    threads = max(1, torch.get_num_threads() // jobs)
    waiting, failed = list(reversed(todo)), []
    running: dict[Recipe, Any] = {}
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"))
    progress = Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console)
    total = sum(recipe.schedule.steps for recipe in todo)
    with progress:
        task = progress.add_task(title, total=total, text="")
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    recipe = waiting.pop()
                    process = context.Process(target=_train_one, args=(recipe, threads, alive), daemon=True)
                    process.start()
                    running[recipe] = process
                time.sleep(0.5)
                for recipe, process in list(running.items()):
                    if not process.is_alive():
                        del running[recipe]
                        if not finished(recipe):
                            failed.append(f"{recipe.folder.name} (exit code {process.exitcode}, see {recipe.folder}.log)")
                        elif not console.is_terminal:
                            console.print(f"{title}: {recipe.folder.name} is trained")
                over = [recipe for recipe in todo if recipe not in waiting and recipe not in running]
                steps = sum(r.schedule.steps for r in over) + sum(_steps_done(r) for r in running)
                names = ", ".join(r.name for r in running)
                progress.update(task, completed=steps, text=f"{len(over)}/{len(todo)} runs, {done} found; now {names}")
        except KeyboardInterrupt:
            for process in running.values():
                process.terminate()  # saves, then ends
            for process in running.values():
                process.join()
            raise
    kept.close()
    alive.close()
    if failed:
        raise SweepError(f"{len(failed)} of {len(todo)} runs failed: {'; '.join(failed)}")


def _steps_done(recipe: Recipe) -> int:
    if not (recipe.folder / METRICS).exists():
        return 0
    return max((row["step"] for row in read_metrics(recipe.folder)), default=0)


def _train_one(recipe: Recipe, threads: int, alive: Any) -> None:
    """A child process: one run, its messages in a file beside its folder."""

    def watch() -> None:
        alive.poll(None)  # nothing is ever sent: it ends when the sweep does
        os._exit(1)  # checkpoints are whole at any moment

    threading.Thread(target=watch, daemon=True).start()
    torch.set_num_threads(threads)
    log = os.open(f"{recipe.folder}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from .loop import train

    train(recipe)
