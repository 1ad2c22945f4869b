"""Sections on training runs: text (loss, bits per byte, paired differences, layers) and MQAR (accuracy over pairs)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from . import figures
from .page import Figure, Section, Table
from .runs import Group, Run, best, difference, group_runs, pairs, subject
from .stats import CONFIDENCE, Difference

SEEDS = "Lines are means over seeds, bands reach from the lowest seed to the highest."
INTERVAL = (
    f"Differences are taken seed by seed; the interval is the paired t interval at {100 * CONFIDENCE:.0f} %, n the number of "
    "seeds. With one seed there is none. An interval that leaves out 0 is marked *."
)


def sections(runs: Sequence[Run], *, command: str, only_best: bool = False, baseline: str | None = None) -> list[Section]:
    """A section for each subject: runs on other data can't be compared. `command` is what makes them."""
    subjects: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        subjects.setdefault(subject(run), []).append(run)
    made = []
    for number, same in enumerate(subjects.values()):
        every = group_runs(same)
        groups = best(every) if only_best else every
        prefix = "" if len(subjects) == 1 else f"{number + 1}-"
        make = _recall if same[0].is_recall else _text
        made.append(make(groups, every, prefix, baseline, command))
    return made


def _text(groups: list[Group], every: list[Group], prefix: str, baseline: str | None, command: str) -> Section:
    data = next(iter(groups[0].runs.values())).recipe.data
    title = f"Language modelling on {'the built-in text' if data.path == 'builtin' else Path(data.path).name}"
    compared = pairs(groups, baseline)
    names = _listed([group.label for group in groups])
    drawn = [
        Figure(
            f"{prefix}train-loss",
            figures.curves(groups, "train", "loss", "training loss (nats per token)"),
            f"Training loss over tokens for {names}. The final values are in the table of results.",
            f"Training loss, smoothed. {SEEDS}",
        )
    ]
    if any(run.of("evaluation") for group in groups for run in group.runs.values()):
        drawn.append(
            Figure(
                f"{prefix}validation-loss",
                figures.curves(groups, "evaluation", "loss", "validation loss (nats per token)"),
                f"Validation loss over tokens for {names}. The final values are in the table of results.",
                "Validation loss. The axis begins after the first part of the run.",
            )
        )
    if any(figures.paired_curve(group, base, "loss") for group, base in compared):
        drawn.append(
            Figure(
                f"{prefix}differences",
                figures.differences(compared, "loss", "difference of validation loss"),
                f"Difference of validation loss from the baseline over tokens for "
                f"{_listed([f'{a.label} less {b.label}' for a, b in compared])}. The table of differences has the last values.",
                "Validation loss less that of the baseline at the same seed. Below 0 is better than the baseline.",
            )
        )
    drawn += _layers(groups, prefix)
    tables = [_results(every)]
    tables += _differences(compared, {"loss": "validation loss", "bits_per_byte": "bits per byte"})
    return Section(title, _body(groups, every), (), tuple(drawn), tuple(tables), _notes(every), (command,))


def _layers(groups: list[Group], prefix: str) -> list[Figure]:
    found = []
    norm = figures.layers(groups, "output_norm", "output norm")
    if norm is not None:
        found.append(
            Figure(
                f"{prefix}output-norms",
                norm,
                f"Norm of each layer's attention output over steps, a panel for each of {_listed([g.label for g in groups])}.",
                "L2 norm of a token's attention output, before norm and gate; mean over tokens. All panels have one scale.",
                wide=True,
            )
        )
    clipped = figures.layers(groups, "clip_rate", "beyond the clip (%)", percent=True)
    if clipped is not None:
        found.append(
            Figure(
                f"{prefix}clip-rates",
                clipped,
                "Share of residuals beyond the clipping threshold in each layer over steps, a panel for each residual method.",
                "Share of residuals beyond [-c, c], whether or not the method clips them there.",
                wide=True,
            )
        )
    return found


def _recall(groups: list[Group], every: list[Group], prefix: str, baseline: str | None, command: str) -> Section:
    tasks = _tasks(every)
    names = _listed([group.label for group in groups])
    compared = pairs(groups, baseline)
    drawn = (
        Figure(
            f"{prefix}recall",
            figures.recall(groups, tasks, [task.replace("x", " x ") for task in tasks]),
            f"Share of right answers on each recall task for {names}. The values are in the table of accuracy.",
            f"Right answers after training. {SEEDS}",
        ),
        Figure(
            f"{prefix}recall-learning",
            figures.curves(groups, "evaluation", "accuracy", "right answers, all tasks (%)", percent=True),
            f"Share of right answers over training tokens for {names}.",
            "Right answers on all tasks together, over training.",
        ),
        *_layers(groups, prefix),
    )
    rows = []
    for group in every:
        cells = [_show(group, f"accuracy/{task}", ".1f", 100) for task in tasks]
        rows.append((group.label, _seeds(group), *cells, _show(group, "accuracy", ".1f", 100), *_speed(group)))
    headers = ("method", "seeds", *(task.replace("x", " x ") for task in tasks), "all", "tokens/s", "parameters")
    tables = [Table("Right answers in per cent, by pairs x length: mean (lowest to highest seed)", headers, tuple(rows))]
    measured = {f"accuracy/{task}": f"{task.replace('x', ' x ')}, points" for task in tasks}
    measured["accuracy"] = "all, points"
    tables += _differences(compared, measured)
    title = "Multi-query associative recall"
    return Section(title, _body(groups, every), (), drawn, tuple(tables), _notes(every), (command,))


