"""`rla bench kernels`: time, rate and peak memory of `rla.attend` over lengths, methods and backends, beside their peers.

Shown as tables, and written as kernels.csv (a row for each cell) and kernels.png.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..method import get_method
from ..ops import backends as known_backends
from . import figure, ratios, style
from .measure import Quantiles, Sgemm, environment, memory_kept, time_in_rounds, write_csv
from .memory import peaks
from .peers import Peer, peer_contenders, prepare
from .ratios import PASSES, Cell, Results
from .workload import AUTOGRAD, FLOAT32, Contender, Device, Dtype, Pass, Unavailable, Workload

COUNTED = (
    "GFLOPS: multiply-adds of the chunked form, triangular products counted whole, so that a kernel which skips their empty "
    "half can exceed sgemm. Peak: beyond the inputs."
)
AUTOGRAD_MAX_TOKENS = 4096  # beyond, autograd through the chunked forward needs gigabytes


def main(
    *,
    methods: tuple[str, ...] = ("sgla", "rla", "gdn", "rdn"),
    backends: tuple[str, ...] = (),
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384),
    passes: tuple[Pass, ...] = ("forward", "both"),
    peers: tuple[Peer, ...] = ("sdpa", "transformers", "onnxruntime"),
    batch: int = 1,
    heads: int = 16,
    dim: int = 128,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: int | None = None,
    seconds: float = 1.0,
    memory: bool = True,
    keep_memory: bool = False,
    out: Path = Path("results/kernels"),
) -> int:
    """Time attend's backends beside their peers, over lengths, on a machine that does nothing else; compare within a run.

    Writes kernels.csv (lowest times, 20/50/80 % quantiles, rates, peak memory, machine, versions) and kernels.png. Ctrl-C
    writes what there is.

    Example: rla bench kernels --methods rla rdn --lengths 1024 4096 --peers sdpa --threads 2

    Args:
        methods: names in rla.METHODS.
        backends: names in rla.backends(). Default: the usable ones, reference excepted.
        lengths: tokens in a sequence.
        passes: forward alone, and both forward and backward.
        peers: who else to time; a peer that can't run here is left out with a note. float32: our methods on float32 inputs,
            beside those of --dtype.
        batch: sequences.
        heads: heads.
        dim: K and V.
        dtype: of the inputs.
        device: where.
        threads: of the CPU. Default: torch's.
        seconds: time to spend on each cell of the table (at least 3 repetitions).
        memory: measure peak memory too, in child processes.
        keep_memory: keep freed memory in the process while timing, for a machine that is slow to hand out more. By default
            the time of doing so is part of a pass, as in a program of yours.
        out: folder for the CSV and the figure.
    """
    console = make_console()
    try:
        workload = Workload(batch, heads, dim, dtype, device, torch.get_num_threads() if threads is None else threads)
        workload.check_device()
        ours = contenders(methods, backends)
        check_numbers("--lengths", lengths)
        if seconds < 0:
            raise ValueError(f"--seconds: expected a number >= 0; got {seconds}")
        if not passes:
            raise ValueError("--passes: expected forward, both or the two; got none")
    except ValueError as error:
        print(f"rla bench kernels: {error}", file=sys.stderr)
        return 2
    before = torch.get_num_threads()
    torch.set_num_threads(workload.threads)
    every = [*ours, *peer_contenders(peers, methods)]
    bench = _Bench(workload, every, sorted(set(lengths)), [p for p in PASSES if p in passes])
    bench.notes.update(dict.fromkeys(left_out(backends)))
    try:
        with make_progress(console) as progress:
            with memory_kept() if keep_memory else nullcontext():
                bench.run(progress, seconds)
            if memory:
                bench.measure_memory(progress)
    except KeyboardInterrupt:
        console.print("interrupted: what follows is what has been measured so far")
    finally:
        torch.set_num_threads(before)
    if not bench.results.times:
        bench.print_notes(console)
        print("rla bench kernels: nothing was measured", file=sys.stderr)
        return 1
    bench.print(console)
    bench.write(out)
    console.print(f"written: {out / 'kernels.csv'}, {out / 'kernels.png'}", soft_wrap=True)
    return 0


def contenders(methods: Sequence[str], backends: Sequence[str]) -> list[Contender]:
    """Each method on each backend; ValueError for a name that is unknown, or a backend that is not usable here."""
    known = known_backends()
    for name in backends:
        if name not in known:
            raise ValueError(f"--backends: unknown name {name!r}; expected some of {', '.join(known)}")
        if not known[name].usable:
            raise ValueError(f"--backends: {name} is not usable here: {known[name].reason}")
    chosen = backends or [b.name for b in known.values() if b.usable and b.name != "reference"]
    for name in methods:
        get_method(name)
    if not methods:
        raise ValueError("--methods: expected at least one")
    return [Contender(m, b) for b in dict.fromkeys(chosen) for m in dict.fromkeys(methods)]


def left_out(backends: Sequence[str]) -> list[str]:
    """Notes on the backends that a default choice passes over because they are not usable here."""
    unusable = [] if backends else [b for b in known_backends().values() if not b.usable]
    return [f"backend {b.name}: not available: {b.reason}" for b in unusable]


def check_numbers(option: str, numbers: Sequence[int]) -> None:
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{option}: expected numbers of at least 1; got {' '.join(map(str, numbers)) or 'none'}")


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=132)  # a file or a pipe has no width of its own


def make_progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


@dataclass
class _Bench:
    workload: Workload
    contenders: list[Contender]
    lengths: list[int]
    passes: list[Pass]
    notes: dict[str, None] = field(default_factory=dict)  # in order, each once
    samples: dict[Cell, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sgemm = Sgemm(self.workload.device)
        self.results = Results(self.workload, {}, {})

    def run(self, progress: Progress, seconds: float) -> None:
        cells = len(self.contenders) * len(self.passes)
        task = progress.add_task("time", total=cells * len(self.lengths))
        try:
            for T in self.lengths:
                progress.update(task, description=f"time, T={T}")
                self.sgemm.sample()
                ready = self._prepare(T)
                progress.advance(task, cells - len(ready))
                rounds = self.results.rounds
                time_in_rounds(ready, self.samples, seconds=seconds, rounds=rounds, on_done=lambda _: progress.advance(task))
            self.sgemm.sample()
        finally:
            self.results.times.update({cell: Quantiles.of(times) for cell, times in self.samples.items() if times})
            if self.sgemm.gflops:
                self.results.sgemm, self.results.sgemm_high = self.sgemm.median, max(self.sgemm.gflops)

    def _prepare(self, T: int) -> dict[Cell, Callable[[], object]]:
        """The passes over T tokens that can run here; the others leave a note."""
        tokens = self.workload.tokens(T)
        ready: dict[Cell, Callable[[], object]] = {}
        for contender in self.contenders:  # its passes one after the other, for they are compared
            for which in self.passes:
                try:
                    run = prepare(contender, self.workload, tokens, which)
                    run()
                    ready[Cell(contender, T, which)] = run
                except (Unavailable, ValueError) as error:  # ValueError: a backend for other devices, named or found usable
                    self.notes[f"{contender} {PASSES[which]}: not available: {error}"] = None
                except (RuntimeError, MemoryError) as error:
                    self.notes[f"{contender} {PASSES[which]}, T={T}: failed: {type(error).__name__}: {error}"] = None
        return ready

    def measure_memory(self, progress: Progress) -> None:
        measured = list(self.contenders)
        if "both" in self.passes and any(c.method == "rla" for c in measured):
            measured.append(Contender("rla", AUTOGRAD))
        task = progress.add_task("peak memory", total=len(measured))
        for contender in measured:
            progress.update(task, description=f"peak memory, {contender}")
            if contender.by == AUTOGRAD:
                cells: list[tuple[int, Pass]] = [(T, "both") for T in self.lengths if T <= AUTOGRAD_MAX_TOKENS]
            else:
                cells = [(c.T, c.which) for c in self.results.times if c.contender == contender]
            for T, which, peak, why in peaks(contender, self.workload, cells) if cells else ():
                if peak is None:
                    self.notes[f"{contender} {PASSES[which]}, T={T}: no peak memory: {why}"] = None
                else:
                    self.results.peaks[Cell(contender, T, which)] = peak
            progress.advance(task)

    def print(self, console: Console) -> None:
        console.print(f"attend: {self.workload}; {self.sgemm}", soft_wrap=True)
        console.print(f"{COUNTED}\n", soft_wrap=True)
        for T in sorted({cell.T for cell in self.results.times}):
            console.print(self._table(T))
        self._print_ratios(console, "ratios of medians", "run")
        self._print_ratios(console, "medians of ratios within rounds, timed side by side", "rounds")
        self.print_notes(console)

    def _print_ratios(self, console: Console, title: str, statistic: ratios.Statistic) -> None:
        rows = ratios.table(self.results, self.contenders, self.lengths, statistic)
        if rows:
            table = Table(title=title, title_justify="left")
            table.add_column("ratio", overflow="fold")
            for T in self.lengths:
                table.add_column(f"T={T}", justify="right", no_wrap=True)
            for name, values in rows:
                table.add_row(name, *(_show(x, "{:.2f}") for x in values))
            console.print(table)

    def print_notes(self, console: Console) -> None:
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True, markup=False)

    def _table(self, T: int) -> Table:
        table = Table(title=f"T = {T}", title_justify="left")
        for name in ("method", "by", "pass"):
            table.add_column(name)
        for name in ("ms, median", "20 %", "80 %", "tokens/s", "GFLOPS", "of sgemm", "peak MiB"):
            table.add_column(name, justify="right", no_wrap=True)
        for which in self.passes:
            for contender in self.contenders:
                cell = Cell(contender, T, which)
                if cell not in self.results.times:
                    continue
                time, r = self.results.times[cell], self.results
                numbers = [f"{1e3 * x:.2f}" for x in (time.q50, time.q20, time.q80)]
                numbers += [
                    _show(r.tokens_per_second(cell), "{:,.0f}"),
                    _show(r.rate(cell), "{:.1f}"),
                    _show(r.share(cell), "{:.2f}"),
                ]
                numbers.append(_show(r.peaks.get(cell), "{:.1f}", 1 / 2**20))
                table.add_row(contender.method, contender.by, PASSES[which], *numbers)
            table.add_section()
        return table

    def write(self, out: Path) -> None:
        r, rows = self.results, []
        same = environment(self.workload.device, self.workload.threads)
        for cell, time in r.times.items():
            w = self.workload if cell.contender.by != FLOAT32 else replace(self.workload, dtype="float32")
            rows.append(
                {
                    "method": cell.contender.method,
                    "by": cell.contender.by,
                    "pass": cell.which,
                    "T": cell.T,
                    **w.columns(),
                    "ms_low": None if time.low is None else 1e3 * time.low,
                    "ms_q20": 1e3 * time.q20,
                    "ms_q50": 1e3 * time.q50,
                    "ms_q80": 1e3 * time.q80,
                    "repetitions": time.repetitions,
                    "tokens_per_second": r.tokens_per_second(cell),
                    "gflops": r.rate(cell),
                    "sgemm_gflops": r.sgemm,
                    "sgemm_gflops_high": r.sgemm_high,
                    "share_of_sgemm": r.share(cell),
                    "peak_bytes": r.peaks.get(cell),
                    "tensor_bytes": w.tensor_bytes(cell.T),
                    **same,
                }
            )
        write_csv(out / "kernels.csv", rows)
        passes = [p for p in self.passes if any(c.which == p for c in r.times)]
        style.save(figure.kernels(r, self.contenders, passes), out / "kernels.png")


def _show(x: float | None, form: str, scale: float = 1.0) -> str:
    return "" if x is None else form.format(x * scale)
