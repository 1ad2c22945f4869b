"""The figures: time and throughput over T for `rla bench kernels`, time of a step beside a pass for `rla bench decode`.

Colours are those of Okabe and Ito, which colour-blind readers tell apart: one for each method; dashes and markers for who
computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .measure import Quantiles
from .ratios import PASSES, Cell, Results
from .workload import Contender, Pass

COLOURS = {"sgla": "#56B4E9", "rla": "#0072B2", "gdn": "#E69F00", "rdn": "#D55E00", "softmax": "#000000"}
SPARE = ("#009E73", "#CC79A7", "#999999", "#F0E442")
LOOKS: dict[str, dict[str, Any]] = {
    "native": {"linestyle": "-", "marker": "o"},
    "triton": {"linestyle": "-", "marker": "o"},
    "chunked": {"linestyle": "--", "marker": "s"},
    "reference": {"linestyle": ":", "marker": "x"},
    "transformers": {"linestyle": "-.", "marker": "^"},
    "onnxruntime": {"linestyle": ":", "marker": "D"},
    "sdpa": {"linestyle": "-", "marker": "v"},
}


def _colours(methods: Sequence[str]) -> dict[str, str]:
    others = [m for m in dict.fromkeys(methods) if m not in COLOURS]
    return COLOURS | {m: SPARE[i % len(SPARE)] for i, m in enumerate(others)}


def _canvas(rows: int, columns: int, height: float) -> tuple[Any, Any]:
    """A figure that needs no display and leaves pyplot's state alone, and its axes as a 2-d array."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, height * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _log_ticks(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis around these values, with plain numbers at 1, 2 and 5 times powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.axes.set_yscale("log")
    axis.axes.set_ylim(min(values) / 1.3, max(values) * 1.3)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))


def kernels(path: Path, results: Results, contenders: Sequence[Contender], passes: Sequence[Pass]) -> None:
    """Time (left) and tokens a second (right) over T, a row of panels for each pass."""
    figure, axes = _canvas(len(passes), 2, 4.2)
    colours = _colours([c.method for c in contenders])
    lengths = sorted({cell.T for cell in results.times})
    lines: dict[str, Any] = {}
    for row, which in enumerate(passes):
        shown: tuple[list[float], list[float]] = ([], [])
        for c in contenders:
            cells = [cell for T in lengths if (cell := Cell(c, T, which)) in results.times]
            if not cells:
                continue
            T, times = [cell.T for cell in cells], [results.times[cell] for cell in cells]
            medians, rates = [1e3 * t.q50 for t in times], [results.tokens_per_second(cell) or 0.0 for cell in cells]
            look = LOOKS.get(c.by, {}) | {"color": colours[c.method], "linewidth": 1.8, "markersize": 5}
            lines[str(c)] = axes[row, 0].plot(T, medians, **look)[0]
            band = [1e3 * t.q20 for t in times], [1e3 * t.q80 for t in times]
            axes[row, 0].fill_between(T, *band, color=colours[c.method], alpha=0.15, linewidth=0)
            axes[row, 1].plot(T, rates, **look)
            shown[0].extend(medians)
            shown[1].extend(rates)
        for axis, values, label in zip(axes[row], shown, ("time (ms)", "throughput (tokens/s)"), strict=True):
            axis.set(xscale="log", xlabel="T (tokens)", ylabel=label, title=PASSES[which])
            axis.set_xticks(lengths, [str(T) for T in lengths])
            axis.set_xticks([], minor=True)
            _log_ticks(axis.yaxis, values)
    figure.suptitle(f"attend: {results.workload}; medians, bands from 20 to 80 %")
    figure.legend(list(lines.values()), list(lines), loc="outside right upper", frameon=False, handlelength=3.2)
    figure.savefig(path, dpi=150)


def decode(path: Path, title: str, panels: Mapping[str, Mapping[Contender, tuple[Quantiles, Quantiles]]]) -> None:
    """Time of a step and of a pass over its states, a panel for each way of visiting states."""
    columns = min(2, len(panels))
    figure, axes = _canvas(math.ceil(len(panels) / columns), columns, 4.0)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    every = [1e6 * time.q50 for bars in panels.values() for pair in bars.values() for time in pair]
    for axis, (name, bars) in zip(axes.flat, panels.items(), strict=False):
        colours = _colours([c.method for c in bars])
        for x, (c, (step, sweep)) in enumerate(bars.items()):
            for time, colour, marker in ((sweep, "#777777", "_"), (step, colours[c.method], "o")):
                spread = [[1e6 * (time.q50 - time.q20)], [1e6 * (time.q80 - time.q50)]]
                look = {"markersize": 22 if marker == "_" else 8, "markeredgewidth": 2, "elinewidth": 1}
                axis.errorbar(x, 1e6 * time.q50, spread, color=colour, marker=marker, **look)
            text = f"{step.q50 / sweep.q50:.3g}x"
            axis.annotate(text, (x, 1e6 * step.q50), (9, 0), textcoords="offset points", va="center", size=9)
        axis.set_xticks(range(len(bars)), [f"{c.method}\n{c.by}" for c in bars])
        axis.set_xlim(-0.5, len(bars) - 0.3)
        axis.set(ylabel="time (us)", title=name)
        axis.grid(False, axis="x")
        _log_ticks(axis.yaxis, every)
    figure.suptitle(f"{title}\ndots: step; grey bars: one read-and-write pass over its states; numbers: step over pass")
    figure.savefig(path, dpi=150)
