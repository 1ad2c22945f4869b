"""`rla bench threads`: how much faster several threads are than one, timed in turn, beside a product of matrices.

Few heads leave threads without a head of their own: `native` then splits a head's value columns among them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .kernels import check_numbers, contenders, left_out, make_console, make_progress
from .measure import Quantiles, Sgemm, environment, time_in_rounds, write_csv
from .peers import prepare
from .workload import Contender, Dtype, Pass, Unavailable, Workload

SGEMM = Contender("sgemm", "torch")
Cell = tuple[Contender, int]  # and threads


def main(
    *,
    methods: tuple[str, ...] = ("sgla", "rla", "gdn", "rdn"),
    backends: tuple[str, ...] = ("native",),
    threads: tuple[int, ...] = (1, 2),
    length: int = 16384,
    which: Pass = "forward",
    batch: int = 1,
    heads: int = 1,
    dim: int = 128,
    dtype: Dtype = "float32",
    seconds: float = 4.0,
    out: Path = Path("results/threads"),
) -> int:
    """Time attend with one number of threads and with others, in turn, on a machine that does nothing else.

    Writes threads.csv (20/50/80 % quantiles of times and of ratios within rounds, machine, versions). Ctrl-C writes what
    there is.

    Example: rla bench threads --methods rla rdn --heads 1 --length 16384 --threads 1 2

    Args:
        methods: names in rla.METHODS.
        backends: names in rla.backends() that run on the CPU.
        threads: how many. The others are compared with the first.
        length: tokens in a sequence.
        which: forward alone, or both forward and backward.
        batch: sequences.
        heads: heads.
        dim: K and V.
        dtype: of the inputs.
        seconds: time to spend on each cell of the table (at least 3 repetitions).
        out: folder for the CSV.
    """
    console = make_console()
    try:
        ours = contenders(methods, backends)
        check_numbers("--threads", threads)
        check_numbers("--length", (length,))
        if seconds < 0:
            raise ValueError(f"--seconds: expected a number >= 0; got {seconds}")
        workload = Workload(batch, heads, dim, dtype, "cpu", max(threads))
    except ValueError as error:
        print(f"rla bench threads: {error}", file=sys.stderr)
        return 2
    before, notes = torch.get_num_threads(), left_out(backends)
    samples: dict[Cell, list[float]] = {}
    rounds: dict[Cell, list[float]] = {}
    counts = list(dict.fromkeys(threads))
    try:
        with make_progress(console) as progress:
            ready = _prepare(workload, ours, length, which, counts, notes)
            task = progress.add_task(f"time, T={length}", total=len(ready))
            time_in_rounds(ready, samples, seconds=seconds, rounds=rounds, on_done=lambda _: progress.advance(task))
    except KeyboardInterrupt:
        console.print("interrupted: what follows is what has been measured so far")
    finally:
        torch.set_num_threads(before)
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    rows = _rows(workload, length, which, counts, samples, rounds)
    if not rows:
        print("rla bench threads: nothing was measured", file=sys.stderr)
        return 1
    _print(console, workload, rows)
    write_csv(out / "threads.csv", [row | environment("cpu", max(threads)) | {"threads": row["threads"]} for row in rows])
    console.print(f"written: {out / 'threads.csv'}", soft_wrap=True)
    return 0


def _prepare(
    workload: Workload, ours: Sequence[Contender], length: int, which: Pass, counts: Sequence[int], notes: list[str]
) -> dict[Cell, Callable[[], object]]:
    """The pass of each contender with each number of threads, called once."""
    tokens = workload.tokens(length)
    matrices = Sgemm("cpu")
    runs: dict[Contender, Callable[[], object]] = {}
    for contender in ours:
        try:
            run = prepare(contender, workload, tokens, which)
            run()
            runs[contender] = run
        except (Unavailable, ValueError) as error:
            notes.append(f"{contender}: not available: {error}")
    runs[SGEMM] = lambda: matrices.a @ matrices.b

    def with_threads(run: Callable[[], object], count: int) -> Callable[[], object]:
        def call() -> object:
            torch.set_num_threads(count)
            return run()

        return call

    return {(contender, count): with_threads(run, count) for contender, run in runs.items() for count in counts}


def _rows(
    workload: Workload,
    length: int,
    which: Pass,
    counts: Sequence[int],
    samples: Mapping[Cell, Sequence[float]],
    rounds: Mapping[Cell, Sequence[float]],
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for (contender, count), times in samples.items():
        if not times:
            continue
        first = rounds.get((contender, counts[0]), ())
        ratios = [one / several for one, several in zip(first, rounds.get((contender, count), ()), strict=False)]
        time, ratio = Quantiles.of(times), Quantiles.of(ratios) if ratios else None
        rows.append(
            {
                "method": contender.method,
                "by": contender.by,
                "pass": which,
                "T": length,
                **workload.columns(),
                "threads": count,
                "ms_q20": 1e3 * time.q20,
                "ms_q50": 1e3 * time.q50,
                "ms_q80": 1e3 * time.q80,
                "repetitions": time.repetitions,
                "times_as_fast_q20": ratio and ratio.q20,
                "times_as_fast_q50": ratio and ratio.q50,
                "times_as_fast_q80": ratio and ratio.q80,
            }
        )
    return rows


def _print(console: Console, workload: Workload, rows: Sequence[Mapping[str, object]]) -> None:
    size = f"B={workload.batch} H={workload.heads} K=V={workload.dim} T={rows[0]['T']} {workload.dtype}"
    table = Table(title=f"{rows[0]['pass']}: {size}", title_justify="left")
    for name in ("method", "by"):
        table.add_column(name)
    for name in ("threads", "ms, median", "20 %", "80 %", "times as fast", "20 %", "80 %"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = [f"{row[f'ms_q{q}']:.2f}" for q in (50, 20, 80)]
        ratios = ["" if row["times_as_fast_q50"] is None else f"{row[f'times_as_fast_q{q}']:.2f}" for q in (50, 20, 80)]
        table.add_row(str(row["method"]), str(row["by"]), str(row["threads"]), *numbers, *ratios)
    console.print(table)
