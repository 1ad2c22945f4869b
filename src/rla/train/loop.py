"""The loop: `rla train RECIPE`, alone or under torchrun, resumed by itself where it was stopped.

    for step:  gradients of the batch, in parts -> guard -> clip -> AdamW -> metrics, evaluation, probe, checkpoint

A step is a function of the state before it and the step's number, so that a run which was interrupted anywhere ends with the
weights of one that was not.
"""

from __future__ import annotations

import datetime
import json
import math
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ..bench.measure import Sgemm, environment
from ..data import Batch
from . import checkpoint, engine
from .cost import training_flops
from .export import export
from .guard import Guardian, Halt
from .hardware import peak_flops
from .metrics import METRICS, Display, MetricsFile, Tracker
from .probe import probe
from .recipe import Recipe, RecipeError, recipe_from_dict
from .source import Source, evaluate, model_inputs, open_source

RECIPE = "recipe.json"
OURS = (RECIPE, METRICS, METRICS + ".partial", "checkpoints", "tensorboard")
SAME_MOMENT = 3.0  # seconds


def train(recipe: Recipe, *, quiet: bool = False) -> dict[str, Any]:
    """Train as the recipe says, or go on with what its folder holds, alone or under torchrun.

    Returns the last row of metrics, of an evaluation or of a training step. `quiet` shows no progress.
    """
    world = engine.start(recipe.parallel)
    try:
        with _alone(recipe.folder, world):
            try:
                run = Run(recipe, world, quiet=quiet or not world.main)
            except (ValueError, FileNotFoundError) as error:
                raise RecipeError(str(error)) from error
            return run.go()
    finally:
        engine.stop()


