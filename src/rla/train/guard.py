"""The guard: a step with a loss or gradient that is not finite, or a loss that leaps, is skipped or ends the run."""

from __future__ import annotations

import math
import statistics
from typing import Any

from .recipe import Guard

WINDOW = 64  # losses that a leap is measured against
FEWEST = 16


class Halt(RuntimeError):
    """The guard ended the run; the last checkpoint is from before."""


class Guardian:
    def __init__(self, options: Guard) -> None:
        self.options = options
        self._losses: list[float] = []
        self._skips = 0
        self._policy = "stop"

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed run must know to judge alike."""
        return {"losses": list(self._losses), "skips": self._skips}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._losses, self._skips = list(state["losses"]), state["skips"]

    def judge(self, loss: float, norm: float) -> str | None:
        """What is wrong with a step; None if nothing."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._policy = self.options.nan
            return f"loss {loss}, gradient norm {norm}"
        if self.options.spike != "off" and len(self._losses) >= FEWEST:
            usual = statistics.median(self._losses)
            if loss > self.options.spike_factor * usual:
                self._policy = self.options.spike
                return f"loss {loss:.4f}, above {self.options.spike_factor:g} times the usual {usual:.4f}"
        self._losses = [*self._losses, loss][-WINDOW:]
        self._skips = 0
        return None

    def decide(self, problem: str) -> str:
        """The message of a skipped step; raises Halt where the policy is to stop."""
        self._skips += 1
        if self._policy == "stop":
            raise Halt(
                f"{problem}. Stopped (guard.nan or guard.spike is stop); the same command goes on from the last checkpoint"
            )
        if self._skips > self.options.patience:
            raise Halt(f"{problem}. Stopped after {self.options.patience} skipped steps in a row (guard.patience)")
        return f"{problem}. Skipped"
