"""How every figure of the project looks: a hue for each method, the same in all figures, on light and on dark ground.

A method and its baseline are the dark and the light tone of one hue (rla and sgla blue, rdn and gdn orange), softmax is grey; a
variant has its own hue, and dots or dashes. Every hue stands out from its ground by at least 3 to 1, and the pairs are told
apart by their dashes too. Figures are drawn in the light colours; a page that can be dark puts the dark ones in their place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..method import METHODS as FAMILY

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Hue:
    light: str  # on a light ground
    dark: str  # on a dark one


GROUND = Hue("#fefefe", "#14181d")
INK = Hue("#1f2328", "#e6edf3")
FAINT = Hue("#d8dee4", "#343b44")  # grids
HUES = {
    "sky": Hue("#3f9bdc", "#8ecbff"),
    "blue": Hue("#0b4f8a", "#2f8fe8"),
    "amber": Hue("#dd7900", "#ffb454"),
    "brick": Hue("#a83200", "#f0652f"),
    "grey": Hue("#6e7681", "#9aa4af"),
    "green": Hue("#0f8a66", "#3fc79a"),
    "pink": Hue("#b4589c", "#e08cc9"),
    "olive": Hue("#8a7500", "#d3bb3a"),
    "violet": Hue("#7a5af0", "#a995ff"),
    "lime": Hue("#5a8200", "#a5cc4b"),
}
METHODS = {
    "sgla": "sky",
    "rla": "blue",
    "gdn": "amber",
    "rdn": "brick",
    "softmax": "grey",
    "mamba2": "green",
    "retnet": "pink",
    "gla": "olive",
    "deltanet": "violet",
    "linear": "lime",
}
VARIANTS = {"nofit": "green", "tied": "pink", "sum": "olive", "noclip": "violet", "logcosh": "lime", "nonorm": "grey"}
RAMP = ("#2a6fbb", "#a85aa0", "#dd7900")  # in order, from first to last; of middling lightness, to be seen on both grounds
SPARE = ("green", "pink", "olive", "violet", "lime")
DPI = 150
SIZE = (5.2, 3.5)  # inches of a panel: on a phone's width its letters can still be read


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name: its method's own, or a spare one in the order of the names. A name may go on after a comma."""
    found, spare = {}, 0
    for name in dict.fromkeys(names):
        method, _, variant = name.split(",")[0].partition("-")
        hue = VARIANTS.get(variant) if variant else METHODS.get(method)
        if hue is None:
            hue, spare = SPARE[spare % len(SPARE)], spare + 1
        found[name] = HUES[hue].light
    return found


def ramp(count: int) -> list[str]:
    """So many colours in order, evenly along RAMP."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    scale = LinearSegmentedColormap.from_list("ramp", RAMP)
    return [to_hex(scale(i / max(1, count - 1))) for i in range(count)]


def dashes(name: str) -> str:
    """Lines of methods with a residual are whole, of those without dashed, of variants dotted or dashed and dotted."""
    method, _, variant = name.split(",")[0].partition("-")
    if variant:
        return "-." if method == "rdn" else ":"
    return "-" if method in FAMILY and FAMILY[method].has_residual else "--"


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """A drawing function that works in the house colours; what it draws keeps them."""

    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        import matplotlib

        ink, names = INK.light, ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        settings: Any = {
            **dict.fromkeys(names, ink),
            "figure.facecolor": GROUND.light,
            "axes.facecolor": "none",
            "grid.color": FAINT.light,
            "grid.linewidth": 0.7,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 11,
            "legend.frameon": False,
            "legend.handlelength": 2.6,
            "lines.linewidth": 1.8,
            "lines.markersize": 5,
        }
        with matplotlib.rc_context(settings):
            return draw(*args, **kwargs)

    return wrapper


def canvas(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = SIZE, *, sharey: bool = False, used: int | None = None
) -> tuple[Any, Any]:
    """A figure that needs no display and leaves pyplot's state alone, and its axes as a 2-d array.

    Axes beyond the first `used` are hidden.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    space = ConstrainedLayoutEngine(h_pad=0.07, w_pad=0.07)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout=space)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    for axis in axes.flat:
        axis.grid(True, which="major")
    for axis in axes.flat[used:] if used is not None else ():
        axis.set_visible(False)
    return figure, axes


def log_ticks(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis around these values, with plain numbers at 1, 2 and 5 times powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = min(values), max(values)
    axis.axes.set_yscale("log")
    axis.axes.set_ylim(low / 1.3, high * 1.3)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if math.log10(high / low) < 4 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))


def save(figure: Any, path: Path) -> None:
    """A PNG file, in the light colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