def _tasks(groups: Sequence[Group]) -> list[str]:
    """Names like 8x64, by pairs, then by length."""
    keys = {key for group in groups for run in group.runs.values() for key in run.final}
    found = [key.split("/", 1)[1] for key in keys if re.fullmatch(r"accuracy/\d+x\d+", key)]
    return sorted(found, key=lambda task: tuple(map(int, task.split("x"))))


def _results(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        shown = [_show(group, key, ".4f") for key in ("loss", "bits_per_byte", "train_loss")]
        rows.append((group.label, _seeds(group), *shown, *_speed(group)))
    headers = ("method", "seeds", "validation loss", "bits per byte", "training loss", "tokens/s", "parameters")
    return Table("Results at the end of training: mean (lowest to highest seed)", headers, tuple(rows))


def _seeds(group: Group) -> str:
    return " ".join(map(str, group.whole)) or "none finished"


def _show(group: Group, key: str, form: str, scale: float = 1) -> str:
    spread = group.spread(key)
    return "" if spread is None else (spread * scale).show(form)


def _speed(group: Group) -> tuple[str, str]:
    rates = [run.tokens_per_second for run in group.runs.values() if run.tokens_per_second is not None]
    count = next((run.parameters for run in group.runs.values() if run.parameters is not None), None)
    return f"{statistics.median(rates):,.0f}" if rates else "", "" if count is None else f"{count:,}"


def _differences(compared: Sequence[tuple[Group, Group]], measured: dict[str, str]) -> list[Table]:
    rows = []
    for group, base in compared:
        for key, name in measured.items():
            found = difference(group, base, key)
            if found is not None:
                rows.append((f"{group.label} less {base.label}", name, *_difference(found, percent=key.startswith("accuracy"))))
    headers = ("methods", "measure", "difference", f"{100 * CONFIDENCE:.0f} % interval", "n", "relative")
    return [Table("Differences at the same seeds", headers, tuple(rows))] if rows else []


def _difference(found: Difference, *, percent: bool) -> tuple[str, str, str, str]:
    """Difference, interval, n and the difference relative to the baseline; shares in points of a hundred, without the last."""
    scale, form = (100, "+.1f") if percent else (1, "+.4f")
    ends = found.interval
    shown = "" if ends is None else f"{scale * ends[0]:{form}} to {scale * ends[1]:{form}}{' *' if found.is_clear else ''}"
    relative = "" if percent else f"{100 * found.relative:+.2f} %"
    return f"{scale * found.mean:{form}}", shown, str(found.n), relative


def _body(groups: Sequence[Group], every: Sequence[Group]) -> tuple[str, ...]:
    first = next(iter(groups[0].runs.values())).recipe
    different = [key for key in every[0].settings if len({str(group.settings[key]) for group in every}) > 1]
    text = (
        f"{sum(len(g.runs) for g in every)} runs in {len(every)} groups; runs of a group differ in the seed alone"
        f"{f', groups in the method and in {_listed(different)}' if different else ', groups in the method alone'}. "
        f"{'The first has sequences' if different else 'Sequences'} of {first.length:,} tokens, "
        f"{first.schedule.batch_tokens:,} tokens a step, {first.schedule.total_tokens:,} tokens in all."
    )
    body = [text]
    if len(groups) < len(every):
        body.append(
            "Figures and differences show, for each method, the settings with the best mean on this evaluation, which makes "
            "the chosen a little better than they are; the first table has all settings."
        )
    return tuple(body + [INTERVAL] * bool(pairs(groups)))


def _notes(groups: Sequence[Group]) -> tuple[str, ...]:
    """Runs that are not finished, and what went wrong in any."""
    found = []
    for group in groups:
        for seed, run in group.runs.items():
            name = f"{group.label}, seed {seed}"
            if not run.finished:
                done = f"{run.steps} of {run.recipe.schedule.steps} steps"
                found.append(
                    f"{name}: {done} done; it is not in the tables, and in figures only as long as no other seed is finished."
                )
            found += [f"{name}, step {row['step']}: {row['message']}" for row in run.of("event")]
    return tuple(found)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)
