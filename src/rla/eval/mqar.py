"""`rla eval mqar RECIPE`: multi-query associative recall, trained and evaluated for several methods, rates, seeds and widths.

Every run is a recipe of its own (rla.train.sweep): what is finished is found again, what was stopped goes on. Of each method
and width the learning rate with the best mean accuracy over its seeds counts. Written: mqar.csv (every run), mqar.md, mqar.png.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from ..bench import style
from ..bench.kernels import make_console
from ..bench.measure import environment, write_csv
from ..models.configuration_rla import SOFTMAX
from ..train.metrics import read_metrics
from ..train.recipe import Recipe, RecipeError, load_recipe
from ..train.sweep import SweepError, sweep

DEFAULT = ("sgla", "rla", "gdn", "rdn", SOFTMAX)


def grid(
    recipe: Recipe, methods: Sequence[str], rates: Sequence[float], seeds: Sequence[int], widths: Sequence[int]
) -> list[Recipe]:
    """A recipe for each combination; heads keep their size where the width changes."""
    recipes = []
    base = recipe.model.config(recipe.data.mqar.vocab_size)
    for method in methods:
        for width in widths or (base.hidden_size,):
            for rate in rates or (recipe.optimizer.lr,):
                for seed in seeds or (recipe.seed,):
                    model = dataclasses.replace(recipe.model, mixer=(method,), hidden_size=width)
                    if width != base.hidden_size:
                        scale = width / base.hidden_size
                        model = dataclasses.replace(
                            model,
                            num_attention_heads=max(1, round(base.num_attention_heads * scale)),
                            intermediate_size=round(base.intermediate_size * scale),
                        )
                    optimizer = dataclasses.replace(
                        recipe.optimizer, lr=rate, min_lr=rate * recipe.optimizer.min_lr / recipe.optimizer.lr
                    )
                    name = f"{method}-w{width}-lr{rate:g}-s{seed}"
                    recipes.append(dataclasses.replace(recipe, name=name, seed=seed, model=model, optimizer=optimizer))
    return recipes


def read_row(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The last evaluation of a run."""
    last = [row for row in read_metrics(folder) if row["kind"] == "evaluation"][-1]
    accuracies = {key.removeprefix("accuracy/"): value for key, value in last.items() if key.startswith("accuracy/")}
    return {
        "method": recipe.model.mixer[0],
        "width": recipe.model.hidden_size,
        "lr": recipe.optimizer.lr,
        "seed": recipe.seed,
        "steps": last["step"],
        "loss": last["loss"],
        "accuracy": last["accuracy"],
        **accuracies,
    }


def best(rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """For each method and width the rows, one for each seed, of the learning rate with the best mean accuracy."""
    groups: dict[tuple[str, int], dict[float, list[dict[str, Any]]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["width"]), {}).setdefault(row["lr"], []).append(row)
    return {
        key: max(by_rate.values(), key=lambda rows: statistics.fmean(row["accuracy"] for row in rows))
        for key, by_rate in groups.items()
    }


def main(
    recipe: Annotated[Path, tyro.conf.Positional],
    *,
    methods: tuple[str, ...] = DEFAULT,
    learning_rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2),
    seeds: tuple[int, ...] = (0, 1),
    widths: tuple[int, ...] = (),
    jobs: int = 1,
    runs: Path = Path("runs/mqar"),
    out: Path = Path("results/mqar"),
) -> int:
    """Train small models of several methods to recall, and compare their accuracy over the number of pairs.

    Finished runs are found again, stopped ones go on: the same command continues after Ctrl-C.

    Example: rla eval mqar recipes/mqar.toml --methods sgla rla --learning-rates 3e-3 1e-2 3e-2 --seeds 0 1 --jobs 2

    Args:
        recipe: a recipe with data.path = "mqar": pairs, lengths, sizes, budget.
        methods: names of mixers: methods, or softmax.
        learning_rates: the same for each method; the best of each counts.
        seeds: of weights and examples.
        widths: hidden sizes. Default: the recipe's.
        jobs: runs at a time; they share the cores.
        runs: folder of the runs.
        out: folder of the table and the figure.
    """
    console = make_console()
    try:
        base = load_recipe(recipe)
        if base.data.path != "mqar":
            raise RecipeError(f'{recipe}: data.path: expected "mqar"; got {base.data.path!r}')
        recipes = grid(base, methods, learning_rates, seeds, widths)
        for one in recipes:
            one.model.config(base.data.mqar.vocab_size)
        folders = sweep(recipes, runs, jobs=jobs, title="mqar")
    except (ValueError, SweepError) as error:
        print(f"rla eval mqar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rla eval mqar: stopped; the same command goes on", file=sys.stderr)
        return 130
    rows = [read_row(one, folder) for one, folder in zip(recipes, folders, strict=True)]
    tasks = [key for key in rows[0] if "x" in key and key[0].isdigit()]
    chosen = best(rows)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "mqar.csv", [{**row, **environment("cpu", 1)} for row in rows])
    console.print(_table(chosen, tasks))
    (out / "mqar.md").write_text(_markdown(chosen, tasks))
    _plot(chosen, tasks, out / "mqar.png")
    console.print(f"written: {out / 'mqar.csv'}, {out / 'mqar.md'}, {out / 'mqar.png'}")
    return 0


