"""Timing that survives a drifting machine, the rate of sgemm, and the record of where and with what it was measured.

Cells are timed in rounds, a short burst of each in turn, so that a change of clock or load meets all of them alike. Compare
medians of one run; times of two runs say little. On a machine that others use too, compare within rounds.
"""

from __future__ import annotations

import csv
import ctypes
import datetime
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from .. import __version__
from ..doctor import INSTRUCTION_SETS, cpu_flags, cpu_name

K = TypeVar("K", bound=Hashable)

MIN_REPETITIONS = 3
ROUNDS = 10  # the budget of a cell is spread over at least so many rounds
SETTLE = 0.002  # seconds before a burst, for idle threads of the last one to stop spinning
SGEMM_SIZE = 2048
M_TRIM_THRESHOLD, M_MMAP_MAX, MADV_HUGEPAGE = -1, -4, 14  # of glibc's malloc.h, Linux's mman.h
RESERVE = 4 << 30


@dataclass(frozen=True)
class Quantiles:
    """Seconds."""

    q20: float
    q50: float
    q80: float
    repetitions: int
    low: float | None = None  # the lowest; None where a report reads a file of medians

    @classmethod
    def of(cls, samples: Sequence[float]) -> Quantiles:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1, samples[0])
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(fifths[0], statistics.median(samples), fifths[3], len(samples), min(samples))


@contextmanager
def memory_kept(reserve: int = RESERVE) -> Iterator[None]:
    """Meanwhile glibc keeps what is freed, so that a kernel's time is not that of the system handing out memory.

    It gives blocks of 32 MB and more back at once. Getting them anew takes 0.1 s per GB, and 1 to 3 s on a virtual machine that
    shares its memory with others. An aligned block doesn't always fit where one of its size was freed: the heap grows for a
    while, into `reserve` bytes, or a quarter of the free memory if that is less, that are written to once at the start, in huge
    pages if the system has them. Nothing is done where there is no glibc.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not all(hasattr(libc, name) for name in ("mallopt", "malloc_trim")):
        yield
        return
    assert libc is not None
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    libc.mallopt(M_MMAP_MAX, 0)
    size = min(reserve, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    block = libc.malloc(size)
    if block:
        page = os.sysconf("SC_PAGE_SIZE")
        start = -(-block // page) * page
        libc.madvise(start, (block + size - start) // page * page, MADV_HUGEPAGE)
        ctypes.memset(block, 0, size)
        libc.free(block)
    try:
        yield
    finally:  # glibc's defaults
        libc.mallopt(M_TRIM_THRESHOLD, 128 * 1024)
        libc.mallopt(M_MMAP_MAX, 65536)
        libc.malloc_trim(0)


def synchronise() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def time_once(call: Callable[[], object]) -> float:
    synchronise()
    start = time.perf_counter()
    result = call()
    synchronise()
    seconds = time.perf_counter() - start
    del result  # freed after the clock has stopped
    return seconds


def time_in_rounds(
    cells: Mapping[K, Callable[[], object]],
    samples: dict[K, list[float]],
    *,
    seconds: float,
    rounds: dict[K, list[float]] | None = None,
    on_done: Callable[[K], None] = lambda key: None,
) -> None:
    """Append to `samples` the times of each cell: at least 3, and as many as fit in `seconds`.

    They are appended as they come, so that an interrupt loses nothing. Each cell has been called before, to warm up. Of each
    round the median is appended to `rounds`.
    """
    pending = dict(cells)
    while pending:
        for key, call in list(pending.items()):
            own, spent = samples.setdefault(key, []), 0.0
            before = len(own)
            time.sleep(SETTLE)
            call()  # the first would be timed with the cold caches that the others left
            while spent == 0.0 or spent + own[-1] < seconds / ROUNDS:
                own.append(time_once(call))
                spent += own[-1]
            if rounds is not None:
                rounds.setdefault(key, []).append(statistics.median(own[before:]))
            if len(own) >= MIN_REPETITIONS and sum(own) >= seconds:
                del pending[key]
                on_done(key)


class Sgemm:
    """float32 products of square matrices, sampled now and then over a run: what the machine could do meanwhile."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.a, self.b = torch.randn(2, SGEMM_SIZE, SGEMM_SIZE, generator=generator, device=device)
        self.gflops: list[float] = []

    def sample(self) -> None:
        self.a @ self.b
        time.sleep(SETTLE)
        seconds = statistics.median(time_once(lambda: self.a @ self.b) for _ in range(3))
        self.gflops.append(2 * SGEMM_SIZE**3 / seconds / 1e9)

    @property
    def median(self) -> float:
        return statistics.median(self.gflops)

    def __str__(self) -> str:
        low, high = min(self.gflops), max(self.gflops)
        return f"sgemm {SGEMM_SIZE}^3: {self.median:.0f} GFLOPS, median of {len(self.gflops)} ({low:.0f} to {high:.0f})"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def environment(device: str, threads: int) -> dict[str, object]:
    """Columns of the CSV that are the same in each row: machine, versions, date."""
    flags = cpu_flags()
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "instruction_sets": " ".join(name for name in INSTRUCTION_SETS if name in flags),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "rla": __version__,
        **{package: version(package) for package in ("torch", "transformers", "onnxruntime")},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Rows of the same columns; None is written as nothing, a float with six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({name: f"{x:.6g}" if isinstance(x, float) else x for name, x in row.items()} for row in rows)
