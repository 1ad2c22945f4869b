"""The compile gate: every kernel as the backend would launch it, built for GPUs that are not here, and what became of it.

    python tools/gpu_check.py [--targets sm_80 sm_90] [--methods rdn] [--sizes 64 128] [--packed] [--out results/gpu-check.md]

A stand-in for Triton's driver names the target and takes the launches of `rla.ops.triton`'s own forward, backward and step:
what is compiled is what a GPU would get, with its tile sizes and its alignment of pointers. The gate fails on spilled registers
or a stack, on more shared memory than the device has, on a dot without tensor-core instructions, and on kernels that load
nothing by 16 bytes. Needs triton and torch, no GPU; TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
SIZES = (64, 128, 256)
DTYPES = ("bfloat16", "float32")
# Per streaming multiprocessor or compute unit, from the vendors' documents: shared bytes a block may use and shared bytes
# in all, threads, registers (of 32 bits) and blocks. The runtime takes 1 KiB of shared memory for each block on NVIDIA GPUs.
LIMITS = {
    "sm_80": (163 << 10, 164 << 10, 2048, 65536, 32),
    "sm_89": (99 << 10, 100 << 10, 1536, 65536, 24),
    "sm_90": (227 << 10, 228 << 10, 2048, 65536, 32),
    "sm_100": (227 << 10, 228 << 10, 2048, 65536, 32),
    "gfx942": (64 << 10, 64 << 10, 2048, 131072, 32),
}
_MMA = {
    "ptx": r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b",
    "amdgcn": r"\bv_mfma_\w+",
}


@dataclass(frozen=True)
class Row:
    """One kernel of one configuration. Registers are those of a thread."""

    target: str
    dtype: str
    size: int
    method: str
    kernel: str
    warps: int
    stages: int
    tile: str
    registers: int
    spills: int
    stack: int
    shared: int
    dots: int
    dots_without_mma: int
    mma: int
    widest_load: int  # bits
    wide_loads: float  # share of the bytes of all load instructions in the code that 128-bit ones load
    occupancy: float
    problems: str


def fake_driver(target: str):
    """A driver for a device that isn't there: enough to compile, not to run."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    sm = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if sm else GPUTarget("hip", target, 64)

    class Driver(DriverBase):
        utils = None

        def __init__(self):
            pass

        @staticmethod
        def is_active():
            return True

        def get_current_target(self):
            return gpu

        def get_current_device(self):
            return target  # compiled kernels are remembered by device

        def get_current_stream(self, device=None):
            return 0

        def get_active_torch_device(self):
            return torch.device("cpu")

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_benchmarker(self):
            raise NotImplementedError

    return Driver()


def compiled(target: str, dtype: str, size: int, method: str, packed: bool = False) -> list[tuple[str, object]]:
    """The kernels that forward, backward and step launch, compiled: (name, what triton.compile returned)."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    import rla
    from rla.ops import triton as backend

    driver.set_active(fake_driver(target))
    kernels: list[tuple[str, object]] = []
    run = JITFunction.run

    def record(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        mode = {("TRACE", True): "-trace", ("QUERY", True): "-q", ("QUERY", False): "-k"}
        suffix = "".join(mode.get((name, value), "") for name, value in options.items() if isinstance(value, bool))
        kernels.append((self.__name__ + suffix, kernel))
        return kernel

    JITFunction.run = record
    try:
        m, kind = rla.METHODS[method], getattr(torch, dtype)
        B, T, H = 1, 2 * backend.segment(size, size, kind.itemsize, 2), 16
        q, k = (torch.zeros(B, T, H // (1 + packed), size, dtype=kind) for _ in range(2))
        v, do = (torch.zeros(B, T, H, size, dtype=kind) for _ in range(2))
        cu_seqlens = torch.tensor((0, T), dtype=torch.int32) if packed else None
        gate = torch.zeros(B, T, H, dtype=kind)
        log_alpha = None if m.decay == "none" else gate
        beta = None if m.rate == "one" else gate
        gamma = gate if m.has_residual else None
        S = torch.zeros(B, H, size, size)
        R = S.clone() if m.has_R else None
        inputs = (q, k, v, log_alpha, beta, gamma, S, R)
        *_, saved = backend.forward(*inputs, cu_seqlens, m, True)
        backend.backward(do, S, R, *inputs, cu_seqlens, saved, m)
        backend.step(*(None if x is None else x[:, :1].contiguous() for x in inputs[:6]), S, R, m)
    finally:
        JITFunction.run = run
    return list(dict(kernels).items())


def measure(task: tuple[str, str, int, str, bool]) -> list[Row]:
    try:
        return [_row(*task[:4], name, kernel) for name, kernel in compiled(*task)]
    except Exception as error:  # a kernel that does not compile is a row of the table too
        blank = dict.fromkeys((f.name for f in dataclasses.fields(Row)), 0)
        text = f"does not compile: {type(error).__name__}: {error}".replace("\n", " ")[-300:]
        words = dict(zip(("target", "dtype", "size", "method"), task, strict=False))
        return [Row(**{**blank, **words, "kernel": "?", "tile": "", "problems": text})]


def _row(target: str, dtype: str, size: int, method: str, name: str, kernel) -> Row:
    meta, ttgir = kernel.metadata, kernel.asm["ttgir"]
    limit, shared_total, threads, registers_total, blocks = LIMITS[target]
    registers, spills, stack = (_nvidia if target.startswith("sm_") else _amd)(kernel)
    code = kernel.asm["ptx" if "ptx" in kernel.asm else "amdgcn"]
    mma = len(re.findall(_MMA["ptx" if "ptx" in kernel.asm else "amdgcn"], code))
    dots, plain = _dots(kernel.asm["ttir"], ttgir)
    widest, wide = _loads(code)
    wave = 32 if target.startswith("sm_") else 64
    size_threads = meta.num_warps * wave
    granule = 8
    by = (
        registers_total // (-(-max(registers, 1) // granule) * granule * size_threads),
        shared_total // (meta.shared + (1024 if wave == 32 else 0)) if meta.shared else 99,
        threads // size_threads,
        blocks,
    )
    tile = " ".join(f"{n}={v}" for n, v in _constants(kernel).items() if n in ("C", "BK", "BV") and v)
    problems = []
    if spills:
        problems.append(f"{spills} bytes spilled")
    if stack:
        problems.append(f"a stack of {stack} bytes")
    if meta.shared > limit:
        problems.append(f"shared memory: {meta.shared} of {limit} bytes")
    if plain:
        problems.append(f"{plain} of {dots} dots without tensor cores")
    if mma < dots:
        problems.append(f"{mma} tensor-core instructions for {dots} dots")
    if widest < 128:
        problems.append(f"loads of {widest} bits at most")
    return Row(
        target, dtype, size, method, name, meta.num_warps, meta.num_stages, tile, registers, spills, stack, meta.shared,
        dots, plain, mma, widest, wide, min(by) * size_threads / threads, "; ".join(problems),
    )  # fmt: skip


def _constants(kernel) -> dict[str, object]:
    names, constants = kernel.src.fn.arg_names, kernel.src.constants
    return {names[key[0]]: value for key, value in constants.items()}


def _dots(ttir: str, ttgir: str) -> tuple[int, int]:
    """Dots in the source's form, and those that were lowered to scalar arithmetic (their result has a blocked layout)."""
    blocked = set(re.findall(r"^(#blocked\w*) = ", ttgir, re.M))
    plain = [
        line
        for line in ttgir.splitlines()
        if " tt.dot " in line and any(f"{name}>" in line.split("->")[-1] for name in blocked)
    ]
    return len(re.findall(r" tt\.dot ", ttir)), len(plain)


