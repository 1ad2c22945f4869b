"""Figures of training runs: loss over tokens, differences from the baseline, what each layer does, recall over pairs.

A line is the mean over seeds, its band reaches from the lowest seed to the highest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..bench.style import canvas, colours, dashes, ramp, styled
from .runs import Group, over_seeds
from .stats import Spread

EARLY = 0.15  # the part of a run whose high losses would flatten the rest
MARKS = {"marker": "o", "markersize": 3.5}


def _band(axis: Any, curve: Mapping[Any, Spread], look: Mapping[str, Any], label: str) -> Any:
    x, values = list(curve), list(curve.values())
    (line,) = axis.plot(x, [v.mean for v in values], label=label, **look)
    if any(v.n > 1 for v in values):
        low, high = [v.low for v in values], [v.high for v in values]
        axis.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    return line


def _legend(figure: Any, lines: Mapping[str, Any]) -> None:
    """Below the panels, in as many columns as long labels leave."""
    longest = max(map(len, lines), default=1)
    columns = max(1, min(len(lines), int(12 * figure.get_figwidth() / (longest + 8))))
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=columns)


def _millions(group: Group, curve: Mapping[int, Spread]) -> dict[float, Spread]:
    return {step * group.batch_tokens / 1e6: value for step, value in curve.items()}


def _percent(curve: Mapping[Any, Spread]) -> dict[Any, Spread]:
    return {x: value * 100 for x, value in curve.items()}


def _look_past_the_start(axis: Any, curves: Sequence[Mapping[float, Spread]]) -> None:
    """Leave the first part of the curves above the axis."""
    last = max((max(curve) for curve in curves if curve), default=0.0)
    shown = [v for curve in curves for x, v in curve.items() if x >= EARLY * last and math.isfinite(v.high)]
    if shown:
        low, high = min(v.low for v in shown), max(v.high for v in shown)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        axis.set_ylim(low - room, high + room)


@styled
def curves(groups: Sequence[Group], kind: str, key: str, label: str, *, percent: bool = False) -> Any:
    """One value of the rows of a kind over tokens, all groups together."""
    figure, axes = canvas()
    axis, tones = axes[0, 0], colours([group.label for group in groups])
    lines, drawn = {}, []
    for group in groups:
        curve = _millions(group, group.curve(kind, key))
        if curve:
            curve = _percent(curve) if percent else curve
            marks = MARKS if kind == "evaluation" else {}
            look = {"color": tones[group.label], "linestyle": dashes(group.label), **marks}
            lines[group.label] = _band(axis, curve, look, group.label)
            drawn.append(curve)
    axis.set(xlabel="tokens (millions)", ylabel=label)
    if percent:
        axis.set_ylim(-2, 102)
    else:
        _look_past_the_start(axis, drawn)
    _legend(figure, lines)
    return figure


@styled
def differences(compared: Sequence[tuple[Group, Group]], key: str, label: str) -> Any:
    """A value of the evaluations less that of the baseline at the same seed, over tokens."""
    figure, axes = canvas()
    axis, tones = axes[0, 0], colours([group.label for group, _ in compared])
    lines, drawn = {}, []
    for group, base in compared:
        curve = _millions(group, paired_curve(group, base, key))
        if curve:
            name = f"{group.label} less {base.label}"
            look = {"color": tones[group.label], "linestyle": dashes(group.label), **MARKS}
            lines[name] = _band(axis, curve, look, name)
            drawn.append(curve)
    axis.axhline(0, color=axis.spines["left"].get_edgecolor(), linewidth=1)
    axis.set(xlabel="tokens (millions)", ylabel=label)
    _look_past_the_start(axis, drawn)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, -0.05 * high), max(high, -0.05 * low))  # 0 is always to be seen
    _legend(figure, lines)
    return figure


def paired_curve(group: Group, base: Group, key: str) -> dict[int, Spread]:
    """The difference at each step that all common seeds have."""
    curves = []
    for seed in sorted(group.shown.keys() & base.shown.keys()):
        ours, theirs = group.shown[seed].values("evaluation", key), base.shown[seed].values("evaluation", key)
        curves.append({step: ours[step] - theirs[step] for step in ours.keys() & theirs.keys()})
    return over_seeds(curves)


def layer_curves(group: Group, key: str) -> list[dict[int, Spread]]:
    """A curve for each layer; empty where the layer has no such value."""
    runs = [run.of("probe") for run in group.shown.values()]
    depth = max((len(row["layers"]) for rows in runs for row in rows), default=0)
    return [
        over_seeds([{row["step"]: row["layers"][i][key] for row in rows if key in row["layers"][i]} for rows in runs])
        for i in range(depth)
    ]


@styled
def layers(groups: Sequence[Group], key: str, label: str, *, percent: bool = False) -> Any:
    """A panel for each group with a line for each layer, from blue, the first, to orange, the last; all on one scale."""
    shown = [(group, found) for group in groups if any(found := layer_curves(group, key))]
    if not shown:
        return None
    columns = min(3, len(shown))
    figure, axes = canvas(math.ceil(len(shown) / columns), columns, (3.6, 2.6), sharey=True, used=len(shown))
    lines = {}
    for axis, (group, found) in zip(axes.flat, shown, strict=False):
        tones = ramp(len(found))
        for i, curve in enumerate(found):
            if curve:
                drawn = _percent(curve) if percent else curve
                lines[f"layer {i + 1}"] = _band(axis, drawn, {"color": tones[i], **MARKS}, f"layer {i + 1}")
        axis.set(title=group.label, xlabel="step")
    for axis in axes[:, 0]:
        axis.set(ylabel=label)
    if percent:
        axes[0, 0].set_ylim(bottom=0)
    else:
        _logarithmic_if_wide(axes[0, 0], [v for _, found in shown for curve in found for v in curve.values()])
    _legend(figure, dict(sorted(lines.items(), key=lambda item: int(item[0].split()[1]))))
    return figure


def _logarithmic_if_wide(axis: Any, values: Sequence[Spread]) -> None:
    """Norms that grow without bound are seen on a logarithmic scale only."""
    positive = [v for v in values if v.low > 0 and math.isfinite(v.high)]
    if positive and max(v.high for v in positive) > 30 * min(v.low for v in positive):
        axis.set_yscale("log")


@styled
def recall(groups: Sequence[Group], tasks: Sequence[str], names: Sequence[str]) -> Any:
    """Accuracy of the last evaluation on each task: a line for each group, in per cent."""
    figure, axes = canvas()
    axis, tones = axes[0, 0], colours([group.label for group in groups])
    lines = {}
    for group in groups:
        curve = {float(i): s * 100 for i, task in enumerate(tasks) if (s := group.spread(f"accuracy/{task}")) is not None}
        if curve:
            look = {"color": tones[group.label], "linestyle": dashes(group.label), **MARKS}
            lines[group.label] = _band(axis, curve, look, group.label)
    axis.set_xticks(range(len(tasks)), names)
    axis.set(xlabel="pairs x length", ylabel="right answers (%)", ylim=(-2, 102))
    _legend(figure, lines)
    return figure
