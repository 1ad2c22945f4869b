"""The progress line of `rla prepare`: documents, tokens, MB/s of text, time left. Only on a terminal."""

from __future__ import annotations

import sys
import time

from .prepare import Counts


class Progress:
    """A context; `show` is what `prepare` reports to."""

    def __init__(self, total: int):
        """`total` bytes of inputs; 0: not known."""
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        console = Console(file=sys.stderr)
        self._bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._total = total or None
        self._task = self._bar.add_task("reading", total=self._total)
        self._first: Counts | None = None
        self._since = time.monotonic()
        self._counts = Counts()

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, counts: Counts) -> None:
        """Called with the state at the start, which may be that of an earlier call, and after every block."""
        if self._first is None:
            self._first, self._since = counts, time.monotonic()
            self._bar.reset(self._task, total=self._total, completed=counts.consumed)  # so that the time left is this call's
        self._counts = counts
        self._bar.update(self._task, completed=counts.consumed, description=self.summary())

    def summary(self) -> str:
        """What there is, and the speed of this call."""
        done = self._counts.bytes - (self._first or Counts()).bytes
        speed = done / 1e6 / max(time.monotonic() - self._since, 1e-9)
        return f"{self._counts.documents:,} documents, {self._counts.tokens:,} tokens, {speed:.1f} MB/s"
