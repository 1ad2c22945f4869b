"""Training runs as a report sees them: read from their folders, and grouped by all that makes them what they are but the seed.

A group is one method with one set of settings; its label is the mixer, with the settings that tell it from other groups of the
same mixer. Groups are compared with what they are without the residual, or with the method that they vary, seed by seed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..bench.ratios import PAIRS
from ..train.metrics import METRICS, read_metrics
from ..train.recipe import Recipe, recipe_from_dict
from .stats import Difference, Spread, paired, smooth

ORDER = ("softmax", "linear", "retnet", "mamba2", "gla", "sgla", "rla", "deltanet", "gdn", "rdn")
SMOOTHING = 25  # a training curve is smoothed over one part in so many


@dataclass(frozen=True)
class Run:
    folder: Path
    recipe: Recipe
    rows: tuple[Mapping[str, Any], ...]

    @property
    def mixer(self) -> str:
        return " and ".join(dict.fromkeys(self.recipe.model.mixer))

    @property
    def is_recall(self) -> bool:
        """Whether it is of MQAR rather than of text."""
        return self.recipe.data.path == "mqar"

    @property
    def steps(self) -> int:
        """Steps done."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def finished(self) -> bool:
        return self.steps >= self.recipe.schedule.steps

    @cached_property
    def final(self) -> Mapping[str, float]:
        """Of the last evaluation, and the smoothed training loss (train_loss); what there is not is missing."""
        found: dict[str, float] = {}
        evaluations = self.of("evaluation")
        if evaluations:
            found |= {key: value for key, value in evaluations[-1].items() if isinstance(value, float)}
        curve = self.training
        if curve:
            found["train_loss"] = curve[max(curve)]
        return found

    @cached_property
    def training(self) -> dict[int, float]:
        """The smoothed training loss by step."""
        rows = self.of("train")
        return dict(
            zip([row["step"] for row in rows], smooth([row["loss"] for row in rows], len(rows) / SMOOTHING), strict=True)
        )

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]

    def values(self, kind: str, key: str) -> dict[int, float]:
        """By step."""
        return {row["step"]: row[key] for row in self.of(kind) if key in row}

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the run."""
        rates = [row["tokens_per_second"] for row in self.of("train")]
        return statistics.median(rates) if rates else None

    @cached_property
    def parameters(self) -> int | None:
        """As the run wrote them down."""
        return next((row["parameters"] for row in self.of("start")), None)


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed, by seed."""

    label: str
    mixer: str
    runs: Mapping[int, Run]
    settings: Mapping[str, Any]

    @property
    def batch_tokens(self) -> int:
        return next(iter(self.runs.values())).recipe.schedule.batch_tokens

    @property
    def whole(self) -> dict[int, Run]:
        """The runs that are finished, of which tables are made."""
        return {seed: run for seed, run in self.runs.items() if run.finished}

    @property
    def shown(self) -> Mapping[int, Run]:
        """The runs that figures show: the finished ones, or, as long as there is none, all."""
        return self.whole or self.runs

    def final(self, key: str) -> dict[int, float]:
        """By seed, of finished runs."""
        return {seed: run.final[key] for seed, run in self.whole.items() if key in run.final}

    def spread(self, key: str) -> Spread | None:
        values = list(self.final(key).values())
        return Spread.of(values) if values else None

    def curve(self, kind: str, key: str) -> dict[int, Spread]:
        """Mean and range over the seeds at each step that all of them have; the training loss is smoothed."""
        smoothed = (kind, key) == ("train", "loss")
        return over_seeds([run.training if smoothed else run.values(kind, key) for run in self.shown.values()])


def over_seeds(curves: Sequence[Mapping[int, float]]) -> dict[int, Spread]:
    """At each step that all curves have."""
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return {step: Spread.of([curve[step] for curve in curves]) for step in sorted(common)}


