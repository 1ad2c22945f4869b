"""Recall of the language models: `rla eval` with a scale's suite, the needle grid at least; the paper's numbers beside them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..eval import results, run
from ..eval.results import paper_numbers
from ..report import evaluation
from ..report.page import Section, Verdict
from ..report.runs import Run
from ..report.stats import paired
from .claims import FLOOR, RULE, UNTESTABLE, judge
from .scales import Evaluation
from .store import Store
from .studies import PAPER_NAMES
from .timing import MeasureError, interruptible

RESULT = "eval.json"
NEEDLE = ("needle", "acc")


def evaluate(
    runs: Iterable[Run], plan: Evaluation, store: Store, say: Callable[[str], Any], data: Path | None = None
) -> dict[Path, Run]:
    """Result files of the finished runs, evaluated now if there is none yet."""
    found = {}
    for chosen in runs:
        if not chosen.finished or not (plan.every_seed or chosen.recipe.seed == 0):
            continue
        inputs = {
            "run": chosen.folder.name,
            "suite": plan.suite,
            "needle": dataclasses.asdict(plan.grid),
            "data": None if data is None else str(data),
        }

        def make(folder: Path, chosen: Run = chosen) -> None:
            said = io.StringIO()
            name = f"{chosen.mixer}, seed {chosen.recipe.seed}"
            with say(f"rla eval --suite {plan.suite}: {name}"), interruptible(), contextlib.redirect_stdout(said):
                code = run.main(
                    str(chosen.folder / "model"),
                    suite=plan.suite,
                    data=data,
                    out=folder / RESULT,
                    needle_lengths=plan.grid.lengths,
                    needle_depths=plan.grid.depths,
                    needle_samples=plan.grid.samples,
                    seed=plan.grid.seed,
                )
            if code == 2 or not (folder / RESULT).exists():
                raise MeasureError(f"`{again(chosen, plan, data)}` failed with exit code {code}. {said.getvalue().strip()}")
            result = results.read(folder / RESULT)
            result["model"]["name"], result["command"] = name, again(chosen, plan, data)
            results.write(folder / RESULT, result)

        found[store.files("eval", inputs, make) / RESULT] = chosen
    return found


def again(chosen: Run, plan: Evaluation, data: Path | None) -> str:
    """The command that evaluates the run by itself."""
    words = ["rla", "eval", str(chosen.folder / "model"), "--suite", plan.suite, "--needle-lengths"]
    words += [
        *map(str, plan.grid.lengths),
        "--needle-depths",
        str(plan.grid.depths),
        "--needle-samples",
        str(plan.grid.samples),
    ]
    return shlex.join([*words, *(["--data", str(data)] if data else [])])


def sections(found: Mapping[Path, Run]) -> list[Section]:
    """The report's sections on each method's first seed, with verdicts on the needles of all seeds."""
    if not found:
        return [Section("Evaluations", ("No model has been trained yet.",))]
    scores: dict[str, dict[int, float]] = {}
    for path, chosen in found.items():
        record = results.read(path)["tasks"].get(NEEDLE[0])
        if record is not None:
            scores.setdefault(chosen.mixer, {})[chosen.recipe.seed] = record["metrics"][NEEDLE[1]]["value"]
    shown: dict[str, Path] = {}
    for path, chosen in found.items():
        shown.setdefault(chosen.mixer, path)
    made = evaluation.sections(list(shown.values()))
    verdicts = tuple(needle_verdicts(scores))
    body = (*made[-1].body, RULE)
    if len(shown) < len(found):
        body = (*body, f"Tables and figures have each method's first seed; verdicts count all, {len(found)} models.")
    return [*made[:-1], dataclasses.replace(made[-1], verdicts=verdicts, body=body)]


def needle_verdicts(scores: Mapping[str, Mapping[int, float]]) -> list[Verdict]:
    """Of needles found, by method and seed."""
    printed, found = paper_numbers()["3"]["models"], []
    column = [column.header for column in results.COLUMNS[3]].index("NIAH")
    for ours, theirs in (("rla", "sgla"), ("rdn", "gdn")):
        if ours not in scores or theirs not in scores:
            continue
        names = PAPER_NAMES[ours], PAPER_NAMES[theirs]
        claim = f"{names[0]} finds more needles in a haystack than {names[1]}."
        paper = f"{printed[names[0]][column]} against {printed[names[1]][column]}"
        means = [_mean(scores[name].values()) for name in (ours, theirs)]
        difference = paired(scores[ours], scores[theirs])
        evidence = f"{100 * means[0]:.1f} against {100 * means[1]:.1f} per cent"
        if difference is not None and difference.interval is not None:
            low, high = (100 * end for end in difference.interval)
            evidence += f", difference {100 * difference.mean:+.1f} ({low:+.1f} to {high:+.1f}, n = {difference.n})."
        else:
            evidence += ", one seed."
        outcome = judge(difference, "higher")
        if max(means) <= FLOOR:
            outcome, evidence = UNTESTABLE, f"{evidence} Models of this size and training find next to none."
        found.append(Verdict(claim, outcome, evidence, paper))
    return found


def _mean(values: Iterable[float]) -> float:
    numbers: Sequence[float] = list(values)
    return sum(numbers) / len(numbers)
