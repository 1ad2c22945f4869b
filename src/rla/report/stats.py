"""Spread over seeds, and differences of two methods at the same seeds, with a confidence interval.

Paired t: the differences d_i of n seeds have mean m and standard deviation s; m lies within t s / sqrt(n) of the true mean with
the given confidence, t being the quantile of Student's distribution with n - 1 degrees of freedom.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Mean and range of a value over seeds."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), min(values), max(values), len(values))

    def __mul__(self, factor: float) -> Spread:
        return Spread(factor * self.mean, factor * self.low, factor * self.high, self.n)

    def show(self, form: str) -> str:
        """The mean, with the range where there is more than one value."""
        text = format(self.mean, form)
        return text if self.n == 1 else f"{text} ({format(self.low, form)} to {format(self.high, form)})"


@dataclass(frozen=True)
class Difference:
    """Of two methods, over the seeds that both have."""

    mean: float
    half: float | None  # half the interval's width; None with one seed
    n: int
    relative: float  # mean difference over the mean of the method compared with

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.half is not None and abs(self.mean) > self.half

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.half is None else (self.mean - self.half, self.mean + self.half)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float], confidence: float = CONFIDENCE) -> Difference | None:
    """The difference ours - theirs, from values by seed; None without a common seed."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    n, mean = len(seeds), statistics.fmean(differences)
    half = None
    if n > 1:
        squares = sum((x - mean) ** 2 for x in differences)  # statistics.stdev takes no NaN
        half = t_quantile(confidence, n - 1) * math.sqrt(squares / (n - 1) / n)
    base = statistics.fmean(theirs[seed] for seed in seeds)
    return Difference(mean, half, n, mean / base if base else math.nan)


def t_quantile(confidence: float, degrees: int) -> float:
    """The t that Student's distribution stays within, on both sides, with this probability."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1; got {confidence}")
    if degrees < 1:
        raise ValueError(f"degrees: expected at least 1; got {degrees}")
    low, high = 0.0, math.pi / 2
    for _ in range(100):  # bisection on the angle, which is bounded where t is not
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _within(angle: float, degrees: int) -> float:
    """P(|t| < tan(angle) sqrt(degrees)): for whole degrees of freedom a finite sum of powers of the cosine."""
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return (2 / math.pi) * (angle + sine * total) if odd else sine * total


def smooth(values: Sequence[float], window: float) -> list[float]:
    """An exponential mean over about so many values, weighted so that the first ones count no more than the others."""
    keep = 1 - 1 / max(1.0, window)
    total = weight = 0.0
    smoothed = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        smoothed.append(total / weight)
    return smoothed