def read_run(folder: Path) -> Run:
    """ValueError, naming the file, for what is no run or has been damaged."""
    path = folder / "recipe.json"
    if not path.exists():
        raise ValueError(f"{folder} is no run: it has {METRICS}, but no recipe.json")
    try:
        recipe = recipe_from_dict(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    rows = read_metrics(folder)
    if not rows:
        raise ValueError(f"{folder / METRICS} is empty: the run has not come to its first row yet")
    return Run(folder, recipe, tuple(rows))


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, or all runs below it."""
    if (folder / METRICS).exists():
        return [folder]
    return sorted(path.parent for path in folder.rglob(METRICS))


def settings(run: Run) -> dict[str, Any]:
    """All that makes a run what it is, but mixer and seed."""
    fields = run.recipe.fixed() | {"data.path": run.recipe.data.path}
    return {key: value for key, value in fields.items() if key not in ("seed", "model.mixer")}


def subject(run: Run) -> tuple[Any, ...]:
    """What a run is evaluated on; only runs of the same subject can be compared."""
    data = run.recipe.data
    if run.is_recall:
        return ("mqar", data.mqar.vocab_size)
    return (data.path, data.validation, data.tokenizer)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups in the order of methods; ValueError for two runs that should be the same."""
    found: dict[tuple[str, str], dict[int, Run]] = {}
    for run in runs:
        same = found.setdefault((run.mixer, json.dumps(settings(run), sort_keys=True)), {})
        other = same.get(run.recipe.seed)
        if other is not None:
            raise ValueError(f"{other.folder} and {run.folder} are the same run: {run.mixer}, seed {run.recipe.seed}; name one")
        same[run.recipe.seed] = run
    kinds = {key: settings(next(iter(same.values()))) for key, same in found.items()}
    groups = []
    for (mixer, key), same in found.items():
        rivals = [kinds[other] for other in found if other[0] == mixer]
        label = mixer + _apart(kinds[mixer, key], rivals)
        groups.append(Group(label, mixer, dict(sorted(same.items())), kinds[mixer, key]))
    return sorted(groups, key=_rank)


def _apart(own: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]]) -> str:
    """As many settings as tell a group from its rivals, the learning rate before all others."""
    different = [key for key in own if any(other[key] != own[key] for other in rivals)]
    different.sort(key=lambda key: key != "optimizer.lr")
    words, left = "", [other for other in rivals if other != own]
    for key in different:
        if not left:
            break
        still = [other for other in left if other[key] == own[key]]
        if len(still) < len(left):
            words += f", {key.split('.')[-1]} {own[key]}"
        left = still
    return words


def _rank(group: Group) -> tuple[int, int, str, float, str]:
    method, _, variant = group.mixer.partition("-")
    place = ORDER.index(method) if method in ORDER else len(ORDER)
    return (1 if variant else 0, place, group.mixer, group.settings["optimizer.lr"], group.label)


def best(groups: Sequence[Group]) -> list[Group]:
    """For each mixer the group with the lowest mean validation loss, or the highest accuracy for MQAR."""
    kept: dict[str, tuple[float, Group]] = {}
    for group in groups:
        recall = next(iter(group.runs.values())).is_recall
        spread = group.spread("accuracy" if recall else "loss")
        score = math.inf if spread is None or math.isnan(spread.mean) else -spread.mean if recall else spread.mean
        if group.mixer not in kept or score < kept[group.mixer][0]:
            kept[group.mixer] = (score, group)
    return [group for _, group in kept.values()]


def pairs(groups: Sequence[Group], baseline: str | None = None) -> list[tuple[Group, Group]]:
    """What is compared with what: all with `baseline` if it is given. Of several settings, equal ones belong together."""
    found = []
    for group in groups:
        base = baseline or _baseline(group.mixer)
        rivals = [other for other in groups if other.mixer == base and other is not group]
        if len(rivals) > 1:
            rivals = [other for other in rivals if other.settings == group.settings]
        found += [(group, other) for other in rivals[:1]]
    return found


def _baseline(mixer: str) -> str | None:
    """The method without its residual, or the method that a variant varies."""
    return mixer.split("-")[0] if "-" in mixer else dict(PAIRS).get(mixer)


def difference(group: Group, base: Group, key: str) -> Difference | None:
    """Of a final value, seed by seed."""
    return paired(group.final(key), base.final(key))
