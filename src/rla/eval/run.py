"""`rla eval MODEL --suite paper`: the paper's evaluations, on the hub's data or on files, with results as JSON.

Tasks run one after the other and the result file is written after each, so that an evaluation that was stopped goes on with
--resume. A task whose data is missing is named, the others run; the exit code is 1 then, and 2 for what can't be run at all.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from ..bench.kernels import make_console, make_progress
from . import needle, results
from .needle import Grid
from .sources import BrokenData, MissingData
from .tasks import EvalTask, Suite, build, choose, files, manager

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
SAME_RUN = ("limit", "data", "max_length", "seed", "needle")


def main(
    model: Annotated[str, tyro.conf.Positional],
    *,
    suite: Suite | None = None,
    tasks: str = "",
    limit: int | None = None,
    data: Path | None = None,
    batch_size: int = 8,
    device: str | None = None,
    dtype: Dtype = "auto",
    seed: int = 0,
    out: Path | None = None,
    resume: bool = False,
    max_length: int | None = None,
    reuse: bool = True,
    trust_remote_code: bool = False,
    needle_lengths: tuple[int, ...] = needle.LENGTHS,
    needle_depths: int = needle.DEPTHS,
    needle_samples: int = needle.SAMPLES,
    needle_haystack: Path | None = None,
) -> int:
    """Evaluate a language model on the columns of the paper's Tables 2 to 4, through lm-evaluation-harness.

    Example: rla eval ./my-model --suite language --data ./data --limit 100 --out my-model.json

    Args:
        model: a folder written by save_pretrained, or a name on the Hugging Face Hub, of any causal model.
        suite: which tasks: language, reasoning, recall, needle, or all of the paper's.
        tasks: names, with commas between them; more than the suite's, or instead of one.
        limit: samples of each task, the first ones. Default: all. Such results are marked.
        data: folder with files of the tasks' data, to be used instead of the hub; see docs/evaluation.md.
        batch_size: rows that are computed at a time.
        device: such as cuda:0. Default: a GPU if there is one.
        dtype: of the weights. auto: as they were saved.
        seed: of the needles, and of what else is random.
        out: the result file. Default: results/eval/MODEL.json.
        resume: go on with an existing result file: its tasks are kept.
        max_length: tokens of a sequence at most. Default: no bound for linear models, the model's own for others.
        reuse: compute a prefix that several requests share once (our models).
        trust_remote_code: run code that comes with a model which is not of this package.
        needle_lengths: tokens of the haystacks.
        needle_depths: places of the needle, from the beginning to the end.
        needle_samples: haystacks for each length.
        needle_haystack: a text file to hide needles in. Default: made-up sentences.
    """
    console = make_console()
    try:
        for option, number in (("--limit", limit), ("--batch-size", batch_size), ("--max-length", max_length)):
            if number is not None and number < 1:
                raise ValueError(f"{option}: expected at least 1; got {number}")
        if data is not None and not data.is_dir():
            raise ValueError(f"--data: no folder {str(data)!r}")
        if needle_haystack is not None and not needle_haystack.is_file():
            raise ValueError(f"--needle-haystack: no file {str(needle_haystack)!r}")
        haystack = None if needle_haystack is None else str(needle_haystack)
        grid = Grid(tuple(needle_lengths), needle_depths, needle_samples, seed, haystack)
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        chosen = choose(suite, names, data=data is not None)
        if data is not None:  # read when huggingface_hub and datasets are imported
            os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        from .opened import open_model

        _quiet()
        opened = open_model(
            model,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            max_length=max_length,
            reuse=reuse,
            trust_remote_code=trust_remote_code,
        )
        out = out or Path("results/eval") / f"{opened.summary['name'].replace('/', '--')}.json"
        run = _Run(model, opened, grid, limit, data, max_length, out, console)
        run.begin(resume)
    except (ValueError, OSError) as error:
        print(f"rla eval: {error}", file=sys.stderr)
        return 2
    return run.all(chosen)


def _quiet() -> None:
    import logging

    from transformers.utils import logging as transformers_logging

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


class _Run:
    """One evaluation: the model, the settings that its numbers depend on, and the result file."""

    def __init__(
        self,
        name: str,
        opened: Any,
        grid: Grid,
        limit: int | None,
        data: Path | None,
        max_length: int | None,
        out: Path,
        console: Console,
    ) -> None:
        from .opened import surroundings

        self.opened, self.limit, self.data, self.out, self.console = opened, limit, data, out, console
        self.seed = grid.seed
        shown = {"lengths": list(grid.lengths), "depths": grid.depths, "samples": grid.samples, "haystack": grid.haystack}
        self.metadata = {"pretrained": name, "needle": {**shown, "seed": grid.seed}, **({"data": str(data)} if data else {})}
        settings = {"limit": limit, "data": "hub" if data is None else "files", "max_length": max_length, "seed": grid.seed}
        self.result: dict[str, Any] = {
            "kind": results.KIND,
            "format": results.FORMAT,
            "model": opened.summary,
            "run": {**settings, "needle": shown, "batch_size": opened.lm.batch_size, "device": str(opened.lm.device)},
            "command": shlex.join(["rla", *sys.argv[1:]]),
            "environment": surroundings(str(opened.lm.device)),
            "tasks": {},
            "missing": {},
        }

    def begin(self, resume: bool) -> None:
        """Take over what an existing file holds, if it is of the same run; ValueError if it is not."""
        if not self.out.exists():
            return
        if not resume:
            raise ValueError(f"--out: {self.out} exists; go on with it with --resume, or name another file")
        old = results.read(self.out)
        for key, before, now in (
            ("the weights", old["model"]["sha256"], self.opened.summary["sha256"]),
            ("the dtype", old["model"]["dtype"], self.opened.summary["dtype"]),
            *((f"--{key.replace('_', '-')}", old["run"].get(key), self.result["run"][key]) for key in SAME_RUN),
        ):
            if before != now:
                raise ValueError(
                    f"--resume: {self.out} is of another run: {key} differ ({before}, now {now}); name another file"
                )
        self.result["tasks"] = old["tasks"]

    def all(self, chosen: list[EvalTask]) -> int:
        from lm_eval.utils import set_torch_seed

        set_torch_seed(self.seed)
        known = manager(chosen, self.metadata)
        todo = [task for task in chosen if task.name not in self.result["tasks"]]
        problems: dict[str, str] = {}
        try:
            with make_progress(self.console) if self.opened.is_ours else nullcontext() as progress:
                for task in todo:
                    try:
                        record = self.one(task, known, progress)
                    except (MissingData, BrokenData) as error:
                        problems[task.name] = str(error)
                        continue
                    self.result["tasks"][task.name] = record
                    results.write(self.out, self.result)
        except KeyboardInterrupt:
            self.console.print(f"interrupted: finished tasks are in {self.out}; go on with --resume")
            return 130
        self.result["missing"] = problems
        if self.result["tasks"]:
            results.write(self.out, self.result)
        self.show(chosen)
        for name, problem in problems.items():
            print(f"rla eval: {name} was not run: {problem}", file=sys.stderr)
        return 1 if problems else 0

    def one(self, task: EvalTask, known: Any, progress: Any) -> dict[str, Any]:
        """Run a task; what the result file says of it."""
        import lm_eval

        lm, paths = self.opened.lm, []
        if self.data is not None:
            paths = [str(path.relative_to(self.data)) for path in files(task, known, self.data)]
        try:
            objects = build(task, known, self.data)
        except (OSError, ValueError) as error:
            why = str(error).split("\n")[0]
            raise MissingData(why if self.data else f"its data can't be fetched ({why}); bring it with --data") from error
        for built in objects.values():
            if built.get_config("num_fewshot") is None:
                built.set_config(key="num_fewshot", value=0)
            built.set_fewshot_seed(seed=self.seed)
        start = time.perf_counter()
        if self.opened.is_ours:
            lm.reset_tokens()
            bar = progress.add_task(task.name, total=None)
            lm.on_progress(lambda done: progress.advance(bar, done))
        with _without_bars() if self.opened.is_ours else nullcontext():
            found = lm_eval.evaluate(lm, {"tasks": objects}, limit=self.limit, bootstrap_iters=0, log_samples=True)
        if self.opened.is_ours:
            progress.remove_task(bar)
        assert found is not None
        samples = {name: found["samples"][name] for name in objects}
        record: dict[str, Any] = {
            "version": next(iter(found["versions"].values())),
            "num_fewshot": next(iter(found["n-shot"].values())),
            "n": sum(map(len, samples.values())),
            "metrics": _metrics(objects, samples),
            "files": paths,
            "seconds": round(time.perf_counter() - start, 2),
        }
        if self.opened.is_ours:
            record["tokens"] = lm.tokens.as_dict()
        if "needle" in task.suites:
            (rows,) = samples.values()
            record["grid"] = needle.cells(rows)
            picture = self.out.with_name(f"{self.out.stem}-{task.name}.png")
            needle.heat_map(picture, record["grid"], f"{self.opened.summary['name']}: {task.name}")
            record["figure"] = picture.name
        return record

    def show(self, chosen: list[EvalTask]) -> None:
        table = Table(title=f"{self.opened.summary['name']}{f', the first {self.limit} samples' if self.limit else ''}")
        for name in ("task", "metric", "value", "standard error", "n", "tokens computed", "of those asked"):
            table.add_column(name, justify="left" if name in ("task", "metric") else "right", no_wrap=True)
        for task in chosen:
            record = self.result["tasks"].get(task.name)
            if record is None:
                continue
            tokens = record.get("tokens")
            for metric, x in record["metrics"].items():
                error = "" if x["stderr"] is None else f"{x['stderr']:.4g}"
                spent = [f"{tokens['computed']:,}", f"{1 - tokens['saved']:.0%}"] if tokens else ["", ""]
                table.add_row(
                    task.name,
                    metric,
                    f"{x['value']:,.{4 if abs(x['value']) < 1000 else 0}f}",
                    error,
                    f"{record['n']:,}",
                    *spent,
                )
        if table.row_count:
            self.console.print(table)
            self.console.print(f"written: {self.out}", soft_wrap=True)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hold back the harness's own progress bars, which can't be switched off; what else goes to standard error comes after."""
    held = StringIO()
    try:
        with redirect_stderr(held):
            yield
    finally:
        sys.stderr.writelines(line for line in held.getvalue().splitlines(keepends=True) if "it/s" not in line and line.strip())


def _metrics(objects: dict[str, Any], samples: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Value and standard error of each metric over all samples of a task, or of a group's tasks together."""
    from lm_eval.api.metrics import mean

    first = next(iter(objects.values()))
    higher, found = first.higher_is_better(), {}
    for metric, aggregate in first.aggregation().items():
        items = [sample[metric] for rows in samples.values() for sample in rows if metric in sample]
        if not items:
            continue
        name = "mean" if aggregate is mean or aggregate.__name__ == "mean" else aggregate.__name__
        value, error = float(aggregate(items)), results.standard_error(items, name)
        found[metric] = {"value": value, "stderr": error, "higher_is_better": bool(higher[metric])}
    return found
