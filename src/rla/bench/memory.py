"""Peak memory of a pass: what it needs beyond its inputs, those included that it returns.

On CUDA, the peak of torch's allocator. On the CPU, the growth of the process' peak resident memory (VmHWM), which covers
every allocator, C++ scratch space and ONNX Runtime too. It is measured in a child process for each contender: with its big
blocks mapped one by one (so that freed memory goes back at once and is not reused unseen), after a pass over a few tokens has
loaded libraries and started threads, and with the peak reset before the pass. Linux only: elsewhere there is no such counter.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch

from ..ops.memory import release
from .peers import prepare
from .workload import Contender, Pass, Unavailable, Workload

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM_UP_TOKENS = 128
MMAP_THRESHOLD = 1 << 16  # bytes; smaller blocks are noise


def peaks(
    contender: Contender, workload: Workload, cells: Sequence[tuple[int, Pass]]
) -> Iterator[tuple[int, Pass, int | None, str]]:
    """(T, pass, peak in bytes or None, why None) of each cell."""
    if workload.device == "cuda":
        for T, which in cells:
            yield T, which, *_try(_cuda_peak, contender, workload, T, which)
        return
    if not os.access(CLEAR_REFS, os.W_OK):
        yield from ((T, which, None, "peak memory is measured on Linux only") for T, which in cells)
        return
    task = json.dumps([dataclasses.asdict(contender), dataclasses.asdict(workload), list(cells)])
    env = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "OMP_WAIT_POLICY": "passive",
    }
    # The package is found as this process found it, installed or not.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "rla.bench.memory", task]
    left = list(cells)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                peak, why = json.loads(line)
                yield *left.pop(0), peak, why
        finally:
            if child.poll() is None:
                child.terminate()
    yield from ((T, which, None, f"the measuring process ended with code {child.returncode}") for T, which in left)


def _try(
    measure: Callable[[Contender, Workload, int, Pass], int], contender: Contender, workload: Workload, T: int, which: Pass
) -> tuple[int | None, str]:
    try:
        return measure(contender, workload, T, which), ""
    except Unavailable as error:
        return None, str(error)
    except (RuntimeError, MemoryError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"


def _cuda_peak(contender: Contender, workload: Workload, T: int, which: Pass) -> int:
    run = prepare(contender, workload, workload.tokens(T), which)
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _cpu_peak(contender: Contender, workload: Workload, T: int, which: Pass) -> int:
    prepare(contender, workload, workload.tokens(min(T, WARM_UP_TOKENS)), which)()
    run = prepare(contender, workload, workload.tokens(T), which)
    gc.collect()
    release()  # what the last cell has left would not be counted
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    CLEAR_REFS.write_text("5")  # the peak becomes what is resident now
    before = _status("VmRSS:")
    run()
    return max(0, _status("VmHWM:") - before)


def child(task: str) -> None:
    """Measure the cells of `task` and print a JSON line for each."""
    contender, workload, cells = json.loads(task)
    measured = Workload(**workload)
    torch.set_num_threads(measured.threads)
    for T, which in cells:
        assert which in get_args(Pass)
        print(json.dumps(_try(_cpu_peak, Contender(**contender), measured, T, which)), flush=True)


if __name__ == "__main__":
    child(sys.argv[1])
