"""From times and peaks of cells to the table of ratios: what each backend gains, what the residual costs, how memory compares.

"times as fast as chunked" is the time of chunked over ours, "time over sgla" is ours over that of sgla. Times are medians
of a run; or the ratio is taken in each round, in which both were timed within seconds, and its median is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from .measure import Quantiles
from .peers import PEERS
from .workload import AUTOGRAD, FLOAT32, Contender, Pass, Workload, multiply_adds

PASSES: dict[Pass, str] = {"forward": "forward", "both": "forward+backward"}
PAIRS = (("rla", "sgla"), ("rdn", "gdn"))  # with and without the residual
Statistic = Literal["run", "rounds"]
LONG = 4096  # where time per token is compared with that of longer sequences


@dataclass(frozen=True)
class Cell:
    """One contender over T tokens in one pass."""

    contender: Contender
    T: int
    which: Pass


@dataclass
class Results:
    """Filled while measuring; what is missing could not be measured, or not yet."""

    workload: Workload
    times: dict[Cell, Quantiles]
    peaks: dict[Cell, int]
    sgemm: float | None = None  # GFLOPS, median
    sgemm_high: float | None = None  # and at its fastest
    rounds: dict[Cell, list[float]] = field(default_factory=dict)  # median time in each round

    def time(self, cell: Cell) -> float | None:
        times = self.times.get(cell)
        return None if times is None else times.q50

    def over(self, x: Cell, y: Cell, statistic: Statistic) -> float | None:
        """The time of x over that of y."""
        if statistic == "run":
            return _quotient(self.time(x), self.time(y))
        pairs = list(zip(self.rounds.get(x, ()), self.rounds.get(y, ()), strict=False))  # a quick cell may need more rounds
        return median(a / b for a, b in pairs) if pairs else None

    def rate(self, cell: Cell) -> float | None:
        """GFLOPS, a multiply-add being two operations."""
        w, time = self.workload, self.time(cell)
        adds = multiply_adds(cell.contender, cell.T, w.dim, cell.which)
        return None if adds is None or time is None else 2 * adds * w.batch * w.heads * cell.T / time / 1e9

    def share(self, cell: Cell) -> float | None:
        """The rate over that of sgemm."""
        return _quotient(self.rate(cell), self.sgemm)

    def tokens_per_second(self, cell: Cell) -> float | None:
        time = self.time(cell)
        return None if time is None else self.workload.batch * cell.T / time


def table(
    results: Results, contenders: Sequence[Contender], lengths: Sequence[int], statistic: Statistic = "run"
) -> list[tuple[str, list[float | None]]]:
    """Rows of (name, value at each length), without those that have no value at all."""
    rows = []
    memory = _memory_rows(results, contenders, lengths) if statistic == "run" else ()
    for name, values in (*_rows(results, contenders, lengths, statistic), *memory):
        in_order = [values.get(T) for T in lengths]
        if any(x is not None for x in in_order):
            rows.append((name, in_order))
    return rows


def _rows(
    results: Results, contenders: Sequence[Contender], lengths: Sequence[int], statistic: Statistic
) -> Iterator[tuple[str, Mapping[int, float | None]]]:
    def over(x: Contender, y: Contender, which: Pass) -> dict[int, float | None]:
        return {T: results.over(Cell(x, T, which), Cell(y, T, which), statistic) for T in lengths}

    ours = _ours(contenders)
    for c in ours:
        for which, words in PASSES.items():
            if c.by != "chunked":
                yield f"{c.by} {c.method} {words}: times as fast as chunked", over(Contender(c.method, "chunked"), c, which)
            if c.method in ("gdn", "rdn"):
                theirs = PEERS["transformers"], PEERS["onnxruntime"]
                if c.by == "chunked":
                    yield f"{c.by} {c.method} {words}: time over gdn of transformers", over(c, theirs[0], which)
                else:
                    for peer in theirs:
                        yield f"{c.by} {c.method} {words}: times as fast as gdn of {peer.by}", over(peer, c, which)
            yield f"{c.by} {c.method} {words}: times as fast as sdpa", over(PEERS["sdpa"], c, which)
            yield f"{c.by} {c.method} {words}: times as fast as in float32", over(Contender(c.method, FLOAT32), c, which)
    for by in dict.fromkeys(c.by for c in ours):
        for which, words in PASSES.items():
            for with_residual, without in PAIRS:
                pair = Contender(with_residual, by), Contender(without, by)
                yield f"{by} {with_residual} {words}: time over {without}", over(*pair, which)
    for c in ours:
        backward = {T: results.over(Cell(c, T, "both"), Cell(c, T, "forward"), statistic) for T in lengths}
        yield f"{c.by} {c.method}: time of forward+backward over forward", backward
        if statistic == "rounds":  # what follows was not timed in the same rounds
            continue
        for which, words in PASSES.items():
            yield (
                f"{c.by} {c.method} {words}: rate over sgemm's",
                {T: results.share(Cell(c, T, which)) for T in lengths},
            )
        base = results.time(Cell(c, LONG, "forward"))
        if base is not None:
            longer = {T: _quotient(results.time(Cell(c, T, "forward")), base * T / LONG) for T in lengths if T > LONG}
            yield f"{c.by} {c.method} forward: time per token over that at T={LONG}", longer


def _memory_rows(
    results: Results, contenders: Sequence[Contender], lengths: Sequence[int]
) -> Iterator[tuple[str, Mapping[int, float | None]]]:
    def peak(contender: Contender, T: int) -> int | None:
        return results.peaks.get(Cell(contender, T, "both"))

    for c in _ours(contenders):
        shares = {T: _quotient(peak(c, T), results.workload.tensor_bytes(T)) for T in lengths}
        yield f"{c.by} {c.method}: allocated in forward+backward over bytes of q, k, v, o, gradients", shares
        if c.method == "rla":
            plain = Contender("rla", AUTOGRAD)
            compared = {T: _quotient(peak(c, T), peak(plain, T)) for T in lengths}
            yield f"{c.by} {c.method}: peak of forward+backward over that of autograd through chunked", compared


def _ours(contenders: Sequence[Contender]) -> list[Contender]:
    return [c for c in contenders if c.by not in PEERS and c.by != FLOAT32]


def _quotient(x: float | None, y: float | None) -> float | None:
    return None if x is None or not y else x / y
