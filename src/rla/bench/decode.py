"""`rla bench decode`: time of the one-token step, beside one pass that reads and writes its states.

A step has to read and write S and R once; that pass, `S.mul_(1)` and `R.mul_(1)`, is its yardstick. States are visited in two
ways: the same one each time, which stays in the cache, and several in turn, as the layers of a model do. A step knows no
position: states are filled by that many tokens first, and the time should not depend on how many.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ..method import get_method
from ..ops import State, attend, step
from . import figure, style
from .kernels import check_numbers, contenders, left_out, make_console, make_progress
from .measure import Quantiles, environment, time_in_rounds, write_csv
from .workload import Contender, Device, Dtype, Workload, gates

STEPS = 48  # in a timed sample, at least: one is too short for the clock
FILL_BLOCK = 4096  # tokens at a time while states are filled


@dataclass(frozen=True)
class _Cell:
    contender: Contender
    position: int
    states: int  # visited in turn
    sweep: bool = False  # the pass over the states instead of the step


def main(
    *,
    methods: tuple[str, ...] = ("sgla", "rla", "gdn", "rdn"),
    backends: tuple[str, ...] = (),
    positions: tuple[int, ...] = (128, 32768),
    cycle: int = 48,
    batch: int = 1,
    heads: int = 16,
    dim: int = 128,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: int | None = None,
    seconds: float = 1.0,
    out: Path = Path("results/decode"),
) -> int:
    """Time the one-token step beside one read-and-write pass over its states, in the cache and cycling through many.

    Writes decode.csv (20/50/80 % quantiles, machine, versions) and decode.png. Ctrl-C writes what there is.

    Example: rla bench decode --methods rla rdn --heads 16 --dim 128 --cycle 48 --threads 2

    Args:
        methods: names in rla.METHODS.
        backends: names in rla.backends(). Default: the usable ones, reference excepted.
        positions: tokens that have filled the states before.
        cycle: states to visit in turn, beside one that stays in the cache.
        batch: sequences.
        heads: heads.
        dim: K and V.
        dtype: of the inputs.
        device: where.
        threads: of the CPU. Default: torch's.
        seconds: time to spend on each cell of the table (at least 3 repetitions).
        out: folder for the CSV and the figure.
    """
    console = make_console()
    try:
        workload = Workload(batch, heads, dim, dtype, device, torch.get_num_threads() if threads is None else threads)
        workload.check_device()
        ours = contenders(methods, backends)
        check_numbers("--positions", positions)
        check_numbers("--cycle", (cycle,))
        if seconds < 0:
            raise ValueError(f"--seconds: expected a number >= 0; got {seconds}")
    except ValueError as error:
        print(f"rla bench decode: {error}", file=sys.stderr)
        return 2
    samples: dict[_Cell, list[float]] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(workload.threads)
    notes = left_out(backends)
    try:
        with torch.no_grad(), make_progress(console) as progress:
            visits = tuple(dict.fromkeys((1, cycle)))
            task = progress.add_task("time", total=2 * len(ours) * len(positions) * len(visits))
            for position in dict.fromkeys(positions):
                for states in visits:
                    progress.update(task, description=f"time, position {position}, {states} state{'s' * (states > 1)}")
                    ready = _prepare(workload, ours, position, states, notes)
                    time_in_rounds(ready, samples, seconds=seconds, on_done=lambda _: progress.advance(task))
    except KeyboardInterrupt:
        console.print("interrupted: what follows is what has been measured so far")
    finally:
        torch.set_num_threads(before)
    results = _per_step(samples)
    if results:
        _print(console, workload, results)
    for note in dict.fromkeys(notes):
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    if not results:
        print("rla bench decode: nothing was measured", file=sys.stderr)
        return 1
    _write(out, workload, results)
    console.print(f"written: {out / 'decode.csv'}, {out / 'decode.png'}", soft_wrap=True)
    return 0


def _prepare(
    workload: Workload, ours: Sequence[Contender], position: int, states: int, notes: list[str]
) -> dict[_Cell, Callable[[], object]]:
    """Steps and sweeps of each contender over states of its own, called once."""
    ready: dict[_Cell, Callable[[], object]] = {}
    for c in ours:
        try:
            visited = _filled(workload, c, position, states)
            steps = _steps(workload, c, visited)
            steps()
        except ValueError as error:
            notes.append(f"{c}: not available: {error}")
            continue
        ready[_Cell(c, position, states)] = steps
        ready[_Cell(c, position, states, sweep=True)] = _sweeps(visited)
    return ready


def _calls(states: int) -> int:
    """Steps in a timed sample: each state as often as any other."""
    return states * math.ceil(STEPS / states)


def _filled(workload: Workload, c: Contender, position: int, states: int) -> list[State]:
    """Copies of the state that `position` tokens leave."""
    state, left = None, position
    while left:
        tokens = workload.tokens(min(left, FILL_BLOCK))
        inputs = (tokens.q, tokens.k, tokens.v, *gates(c.method, tokens))
        _, state = attend(*inputs, method=c.method, state=state, backend=c.by)
        left -= tokens.q.shape[1]
    assert state is not None
    return [State(state.S.clone(), None if state.R is None else state.R.clone()) for _ in range(states)]


def _steps(workload: Workload, c: Contender, visited: Sequence[State]) -> Callable[[], object]:
    tokens = workload.tokens(_calls(len(visited)))
    whole = (tokens.q, tokens.k, tokens.v, *gates(c.method, tokens))
    inputs = [[None if x is None else x[:, t : t + 1].contiguous() for x in whole] for t in range(_calls(len(visited)))]
    method = get_method(c.method)

    def run() -> None:
        for t, (q, k, v, log_alpha, beta, gamma) in enumerate(inputs):
            state = visited[t % len(visited)]
            step(q, k, v, log_alpha, beta, gamma, method=method, state=state, backend=c.by)  # type: ignore[arg-type]

    return run


def _sweeps(visited: Sequence[State]) -> Callable[[], object]:
    def run() -> None:
        for t in range(_calls(len(visited))):
            for M in visited[t % len(visited)]:
                if M is not None:
                    M.mul_(1.0)  # by 1, so that the states stay what they are

    return run


def _per_step(samples: Mapping[_Cell, Sequence[float]]) -> dict[_Cell, tuple[Quantiles, Quantiles]]:
    """Times of one step and of one sweep."""

    def times(cell: _Cell) -> Quantiles:
        return Quantiles.of([x / _calls(cell.states) for x in samples[cell]])

    sweeps = {cell: dataclasses.replace(cell, sweep=True) for cell in samples if not cell.sweep}
    return {cell: (times(cell), times(sweep)) for cell, sweep in sweeps.items() if samples[cell] and samples.get(sweep)}


def _print(console: Console, workload: Workload, results: Mapping[_Cell, tuple[Quantiles, Quantiles]]) -> None:
    table = Table(title=f"step: {workload}", title_justify="left")
    for name in ("method", "by"):
        table.add_column(name)
    columns = (
        "states",
        "position",
        "us, median",
        "20 %",
        "80 %",
        "pass over states, us",
        "ratio step/pass",
        "over first position",
    )
    for name in columns:
        table.add_column(name, justify="right")
    first = min(cell.position for cell in results)
    for cell, (one, sweep) in results.items():
        base = results.get(dataclasses.replace(cell, position=first))
        numbers = [f"{1e6 * x:.1f}" for x in (one.q50, one.q20, one.q80, sweep.q50)]
        numbers += [f"{one.q50 / sweep.q50:.2f}", "" if base is None else f"{one.q50 / base[0].q50:.2f}"]
        table.add_row(cell.contender.method, cell.contender.by, str(cell.states), str(cell.position), *numbers)
    console.print(table)


def panel(states: int, position: int) -> str:
    """The title of a figure's panel."""
    visits = "one state, in the cache" if states == 1 else f"{states} states in turn"
    return f"{visits}, after {position} tokens"