def _loads(code: str) -> tuple[int, float]:
    """Loads from global memory by one thread: bits of the widest, and the share of the bits that 128-bit ones load."""
    bits = [int(vector or 1) * int(width) for vector, width in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", code)]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[\w.:]* \[[^\]]*\], \[[^\]]*\], (0x\w+|\d+)", code)
    bits += [8 * int(n, 0) for n in copies]
    bits += [32 * int(n or 1) for n in re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?\b", code)]
    bits += [16 for _ in re.findall(r"(?:global|buffer)_load_(?:ushort|short_d16)\w*\b", code)]
    return max(bits, default=0), sum(n for n in bits if n >= 128) / max(sum(bits), 1)


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _nvidia(kernel) -> tuple[int, int, int]:
    """Registers, bytes that instructions spill to local memory, and bytes of stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def dump(what: str) -> str:
            return subprocess.run([_tool("cuobjdump"), what, file.name], capture_output=True, text=True, check=True).stdout

        found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump("--dump-resource-usage"))}
        spills = found.get("LOCAL", 0)
        if found["STACK"]:  # nothing is spilled without one
            spills += sum(int(bits or 32) // 8 for bits in re.findall(r"\bSTL(?:\.(64|128))?\b", dump("--dump-sass")))
    return found["REG"], spills, found["STACK"]


def _amd(kernel) -> tuple[int, int, int]:
    def value(key: str) -> int:
        return int(re.search(rf"\.{key}:\s*(\d+)", kernel.asm["amdgcn"])[1])

    return value("vgpr_count"), 4 * (value("vgpr_spill_count") + value("sgpr_spill_count")), value("private_segment_fixed_size")


def main() -> int:
    """Compile, print the table, and fail if a kernel has a problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=LIMITS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="K = V")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--methods", nargs="+", default=("rdn",), help="rdn has every part; rla, gdn and sgla leave some out")
    parser.add_argument("--packed", action="store_true", help="packed sequences and two value heads for each key head")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="write the table there too")
    args = parser.parse_args()
    tasks = [(t, d, s, m, args.packed) for m in args.methods for d in args.dtypes for s in args.sizes for t in args.targets]
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=4) as pool:
        rows = []
        for done in pool.imap_unordered(measure, tasks, chunksize=1):
            rows += done
            for row in done:
                if row.problems:
                    print(
                        f"{row.target} {row.dtype} {row.size} {row.method} {row.kernel}: {row.problems}",
                        file=sys.stderr,
                        flush=True,
                    )
    order = {name: i for i, name in enumerate((*LIMITS, *DTYPES))}
    rows.sort(key=lambda r: (r.method, order[r.target], order[r.dtype], r.size))
    import triton

    text = table(rows, triton.__version__)
    print(text)
    if args.out:
        args.out.write_text(text)
    return int(any(row.problems for row in rows))


def table(rows: list[Row], version: str) -> str:
    """Markdown."""
    fields = [f.name for f in dataclasses.fields(Row)]
    lines = ["| " + " | ".join(fields) + " |", "|" + "---|" * len(fields)]
    for row in rows:
        values = (f"{x:.2f}" if isinstance(x, float) else str(x) for x in dataclasses.astuple(row))
        lines.append("| " + " | ".join(values) + " |")
    bad = collections.Counter(bool(row.problems) for row in rows)
    end = f"triton {version}: {bad[False]} kernels without a problem, {bad[True]} with one."
    return "\n".join(lines) + f"\n\n{end}\n"


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("gpu_check: TRITON_INTERPRET is set; compiling needs it unset")
    sys.exit(main())