@contextmanager
def _alone(folder: Path, world: engine.World) -> Iterator[None]:
    """Hold a lock beside the run's folder, so that no second run writes into it."""
    path = folder.with_name(f".{folder.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        free = True
        if world.main and fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                free = False
        if not world.agree(free):
            raise RecipeError(f"out: another process is training in {folder}")
        yield


def learning_rate(recipe: Recipe, step: int) -> float:
    """Of the step that comes after `step` steps: linear warm-up, then a cosine down to the minimum."""
    schedule, optimizer = recipe.schedule, recipe.optimizer
    done = (step + 1) * schedule.batch_tokens
    if done < schedule.warmup_tokens:
        return optimizer.lr * done / schedule.warmup_tokens
    last = schedule.steps * schedule.batch_tokens
    part = 1.0 if last == schedule.warmup_tokens else (done - schedule.warmup_tokens) / (last - schedule.warmup_tokens)
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * (1 + math.cos(math.pi * part)) / 2


class Run:
    def __init__(self, recipe: Recipe, world: engine.World, *, quiet: bool) -> None:
        self.recipe, self.world, self.quiet = recipe, world, quiet
        if recipe.sequences % world.size:
            raise RecipeError(
                f"schedule.batch_tokens: {world.size} processes can't share a step's {recipe.sequences} sequences equally"
            )
        self.source = self._open_source()
        config = recipe.model.config(self.source.batches.vocab_size, self.source.end_of_text)
        self.config, self.folder = config, recipe.folder
        self.found: Any = world.agree(self._find() if world.main else None)
        if isinstance(self.found, str):
            raise RecipeError(self.found)
        self.model = engine.build(config, recipe.seed, recipe.parallel, world)
        self.optimizer = engine.make_optimizer(self.model, recipe.optimizer)
        self.guardian = Guardian(recipe.guard)
        self.step = 0
        self.stopping = False
        self.last: dict[str, Any] = {}

    def _open_source(self) -> Source:
        """The main process first: it may have to prepare the built-in text."""
        source = open_source(self.recipe) if self.world.main else None
        self.world.agree(None)
        return source if source is not None else open_source(self.recipe)

    def _find(self) -> Any:
        """The checkpoint to go on from, None for a new run, or why the folder can't be used, as a message."""
        notes: list[str] = []
        try:
            found = checkpoint.newest_whole(self.folder, notes.append)
        except checkpoint.CheckpointError as error:
            return "\n".join([*notes, str(error)])
        self.notes = notes
        if found is None:
            if self.folder.exists() and any(p.name not in OURS for p in self.folder.iterdir()):
                return f"out: {self.folder} exists and is no run of ours; choose another --out"
            return None
        path, progress = found
        old, new = recipe_from_dict(progress.recipe).fixed(), self.recipe.fixed()
        changed = [f"{key} was {old.get(key)!r}, is {new[key]!r}" for key in new if old.get(key) != new[key]]
        if changed:
            return (
                f"{self.folder} holds a run of another recipe ({'; '.join(changed)}); "
                "give the old values to go on with it, or another --out for a new run"
            )
        if progress.data != self.source.batches.fingerprint:
            return f"data.path: {self.folder} holds a run on other data; give the old data to go on with it, or another --out"
        return path, progress

    def _resume(self) -> None:
        state = engine.training_state(self.model, self.optimizer) | {"rng": torch.get_rng_state()}
        path, progress = self.found
        checkpoint.load(path, state)
        torch.set_rng_state(state["rng"])
        self.step, self.guardian.state = progress.step, progress.guard

    def go(self) -> dict[str, Any]:
        recipe, world = self.recipe, self.world
        steps = recipe.schedule.steps
        if self.found is not None:
            self._resume()
        display = Display(recipe.name, steps, self.step, quiet=self.quiet)
        writers: list[Any] = []
        if world.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / RECIPE).write_text(json.dumps(recipe.to_dict(), indent=1))
            writers = [
                MetricsFile(self.folder, self.step or -1),
                Tracker(recipe.log.tracker, self.folder, recipe.name, recipe.to_dict()),
            ]
            if self.step == 0:
                count = sum(p.numel() for p in self.model.parameters())
                facts = environment(world.device.type, torch.get_num_threads())
                writers[0].write({"kind": "start", "step": 0, "parameters": count, "processes": world.size, **facts})
            for note in self.notes:
                display.message(note)
            self._introduce(display)
        saver = checkpoint.Checkpoints(
            self.folder, keep=recipe.checkpoint.keep, keep_every=recipe.checkpoint.keep_every, main=world.main
        )

        def write(row: dict[str, Any]) -> None:
            for writer in writers:
                writer.write(row)

        try:
            with self._signals(display), ThreadPoolExecutor(1) as pool:
                self._steps(display, saver, write, pool)
        except Halt as halt:
            write({"kind": "event", "step": self.step, "message": str(halt)})
            display.message(str(halt))
            raise
        finally:
            saver.wait()
            if (problem := saver.take_error()) is not None:
                write({"kind": "event", "step": self.step, "message": problem})
                display.message(problem)
            for writer in writers:
                writer.close()
            display.close()
        if self.step < steps:
            display.message(f"stopped after {self.step} of {steps} steps; the same command goes on from here")
        elif world.main and not (self.folder / "model").exists():
            export(self.folder, self.folder / "model")
            display.message(f'model in {self.folder / "model"}; try: rla generate {self.folder / "model"} --prompt "..."')
        return self.last

    def _introduce(self, display: Display) -> None:
        world, count = self.world, sum(p.numel() for p in self.model.parameters())
        processes = f"{world.size} processes" if world.size > 1 else "one process"
        mixers = " and ".join(dict.fromkeys(self.config.mixers))
        display.message(
            f"{self.recipe.name}: {mixers}, {count / 1e6:.2f}M parameters, {self.recipe.schedule.total_tokens:,} tokens in "
            f"{self.recipe.schedule.steps} steps, {processes} on {world.device}, {self.recipe.parallel.precision}; "
            f"run in {self.folder}"
        )
        if self.step:
            display.message(f"going on from step {self.step}")

    @contextmanager
    def _signals(self, display: Display) -> Iterator[None]:
        """The first SIGINT or SIGTERM ends the run after its step, with a checkpoint; a later Ctrl-C at once.

        torchrun passes a Ctrl-C on to processes that the terminal has already told: one of the same moment is no second one.
        """
        first = 0.0

        def handle(number: int, frame: object) -> None:
            nonlocal first
            if self.stopping:
                if number == signal.SIGINT and time.monotonic() - first > SAME_MOMENT:
                    raise KeyboardInterrupt
                return
            self.stopping, first = True, time.monotonic()
            display.message(f"{signal.Signals(number).name}: saving after this step")

        try:
            old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread, which alone gets signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _steps(self, display: Display, saver: checkpoint.Checkpoints, write: Any, pool: ThreadPoolExecutor) -> None:
        recipe, log = self.recipe, self.recipe.log
        steps, every = recipe.schedule.steps, recipe.checkpoint.every
        limit = self._limit()
        clock, since, tokens = time.perf_counter(), self.step, recipe.schedule.batch_tokens
        batches = self._prefetch(pool, steps)
        while self.step < steps:
            lr = learning_rate(recipe, self.step)
            loss, norm, skipped, stop = self._train_step(next(batches), lr)
            self.step += 1
            if skipped is not None:
                write({"kind": "event", "step": self.step, "message": skipped})
                display.message(skipped)
            row = None
            if self.step % log.every == 0 or self.step == steps:
                now = time.perf_counter()
                rate, clock, since = (self.step - since) * tokens / (now - clock), now, self.step
                left = datetime.timedelta(seconds=int((steps - self.step) * tokens / rate))
                row = {
                    "kind": "train",
                    "step": self.step,
                    "tokens": self.step * tokens,
                    "loss": loss,
                    "lr": lr,
                    "grad_norm": norm,
                }
                row |= {"tokens_per_second": rate, "utilization": rate / limit["rate"], "utilization_of": limit["of"]}
                self.last = row
                write(row)
                row = row | {"left": str(left)}
            display.step(self.step, row)
            pause = time.perf_counter()
            last = self.step == steps
            if log.evaluate_every and self.source.evaluation is not None and (self.step % log.evaluate_every == 0 or last):
                result = {
                    "kind": "evaluation",
                    "step": self.step,
                    **evaluate(self.model, self.source, self.world, log.evaluate_tokens),
                }
                self.last = result
                write(result)
                display.message(
                    f"step {self.step}: validation "
                    + "  ".join(f"{k} {v:.4f}" for k, v in result.items() if isinstance(v, float))
                )
            if log.probe_every and (self.step % log.probe_every == 0 or last or self.step == 1):
                write({"kind": "probe", "step": self.step, "layers": self._probe()})
            if last or stop or (every and self.step % every == 0):
                self._save(saver)
            if (problem := saver.take_error()) is not None:
                write({"kind": "event", "step": self.step, "message": problem})
                display.message(problem)
            clock += time.perf_counter() - pause  # tokens per second are those of training
            if stop and not last:
                return

    def _save(self, saver: checkpoint.Checkpoints) -> None:
        state = engine.training_state(self.model, self.optimizer) | {"rng": torch.get_rng_state()}
        fingerprint = self.source.batches.fingerprint
        saver.save(state, checkpoint.Progress(self.step, self.recipe.to_dict(), fingerprint, self.guardian.state))

    def _parts(self) -> list[range]:
        """This process' rows of a step, as many at a time as the recipe says."""
        rows, micro = self.world.rows(self.recipe.sequences), self.recipe.parallel.micro_sequences
        return [range(i, min(i + micro, rows.stop)) for i in range(rows.start, rows.stop, micro)]

    def _prefetch(self, pool: ThreadPoolExecutor, steps: int) -> Iterator[list[Batch]]:
        """The batches of each step, read while the step before it runs."""

        def read(step: int) -> list[Batch]:
            return [self.source.batches.batch_at(step, rows) for rows in self._parts()]

        coming = pool.submit(read, self.step)
        for step in range(self.step, steps):
            batch, coming = coming.result(), pool.submit(read, min(step + 1, steps - 1))
            yield batch

    def _train_step(self, parts: list[Batch], lr: float) -> tuple[float, float, str | None, bool]:
        """Loss of the batch, norm of its gradient, why the step was skipped, and whether anyone asked to stop."""
        counted = sum(int((part.labels >= 0).sum()) for part in parts)
        count = self.world.sum([counted])[0] if self.world.size > 1 else float(counted)
        losses = []
        for i, part in enumerate(parts):
            engine.accumulate(self.model, i == len(parts) - 1)
            loss = self.model(**model_inputs(part, self.world.device), num_items_in_batch=count, use_cache=False).loss
            (loss * self.world.size).backward()  # gradients are averaged over processes, and the loss is a part of the whole
            losses.append(loss.detach())
        own = torch.stack(losses).tolist()
        norm = engine.clip_gradients(self.model, self.recipe.optimizer.clip).item()
        total, stop = self.world.sum([sum(own), float(self.stopping)])
        problem = self.guardian.judge(total, norm)
        if problem is None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        else:
            where = self._culprit(own)
            problem = self.guardian.decide(f"step {self.step + 1}: {problem}; {where}")
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm, problem, stop > 0

    def _culprit(self, losses: list[float]) -> str:
        """The part of this process' batch that went worst, in words."""
        worst = max(range(len(losses)), key=lambda i: math.inf if math.isnan(losses[i]) else losses[i])
        rows = self._parts()[worst]
        first = self.source.batches.describe(self.step, rows.start)
        return f"of the batch, rows {rows.start} to {rows.stop - 1} have the worst loss; {first}"

    def _probe(self) -> list[dict[str, float]]:
        batch = self.source.batches.batch_at(self.step, range(1))
        return probe(self.model, batch.input_ids.to(self.world.device))

    def _limit(self) -> dict[str, Any]:
        """Tokens per second that the hardware's peak would allow: of the GPU as published, of the CPU as sgemm measures it."""
        flops = sum(training_flops(self.config, self.recipe.length).values())
        if self.world.device.type == "cuda":
            name = torch.cuda.get_device_name()
            peak = peak_flops(name, self.recipe.parallel.precision)
            return {"rate": math.nan if peak is None else peak * self.world.size / flops, "of": "peak"}
        sgemm = Sgemm("cpu")
        sgemm.sample()
        rate = self.world.sum([sgemm.gflops[0] * 1e9])[0]
        return {"rate": rate / flops, "of": "sgemm"}
