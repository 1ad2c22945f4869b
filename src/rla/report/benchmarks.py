"""Sections on benchmarks, from the CSV files of `rla bench kernels` and `rla bench decode`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from ..bench import figure, ratios
from ..bench.decode import panel
from ..bench.measure import Quantiles
from ..bench.ratios import PASSES, Cell, Results
from ..bench.workload import AUTOGRAD, Contender, Workload
from .page import Figure, Section, Table

ENVIRONMENT = ("machine", "instruction_sets", "cores", "threads", "system", "python", "rla", "torch", "transformers", "date")


def section(path: Path, name: str) -> Section:
    """The section of a file, whose figure gets this name; ValueError if it is not of the two commands."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    try:
        if rows and "ms_q50" in rows[0]:
            return _kernels(rows, name)
        if rows and "pass_us_q50" in rows[0]:
            return _decode(rows, name)
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: a row can't be read: {error!r}") from error
    raise ValueError(f"{path}: not a CSV file of `rla bench kernels` or `rla bench decode`")


def _workload(row: dict[str, str]) -> Workload:
    dtype: Any = row["dtype"]
    device: Any = row["device"]
    return Workload(int(row["batch"]), int(row["heads"]), int(row["dim"]), dtype, device, int(row["threads"]))


def _quantiles(row: dict[str, str], prefix: str, unit: float) -> Quantiles:
    q20, q50, q80 = (unit * float(row[f"{prefix}_q{q}"]) for q in (20, 50, 80))
    return Quantiles(q20, q50, q80, int(row["repetitions"]))


def read_kernels(rows: list[dict[str, str]]) -> Results:
    results = Results(_workload(rows[0]), {}, {}, float(rows[0]["sgemm_gflops"] or 0) or None)
    for row in rows:
        which: Any = row["pass"]
        cell = Cell(Contender(row["method"], row["by"]), int(row["T"]), which)
        results.times[cell] = _quantiles(row, "ms", 1e-3)
        if row["peak_bytes"]:
            results.peaks[cell] = int(row["peak_bytes"])
    return results


def _kernels(rows: list[dict[str, str]], name: str) -> Section:
    results = read_kernels(rows)
    contenders = [c for c in dict.fromkeys(cell.contender for cell in results.times) if c.by != AUTOGRAD]
    lengths = sorted({cell.T for cell in results.times})
    passes = [which for which in PASSES if any(cell.which == which for cell in results.times)]
    times = []
    for which in passes:
        for c in contenders:
            found = [results.times.get(Cell(c, T, which)) for T in lengths]
            if any(found):
                times.append((f"{c}, {PASSES[which]}", *("" if t is None else f"{1e3 * t.q50:,.1f}" for t in found)))
    over = [
        (row, *("" if x is None else f"{x:.2f}" for x in values)) for row, values in ratios.table(results, contenders, lengths)
    ]
    headers = tuple(f"T = {T:,}" for T in lengths)
    drawn = Figure(
        name,
        figure.kernels(results, contenders, passes),
        f"Time and tokens a second over the length T for {', '.join(map(str, contenders))}. The table has the medians.",
        "Medians; bands from the 20 % to the 80 % quantile. Both axes are logarithmic.",
        wide=True,
    )
    tables = [Table("Time in ms, medians", ("what", *headers), tuple(times))]
    if over:
        tables.append(Table("Ratios of medians of this run", ("ratio", *headers), tuple(over)))
    body = (f"`rla.attend`: {results.workload}. Compare within one run; times of two runs say little.",)
    return Section("Kernels", body, (), (drawn,), tuple(tables), _notes(rows[0]), ("rla bench kernels",))


def _decode(rows: list[dict[str, str]], name: str) -> Section:
    workload = _workload(rows[0])
    panels: dict[str, dict[Contender, tuple[Quantiles, Quantiles]]] = {}
    shown = []
    for row in rows:
        title = panel(int(row["states"]), int(row["position"]))
        one, sweep = _quantiles(row, "us", 1e-6), _quantiles(row, "pass_us", 1e-6)
        panels.setdefault(title, {})[Contender(row["method"], row["by"])] = (one, sweep)
        times = [f"{1e6 * x:,.1f}" for x in (one.q50, sweep.q50)]
        shown.append((f"{row['method']} {row['by']}", title, *times, f"{one.q50 / sweep.q50:.2f}"))
    drawn = Figure(
        name,
        figure.decode(f"step: {workload}", panels),
        "Time of one decoding step beside one pass over its states, for each method. The medians are in the table.",
        "Medians; bars from the 20 % to the 80 % quantile.",
        wide=True,
    )
    headers = ("method", "states", "step (us)", "pass (us)", "step over pass")
    table = Table("Time of a step, medians", headers, tuple(shown))
    body = (f"One token at a time: {workload}.",)
    return Section("Decoding", body, (), (drawn,), (table,), _notes(rows[0]), ("rla bench decode",))


def _notes(row: dict[str, str]) -> tuple[str, ...]:
    return (", ".join(f"{key.replace('_', ' ')} {row[key]}" for key in ENVIRONMENT if row.get(key)),)
