"""Sections on evaluations: the paper's tables from result files of `rla eval`, with its own numbers below; needle heat maps."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..eval import needle
from ..eval.results import Table as Measured
from ..eval.results import read, table
from .page import Figure, Section, Table, slug

BUDGETS = {2: "100B", 3: "100B", 4: "50B", 5: "50B"}  # training tokens of the paper's models
ENVIRONMENT = ("machine", "rla", "torch", "transformers", "lm_eval", "datasets")


def sections(paths: Sequence[Path], *, paper: bool = True) -> list[Section]:
    """The tables that the results have any number of, and the heat maps."""
    results = _labelled([(path, read(path)) for path in paths])
    tables = [_models(results)]
    for number in BUDGETS:
        if number == 5 and not any(
            "-sum" in mixer for result in results.values() for mixer in result["model"].get("mixers", ())
        ):
            continue  # its columns are Table 2's; its subject is the plain sum
        made = table(number, results, paper=paper)
        if any(cell is not None for row in made.rows if row.source == "measured" for cell in row.cells):
            tables.append(_table(made))
    body = [
        "Through lm-evaluation-harness. Shares are in per cent, ± is the standard error over samples. Perplexity is better "
        "when it is lower, all else when it is higher."
    ]
    if paper:
        body.append(
            "The paper's rows are numbers printed in the paper, of models with 1.5 billion parameters. They were not measured "
            "here, and models of another size or training can't be compared with them as equals. Nor can needles, whose "
            "lengths and depths the paper does not give, and perplexities per token (GSM8k, HumanEval) of another tokenizer."
        )
    if any(result["run"]["limit"] is not None for result in results.values()):
        body.append("Values with * are of the first samples of each task only.")
    notes = _notes(results)
    commands = tuple(dict.fromkeys(result["command"] for result in results.values()))
    return [
        Section("Evaluations", tuple(body), (), (), tuple(tables), notes, commands),
        *_needles(results),
    ]


def _labelled(results: Sequence[tuple[Path, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By the model's name, with the file's where two have the same."""
    names = [result["model"]["name"] for _, result in results]
    found: dict[str, dict[str, Any]] = {}
    for (path, result), name in zip(results, names, strict=True):
        label = name if names.count(name) == 1 else f"{name} ({path.stem})"
        if label in found:
            label = f"{name} ({path})"
        found[label] = result
    return found


def _models(results: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for label, result in results.items():
        model, run = result["model"], result["run"]
        mixers = " and ".join(model.get("mixers") or [model["model_type"]])
        limit = "all" if run["limit"] is None else f"first {run['limit']}"
        parameters = f"{model['parameters']:,}" if model.get("parameters") else ""
        rows.append((label, mixers, parameters, model["dtype"], limit, str(run["seed"]), model["sha256"][:12]))
    headers = ("model", "mixer", "parameters", "dtype", "samples", "seed", "weights' SHA-256")
    return Table("Models evaluated", headers, tuple(rows))


def _table(made: Measured) -> Table:
    def cells(source: str) -> tuple[tuple[str, ...], ...]:
        rows = [row for row in made.rows if row.source == source]
        return tuple((row.model, *("" if cell is None else str(cell) for cell in row.cells)) for row in rows)

    title = f"The paper's Table {made.number}: 1.5B parameters, {BUDGETS[made.number]} tokens; printed there, not measured here"
    headers = ("model", *made.headers)
    reference = cells("paper")
    return Table(f"{made.caption} (as Table {made.number})", headers, cells("measured"), reference, title if reference else "")


def _needles(results: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    drawn, rows = [], []
    for label, result in results.items():
        for task, record in result["tasks"].items():
            grid = record.get("grid")
            if not grid:
                continue
            name = slug(f"needle {label} {task}")
            worst, mean = min(grid, key=lambda cell: cell["acc"]), record["metrics"]["acc"]["value"]
            alt = (
                f"Share of needles found by {label} in {task}, by length and depth: {100 * mean:.1f} % over all, least "
                f"({100 * worst['acc']:.0f} %) at {worst['length']:,} tokens and a depth of {100 * worst['depth']:.0f} %."
            )
            if mean:  # a map of zeros shows nothing that the table doesn't say
                drawn.append(Figure(name, _heat_map(grid, f"{label}: {task}"), alt, f"{label}, {task}"))
            rows += [_by_length(label, task, grid)]
    if not rows:
        return []
    lengths = sorted({length for _, _, found in rows for length in found})
    shown = [(label, task, *(f"{found[n]:.1f}" if n in found else "" for n in lengths)) for label, task, found in rows]
    headers = ("model", "task", *(f"{n:,} tokens" for n in lengths))
    made = Table("Needles found in per cent, mean over depths", headers, tuple(shown))
    body = ("A sentence with a number is hidden in a long text, at a depth from its beginning to its end, and asked for.",)
    notes = () if len(drawn) == len(rows) else ("A map is drawn where at least one needle was found.",)
    return [Section("Needle in a haystack", body, (), tuple(drawn), (made,), notes)]


def _by_length(label: str, task: str, grid: Sequence[Mapping[str, float]]) -> tuple[str, str, dict[int, float]]:
    found: dict[int, list[float]] = {}
    for cell in grid:
        found.setdefault(int(cell["length"]), []).append(100 * cell["acc"])
    return label, task, {length: sum(values) / len(values) for length, values in found.items()}


def _heat_map(grid: Sequence[Mapping[str, float]], title: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "needle.png"
        needle.heat_map(path, grid, title)
        return path.read_bytes()


def _notes(results: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Machine, versions and what was not run, once for all models that share them."""
    models: dict[str, list[str]] = {}
    for label, result in results.items():
        around = result["environment"]
        versions = ", ".join(f"{key} {around[key]}" for key in ENVIRONMENT if around.get(key))
        missing = ", ".join(result.get("missing", {}))
        text = f"{versions}.{f' Not run, for want of data: {missing}.' if missing else ''}"
        models.setdefault(text, []).append(label)
    everyone = len(models) == 1 and len(results) > 1
    return tuple(f"{'All models' if everyone else '; '.join(labels)}: {text}" for text, labels in models.items())