def _cells(rows: list[dict[str, Any]], tasks: list[str]) -> list[str]:
    cells = []
    for task in tasks:
        values = [row[task] for row in rows]
        spread = f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else ""
        cells.append(f"{statistics.fmean(values):.3f}{spread}")
    return cells


def _head(tasks: list[str]) -> list[str]:
    return ["method", "width", "best lr", "seeds", *(f"{t.split('x')[0]} pairs in {t.split('x')[1]}" for t in tasks)]


def _body(chosen: dict[tuple[str, int], list[dict[str, Any]]], tasks: list[str]) -> list[list[str]]:
    return [
        [method, str(width), f"{rows[0]['lr']:g}", str(len(rows)), *_cells(rows, tasks)]
        for (method, width), rows in chosen.items()
    ]


def _table(chosen: dict[tuple[str, int], list[dict[str, Any]]], tasks: list[str]) -> Table:
    table = Table(title="MQAR accuracy, mean over seeds (lowest-highest)", title_justify="left")
    for i, name in enumerate(_head(tasks)):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in _body(chosen, tasks):
        table.add_row(*row)
    return table


def _markdown(chosen: dict[tuple[str, int], list[dict[str, Any]]], tasks: list[str]) -> str:
    head = _head(tasks)
    lines = [head, ["---"] * len(head), *_body(chosen, tasks)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


@style.styled
def _plot(chosen: dict[tuple[str, int], list[dict[str, Any]]], tasks: list[str], path: Path) -> None:
    """Accuracy over the number of pairs: a panel for each width, a line for each method, bars over the seeds."""
    widths, methods = sorted({width for _, width in chosen}), list(dict.fromkeys(method for method, _ in chosen))
    figure, axes = style.canvas(1, len(widths), sharey=True)
    tones, pairs = style.colours(methods), [int(task.split("x")[0]) for task in tasks]
    for axis, width in zip(axes[0], widths, strict=True):
        for i, method in enumerate(methods):
            rows = chosen[method, width]
            beside = [pair * 1.03 ** (i - (len(methods) - 1) / 2) for pair in pairs]  # or bars would hide each other
            means = [statistics.fmean(row[task] for row in rows) for task in tasks]
            low = [mean - min(row[task] for row in rows) for mean, task in zip(means, tasks, strict=True)]
            high = [max(row[task] for row in rows) - mean for mean, task in zip(means, tasks, strict=True)]
            look = {"color": tones[method], "linestyle": style.dashes(method), "marker": "o", "capsize": 3}
            axis.errorbar(beside, means, yerr=[low, high], label=method, **look)
        axis.set_xscale("log", base=2)
        axis.set_xticks(pairs, [str(p) for p in pairs])
        axis.set(xlabel="pairs", title=f"width {width}", ylim=(-0.02, 1.02))
    axes[0, 0].set_ylabel("accuracy")
    axes[0, 0].legend()
    style.save(figure, path)
