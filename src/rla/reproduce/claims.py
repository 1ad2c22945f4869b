"""Claims of the paper's about two methods, and the rule that judges them.

A claim says that one method's value is lower or higher than another's, or the same. It is judged by the paired difference over
seeds (report/stats.py): it agrees when the 95 % interval lies wholly on the side that the claim names, and disagrees when it
lies wholly on the other side. "The same" agrees when the interval lies within SAME of the other's value, and disagrees when it
lies wholly outside. All else, one seed above all, is not testable at this scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..report.page import Outcome, Verdict
from ..report.runs import Group, Run, difference
from ..report.stats import CONFIDENCE, Difference

SAME = 0.01  # of the value compared with
CEILING, FLOOR = 0.99, 0.02  # shares beyond which two methods can't be told apart

UNTESTABLE: Outcome = "not testable at this scale"
RULE = (
    f"Rule: a claim that compares two methods agrees when the {100 * CONFIDENCE:.0f} % paired t interval of their difference "
    "over seeds lies wholly on the side the claim names, and disagrees when it lies wholly on the other side. A claim of no "
    f"difference agrees when the interval lies within {100 * SAME:.0f} % of the value. All else, and whatever has one seed "
    "only, is not testable at this scale."
)

Expected = Literal["lower", "higher", "same"]


@dataclass(frozen=True)
class Claim:
    text: str
    ours: str  # mixer
    theirs: str  # mixer it is compared with
    expected: Expected
    paper: str = ""  # the paper's number


def judge(found: Difference | None, expected: Expected, base: float = 1.0) -> Outcome:
    """The rule above; `base` is the value compared with."""
    if found is None or found.interval is None:
        return UNTESTABLE
    low, high = found.interval
    if expected == "same":
        bound = SAME * abs(base)
        if -bound <= low and high <= bound:
            return "agrees"
        return "disagrees" if low > bound or high < -bound else UNTESTABLE
    if not found.is_clear:
        return UNTESTABLE
    return "agrees" if (found.mean < 0) == (expected == "lower") else "disagrees"


def verdict(claim: Claim, groups: Sequence[Group], key: str, words: str, *, share: bool = False) -> Verdict | None:
    """The claim judged by a final value of the runs, `words` being its name; None where a method has not been trained.

    A run that the guard stopped never came to its end: where the claim is that it does worse, that is agreement.
    """
    ours, theirs = (next((g for g in groups if g.mixer == name), None) for name in (claim.ours, claim.theirs))
    if ours is None or theirs is None:
        return None
    broken = [f"seed {seed} after {run.steps} steps" for seed, run in ours.runs.items() if halted(run)]
    if broken and claim.expected == "higher" and len(theirs.whole) == len(theirs.runs):
        evidence = f"{ours.label} was stopped by a loss that was no number ({', '.join(broken)}); {theirs.label} was not."
        return Verdict(claim.text, "agrees", evidence, claim.paper)
    found = difference(ours, theirs, key)
    a, b = ours.spread(key), theirs.spread(key)
    if found is None or a is None or b is None:
        return Verdict(claim.text, UNTESTABLE, "no seed of both was finished.", claim.paper)
    scale, form = (100, ".1f") if share else (1, ".4f")
    evidence = f"{words} {scale * a.mean:{form}} against {scale * b.mean:{form}}, difference {scale * found.mean:+{form}}"
    if found.interval is None:
        evidence += ", one seed."
    else:
        low, high = (f"{scale * end:+{form}}" for end in found.interval)
        evidence += f" ({low} to {high}, n = {found.n})."
    outcome = judge(found, claim.expected, b.mean)
    if share and min(a.mean, b.mean) >= CEILING:
        outcome, evidence = UNTESTABLE, f"{evidence} Both find nearly all: the task is too easy."
    elif share and max(a.mean, b.mean) <= FLOOR:
        outcome, evidence = UNTESTABLE, f"{evidence} Both find next to nothing: the task is too hard."
    return Verdict(claim.text, outcome, evidence, claim.paper)


def halted(run: Run) -> bool:
    """Whether the guard ended it, so that no second attempt would fare better."""
    events = run.of("event")
    return not run.finished and bool(events) and events[-1] is run.rows[-1] and "Stopped" in events[-1]["message"]
