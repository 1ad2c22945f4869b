"""The figures: time and throughput over T for `rla bench kernels`, time of a step beside a pass for `rla bench decode`.

A colour for each method (style.py), dashes and markers for who computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .measure import Quantiles
from .ratios import PASSES, Cell, Results
from .style import HUES, canvas, colours, log_ticks, styled
from .workload import Contender, Pass

LOOKS: dict[str, dict[str, Any]] = {
    "native": {"linestyle": "-", "marker": "o"},
    "triton": {"linestyle": "-", "marker": "o"},
    "chunked": {"linestyle": "--", "marker": "s"},
    "reference": {"linestyle": ":", "marker": "x"},
    "transformers": {"linestyle": "-.", "marker": "^"},
    "onnxruntime": {"linestyle": ":", "marker": "D"},
    "sdpa": {"linestyle": "-", "marker": "v"},
    "float32": {"linestyle": "--", "marker": "s"},
}


@styled
def kernels(results: Results, contenders: Sequence[Contender], passes: Sequence[Pass]) -> Any:
    """Time (left) and tokens a second (right) over T, a row of panels for each pass."""
    figure, axes = canvas(len(passes), 2, (6, 4.4))
    tones = colours([c.method for c in contenders])
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
            look = LOOKS.get(c.by, {}) | {"color": tones[c.method]}
            lines[str(c)] = axes[row, 0].plot(T, medians, **look)[0]
            band = [1e3 * t.q20 for t in times], [1e3 * t.q80 for t in times]
            axes[row, 0].fill_between(T, *band, color=tones[c.method], alpha=0.15, linewidth=0)
            axes[row, 1].plot(T, rates, **look)
            shown[0].extend(medians)
            shown[1].extend(rates)
        for axis, values, label in zip(axes[row], shown, ("time (ms)", "throughput (tokens/s)"), strict=True):
            axis.set(xscale="log", xlabel="T (tokens)", ylabel=label, title=PASSES[which])
            axis.set_xticks(lengths, [str(T) for T in lengths])
            axis.set_xticks([], minor=True)
            log_ticks(axis.yaxis, values)
    figure.suptitle(f"attend: {results.workload}; medians, bands from 20 to 80 %")
    figure.legend(list(lines.values()), list(lines), loc="outside right upper")
    return figure


@styled
def decode(title: str, panels: Mapping[str, Mapping[Contender, tuple[Quantiles, Quantiles]]]) -> Any:
    """Time of a step and of a pass over its states, a panel for each way of visiting states."""
    columns = min(2, len(panels))
    figure, axes = canvas(math.ceil(len(panels) / columns), columns, (12 / columns, 4.2), used=len(panels))
    every = [1e6 * time.q50 for bars in panels.values() for pair in bars.values() for time in pair]
    for axis, (name, bars) in zip(axes.flat, panels.items(), strict=False):
        tones = colours([c.method for c in bars])
        for x, (c, (step, sweep)) in enumerate(bars.items()):
            for time, colour, marker in ((sweep, HUES["grey"].light, "_"), (step, tones[c.method], "o")):
                spread = [[1e6 * (time.q50 - time.q20)], [1e6 * (time.q80 - time.q50)]]
                look = {"markersize": 22 if marker == "_" else 8, "markeredgewidth": 2, "elinewidth": 1}
                axis.errorbar(x, 1e6 * time.q50, spread, color=colour, marker=marker, **look)
            text = f"{step.q50 / sweep.q50:.3g}x"
            axis.annotate(text, (x, 1e6 * step.q50), (9, 0), textcoords="offset points", va="center", size=9)
        axis.set_xticks(range(len(bars)), [f"{c.method}\n{c.by}" for c in bars])
        axis.set_xlim(-0.5, len(bars) - 0.3)
        axis.set(ylabel="time (us)", title=name)
        axis.grid(False, axis="x")
        log_ticks(axis.yaxis, every)
    figure.suptitle(f"{title}\ndots: step; grey bars: one read-and-write pass over its states; numbers: step over pass")
    return figure