def _write(out: Path, workload: Workload, results: Mapping[_Cell, tuple[Quantiles, Quantiles]]) -> None:
    same, rows = environment(workload.device, workload.threads), []
    panels: dict[str, dict[Contender, tuple[Quantiles, Quantiles]]] = {}
    for cell, (one, sweep) in results.items():
        number = 2 if get_method(cell.contender.method).has_R else 1
        rows.append(
            {
                "method": cell.contender.method,
                "by": cell.contender.by,
                "states": cell.states,
                "position": cell.position,
                **workload.columns(),
                "us_q20": 1e6 * one.q20,
                "us_q50": 1e6 * one.q50,
                "us_q80": 1e6 * one.q80,
                "repetitions": one.repetitions,
                "pass_us_q20": 1e6 * sweep.q20,
                "pass_us_q50": 1e6 * sweep.q50,
                "pass_us_q80": 1e6 * sweep.q80,
                "step_over_pass": one.q50 / sweep.q50,
                "state_bytes": 4 * number * workload.batch * workload.heads * workload.dim**2,
                **same,
            }
        )
        panels.setdefault(panel(cell.states, cell.position), {})[cell.contender] = (one, sweep)
    write_csv(out / "decode.csv", rows)
    style.save(figure.decode(f"step: {workload}", panels), out / "decode.png")
