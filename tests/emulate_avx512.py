"""Runs the AVX-512 build of the native kernels on an emulated CPU (Bochs), for machines that have no AVX-512.

    pip install bochscpu-python        once; Linux on x86-64, with g++ and binutils
    python tests/emulate_avx512.py     some two minutes; the last line is `N passed, M failed`

kernel.cpp is compiled with the flags of setup.py, but without OpenMP, and linked with dispatch.cpp and the few functions
they need of the C library into an image at a fixed address. `rla.ops.native` runs as it is, except that its library is
the emulator: the tensors of a call are copied in, the results are copied out. So forward, backward and step meet the
float64 reference as in the other tests, and dispatch.cpp has to find the AVX-512 of the emulated CPU. The emulator has no AMX:
that forward runs with the model of the tiles (csrc/amx_model.h).

Memory is stricter than a real machine's: every tensor and every block of scratch memory ends where a missing page begins,
what lies in front of a tensor has to stay as it was, inputs too, and uninitialised memory is NaN.
"""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import importlib
import mmap
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "src" / "rla" / "ops" / "csrc"
METHODS = ("sgla", "gdn", "rla", "rdn", "rla-sum", "rdn-nofit", "rdn-logcosh")
CASES = ("T65", "grouped", "packed", "wide")  # of common.WEIRD, for every method and dtype; the others for RDN alone

# Guest memory, virtual = physical: region -> (address, bytes). Between the regions nothing is mapped.
PAGE, MB = 4096, 1 << 20
IMAGE, STACK, THREAD, TABLES = 4 * MB, 8 * MB, 10 * MB, 1024 * MB
FS = THREAD + 4 * PAGE  # thread-local variables end there
TENSORS, TENSOR_STRIDE, TENSOR_SIZE, TENSOR_COUNT = 16 * MB, 2 * MB, MB, 27  # the last one is for struct Args
HEAP, HEAP_STRIDE, HEAP_SIZE, HEAP_COUNT = 128 * MB, 16 * MB, 12 * MB, 4
REGIONS = {"image": (IMAGE, 2 * MB), "stack": (STACK, MB), "thread": (THREAD, FS - THREAD + PAGE)}
REGIONS |= {f"tensor{i}": (TENSORS + i * TENSOR_STRIDE, TENSOR_SIZE) for i in range(TENSOR_COUNT)}
REGIONS |= {f"heap{i}": (HEAP + i * HEAP_STRIDE, HEAP_SIZE) for i in range(HEAP_COUNT)}

# What the image needs of the C and C++ libraries. A trap is exception 6.
RUNTIME = """
typedef unsigned long size_t;
void *memcpy(void *to, const void *from, size_t n) {
  void *at = to;
  __asm__ volatile("rep movsb" : "+D"(at), "+S"(from), "+c"(n) : : "memory");
  return to;
}
void *memset(void *to, int c, size_t n) {
  void *at = to;
  __asm__ volatile("rep stosb" : "+D"(at), "+c"(n) : "a"(c) : "memory");
  return to;
}
int strcmp(const char *a, const char *b) {
  while (*a && *a == *b) ++a, ++b;
  return *(const unsigned char *)a - *(const unsigned char *)b;
}
float expf(float x) {
  if (x != x || x > 89) return x * __builtin_inff();
  if (x < -104) return 0;
  double n = (long)(x * 1.4426950408889634 - 0.5), r = x - n * 0.6931471805599453, y = 1;
  for (int i = 16; i; --i) y = 1 + y * r / i;
  union { long i; double d; } scale = {((long)n + 1023) << 52};
  return (float)(y * scale.d);
}
static size_t blocks;
void *aligned_alloc(size_t alignment, size_t n) {
  if (n > HEAP_SIZE || blocks == HEAP_COUNT) __builtin_trap();
  return (void *)((HEAP + blocks++ * HEAP_STRIDE + HEAP_SIZE - n) & -alignment);
}
void *malloc(size_t n) { return aligned_alloc(16, n); }
void free(void *p) {}
void abort(void) { __builtin_trap(); }
void _Unwind_Resume(void *x) { __builtin_trap(); }
void __gxx_personality_v0(void) { __builtin_trap(); }
int __cxa_thread_atexit(void *f, void *x, void *library) { return 0; }
int madvise(void *p, size_t n, int advice) { return 0; }
int sched_yield(void) { return 0; }
int omp_get_num_threads(void) { return 1; }
int omp_get_thread_num(void) { return 0; }
char *getenv(const char *name) { return 0; }
void *__dso_handle;
void halt(void) { __asm__ volatile("hlt"); }
"""

# The functions of glibc 2.38 that the wheel of bochscpu-python asks for.
SHIM = """
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#define NUMBER(type, name) type __isoc23_##name(const char *s, char **end, int base) { return name(s, end, base); }
NUMBER(long, strtol)
NUMBER(long long, strtoll)
NUMBER(unsigned long, strtoul)
NUMBER(unsigned long long, strtoull)
int __isoc23_sscanf(const char *s, const char *format, ...) {
  va_list list;
  va_start(list, format);
  int n = vsscanf(s, format, list);
  va_end(list);
  return n;
}
"""


def shell(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        sys.exit(f"{command[0]}: {error}; g++ and binutils are needed")
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stderr}")
    return done.stdout


def import_bochscpu():
    """The emulator. Where glibc is too old for its wheel, this script starts again with SHIM and exits."""
    try:
        importlib.import_module("bochscpu.cpu")
        importlib.import_module("bochscpu.memory")
        return importlib.import_module("bochscpu")
    except ImportError as error:
        if "__isoc23" not in str(error) or "RLA_EMULATE_SHIM" in os.environ:
            sys.exit(f"no emulator ({error}): pip install bochscpu-python")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "shim.c").write_text(SHIM)
        shell("cc", "-shared", "-fPIC", f"{folder}/shim.c", "-o", f"{folder}/shim.so")
        env = {**os.environ, "LD_PRELOAD": f"{folder}/shim.so {os.environ.get('LD_PRELOAD', '')}", "RLA_EMULATE_SHIM": "1"}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=env, check=False).returncode)


def setting(name: str):
    """A literal of setup.py, which can't be imported: it would set up."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    sys.exit(f"setup.py has no {name}")


def build(folder: str) -> tuple[bytes, dict[str, int], set[int]]:
    """The flat image, its symbols, and the addresses of the instructions that use a zmm register."""
    names = ("kernel.o", "amx.o", "dispatch.o", "runtime.o", "image.elf")
    kernel, amx, dispatch, runtime, elf = (f"{folder}/{name}" for name in names)
    cxx = shlex.split(os.environ.get("CXX", "g++"))
    flags = [flag for flag in shlex.split(setting("FLAGS")) if flag != "-fopenmp"] + ["-w", "-DRLA_X86"]
    isa = shlex.split(setting("X86")["avx512"])
    tiles = shlex.split(setting("MODEL"))
    shell(*cxx, *flags, *isa, "-DRLA_ISA=avx512", "-c", str(CSRC / "kernel.cpp"), "-o", kernel)
    shell(*cxx, *flags, *isa, *tiles, "-DRLA_ISA=amx", "-c", str(CSRC / "kernel.cpp"), "-o", amx)
    shell(*cxx, *flags, "-fno-threadsafe-statics", '-DRLA_STAMP=""', "-c", str(CSRC / "dispatch.cpp"), "-o", dispatch)
    Path(folder, "runtime.c").write_text(RUNTIME)
    heap = [f"-D{name}={globals()[name]}ul" for name in ("HEAP", "HEAP_STRIDE", "HEAP_SIZE", "HEAP_COUNT")]
    shell("cc", "-w", "-O2", "-fno-builtin", *heap, "-c", f"{folder}/runtime.c", "-o", runtime)
    for section in (".tdata", ".init_array"):
        assert section not in shell("readelf", "-SW", kernel, amx, dispatch), f"{section} would have to be set up before a call"
    # the linker makes thread-local variables offsets from fs; other instruction sets are null
    others = [name for name in re.findall(r"rla_\w+", shell("nm", "-u", dispatch)) if not name.endswith("_avx512")]
    place = ["-static", "-nostdlib", "-no-pie", "-Wl,-N", f"-Wl,-Ttext={IMAGE:#x}", "-Wl,--build-id=none", "-Wl,-e,halt"]
    place += [f"-Wl,--defsym={name}=0" for name in others]
    shell(*cxx, *place, kernel, amx, dispatch, runtime, "-lgcc", "-o", elf)
    shell("objcopy", "-O", "binary", elf, f"{folder}/image.bin")
    symbols = {name: int(at, 16) for at, _, name in (row.split() for row in shell("nm", elf).splitlines())}
    zmm = re.findall(r"^ *(\w+):\t.*%zmm", shell("objdump", "-d", "--no-show-raw-insn", elf), re.M)
    return Path(folder, "image.bin").read_bytes(), symbols, {int(at, 16) for at in zmm}


class Emulator:
    """Takes the place of `native._Library`: its attributes, served by an emulated CPU."""

    missing = "no library of this machine's: what reads tensors from Python does without"
    WRITTEN = frozenset(("o", "dq", "dk", "dv", "S", "R", "saved", "pS", "pR", "dlog_alpha", "dbeta", "dgamma", "dS0", "dR0"))

    def __init__(self, bochs, image: bytes, symbols: dict[str, int]) -> None:
        from rla.ops import native

        self.bochs, self.image, self.symbols, self.native = bochs, image, symbols, native
        self.tiles = False  # whether forward is that of AMX
        self.counts: dict[str, Counter[int]] | None = None  # function -> address -> executions, if wanted
        body = re.sub(r"//.*", "", (CSRC / "args.h").read_text().split("struct Args {")[1].split("};")[0])
        fields = re.findall(r"(\w+)(?:\[(\d)\])?\s*[,;]", body)
        self.fields = [name for name, count in fields for _ in range(int(count or 1))]
        assert 8 * len(self.fields) == native._ARGS.size, "args.h and native._ARGS differ"
        self.pointers = self.fields[: self.fields.index("B")]
        self.memory = mmap.mmap(-1, sum(size for _, size in REGIONS.values()))
        self.tables = bochs.memory.PageMapLevel4Table()  # owns its pages
        self.host = {}  # region -> host address
        host = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for name, (start, size) in REGIONS.items():
            self.host[name] = host
            for guest in range(start, start + size, PAGE):
                bochs.memory.page_insert(guest, host)
                self.tables.insert(guest, guest, 7)
                host += PAGE
        for host, guest in self.tables.commit(TABLES):
            bochs.memory.page_insert(guest, host)
        self.panel, self.chunk = (self.run(f"rla_{x}") for x in ("panel", "chunk"))
        self.isa = image[self.run("rla_isa") - IMAGE :].split(b"\0")[0].decode()
        self.forward, self.backward, self.step = (partial(self.call, f"rla_{x}") for x in ("forward", "backward", "step"))

    def run(self, function: str, argument: int = 0) -> int:
        """Call a function of the image, in fresh memory but for the tensors; its result."""
        for name, (_, size) in REGIONS.items():
            if not name.startswith("tensor"):
                ctypes.memset(self.host[name], 0 if name in ("image", "thread") else 0xFF, size)
        ctypes.memmove(self.host["image"], self.image, len(self.image))
        ctypes.c_uint64.from_address(self.host["stack"] + MB - 72).value = self.symbols["halt"]  # where to return
        ctypes.c_uint64.from_address(self.host["thread"] + FS - THREAD).value = FS  # fs:0 holds its own address

        def segment(selector: int, attributes: int, base: int = 0):
            s = self.bochs.Segment()
            s.base, s.limit, s.selector, s.attr, s.present = base, 0xFFFFFFFF, selector, attributes, True
            return s

        state = self.bochs.State()
        self.bochs.cpu.set_long_mode(state)
        state.cr3, state.cr0 = TABLES, state.cr0 & ~(1 << 16)
        state.cr4 |= 1 << 5 | 1 << 9 | 1 << 10 | 1 << 18  # PAE, SSE and its exceptions, XSAVE
        state.xcr0, state.rflags = 0xE7, 2  # x87, SSE, AVX, AVX-512
        state.mxcsr, state.mxcsr_mask = 0x1F80, 0xFFFF
        state.cs, state.fs = segment(0x08, 0xA09B), segment(0x10, 0xC093, FS)
        state.ds = state.es = state.ss = segment(0x10, 0xC093)
        state.rip, state.rsp, state.rdi = self.symbols[function], STACK + MB - 72, argument

        failures: list[str] = []
        session, hook = self.bochs.Session(), self.bochs.Hook()

        def exception(session, cpu, vector, code):
            name, at = max((x for x in self.symbols.items() if x[1] <= session.cpu.rip), key=lambda x: x[1], default=("?", 0))
            failures.append(f"exception {vector} in {name} + {session.cpu.rip - at:#x}, address {session.cpu.cr2:#x}")
            session.stop()

        if self.counts is not None:
            counter = self.counts.setdefault(function, Counter())
            hook.before_execution = lambda session, cpu, instruction: counter.update((session.cpu.rip,))
        hook.exception, hook.hlt = exception, lambda session, cpu: session.stop()
        session.missing_page_handler = lambda address: failures.append(f"no memory at {address:#x}")
        session.cpu.state = state
        session.run([hook])
        assert not failures, f"{function}: {failures[0]}"
        state = session.cpu.state
        assert state.rsp == STACK + MB - 64, f"{function}: the stack pointer came back as {state.rsp:#x}"
        assert state.mxcsr & ~0x3F == 0x1F80, f"{function} changed the caller's floating-point state"
        return state.rax

    def sizes(self, a: SimpleNamespace) -> dict[str, int]:
        """Bytes of the tensors of a call, as args.h tells their shapes."""
        from torch import Size, empty, float16, float32

        item, tokens = 2 if a.dtype else 4, a.B * a.T
        sizes = dict.fromkeys(self.pointers, 4 * tokens * a.HV)  # gates and their gradients
        sizes |= dict.fromkeys(("S0", "R0", "dS", "dR", "S", "R", "dS0", "dR0"), 4 * a.N * a.HV * a.K * a.V)
        sizes |= dict.fromkeys(("dq", "dk"), item * tokens * a.H * a.K) | dict.fromkeys(("o", "dv"), item * tokens * a.HV * a.V)
        sizes |= dict.fromkeys(("pS", "pR"), 4 * tokens * a.HV * a.V)
        for name, H, D in (("q", a.H, a.K), ("k", a.H, a.K), ("v", a.HV, a.V), ("dout", a.HV, a.V)):
            strides = getattr(a, f"{name}_stride")
            last = sum((n - 1) * stride for n, stride in zip((a.B, a.T, H), strides, strict=True))
            sizes[name] = item * (last + D) if tokens else 0
        dtype = float16 if a.dtype else float32
        q, v = (empty(a.B, a.T, *heads, dtype=dtype, device="meta") for heads in ((a.H, a.K), (a.HV, a.V)))
        corrections = self.native._CORRECTIONS
        method = SimpleNamespace(
            rule="delta" if a.delta else "additive",
            has_residual=a.correction != corrections["none"],
            has_R=a.correction == corrections["fitted"],
            gate_output=bool(a.gate_output),
        )
        saved, *_ = self.native.saved_shapes(q, v, a.N, method)
        return sizes | {"cu_seqlens": 8 * (a.N + 1), "saved": 4 * Size(saved).numel()}

    def call(self, function: str, packed: bytes) -> int:
        """`packed`: struct Args with host pointers. Tensors are copied in and out; each fills the end of its region."""
        a = SimpleNamespace()
        words = list(self.native._ARGS.unpack(packed))
        words[self.fields.index("threads")] = 2  # so that large calls are split, although one thread runs all parts
        for name, value in zip(self.fields, words, strict=True):
            setattr(a, name, (*getattr(a, name, ()), value) if name.endswith("_stride") else value)
        if self.tiles and function == "rla_forward":
            function = "rla_forward_amx"
        sizes = self.sizes(a)
        regions: dict[int, int] = {}  # of host pointers: dv lies in pS, dk in pR
        for i, name in enumerate(self.pointers):
            ctypes.memset(self.host[f"tensor{i}"], 0xFF, TENSOR_SIZE)
            if words[i] in regions:
                setattr(a, name, 0)
                words[i] = regions[words[i]]
            elif words[i]:
                assert sizes[name] <= TENSOR_SIZE, f"{name} is too large for this script"
                before = TENSOR_SIZE - sizes[name]
                ctypes.memmove(self.host[f"tensor{i}"] + before, words[i], sizes[name])
                words[i] = regions.setdefault(words[i], TENSORS + i * TENSOR_STRIDE + before)
        packed, last = self.native._ARGS.pack(*words), TENSOR_COUNT - 1
        ctypes.memmove(self.host[f"tensor{last}"] + TENSOR_SIZE - len(packed), packed, len(packed))
        result = self.run(function, TENSORS + last * TENSOR_STRIDE + TENSOR_SIZE - len(packed))
        for i, name in enumerate(self.pointers):
            pointer = getattr(a, name)
            size = sizes[name] if pointer else 0
            region = ctypes.string_at(self.host[f"tensor{i}"], TENSOR_SIZE)
            assert region.count(b"\xff", 0, TENSOR_SIZE - size) == TENSOR_SIZE - size, f"{function} wrote in front of {name}"
            if name in self.WRITTEN:
                ctypes.memmove(pointer, region[TENSOR_SIZE - size :], size)
            else:
                assert ctypes.string_at(pointer, size) == region[TENSOR_SIZE - size :], f"{function} wrote to {name}"
        return result


def main() -> int:
    bochs = import_bochscpu()
    sys.path.insert(0, str(ROOT / "src"))
    import torch

    import rla
    from common import ALL, LIMITS, NAMES, WEIRD, Case, assert_agrees, assert_close, call, make, upcast
    from rla.ops import native
    from rla.ops.backends import BACKENDS

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    with tempfile.TemporaryDirectory() as folder:
        image, symbols, zmm = build(folder)
    emulator = Emulator(bochs, image, symbols)
    native._library = lambda: emulator  # type: ignore[assignment]
    native.amx = lambda: "the emulated CPU has none"  # type: ignore[assignment]
    BACKENDS["native"] = dataclasses.replace(BACKENDS["native"], missing=None)

    def attend(name, case, dtype):
        assert_agrees(ALL[name], case, "native", dtype)

    def tiles(name, case, dtype):
        emulator.tiles = True
        try:
            attend(name, case, dtype)
        finally:
            emulator.tiles = False

    @torch.no_grad()
    def step(name, case, dtype):
        x = make(ALL[name], case, dtype)
        o, state = call(upcast(x), ALL[name], "reference")
        own = rla.State(*(x[n].detach().clone() if n in x else None for n in "SR"))
        got = rla.step(*map(x.get, NAMES[:6]), state=own, method=ALL[name], backend="native")
        outputs = ("o", "S", "R") if ALL[name].has_R else ("o", "S")
        want = dict(zip(outputs, (o, *state), strict=False))  # R is None where there is none
        assert_close(dict(zip(outputs, (got, *own), strict=False)), want, dtype)

    def dispatch(name, case, dtype):
        assert emulator.isa == "avx512", f"dispatch.cpp chose {emulator.isa}"
        emulator.counts = {}
        attend(name, case, dtype)
        step(name, dataclasses.replace(case, T=1), dtype)
        counts, emulator.counts = emulator.counts, None
        for function, counter in counts.items():
            wide = sum(n for at, n in counter.items() if at in zmm) / counter.total()
            print(f"{function}: {wide:.0%} of {counter.total()} instructions use zmm registers")
            assert wide > 0.1, f"{function} hardly uses zmm registers"

    f32 = torch.float32
    steps = {"step": Case(T=1, H=2, G=2, K=40, V=93, state=True), "step split": Case(B=1, T=1, H=1, K=256, V=157, state=True)}
    tasks = [(dispatch, "rdn", "dispatch", Case(B=1, T=33, H=1, K=17, V=48, state=True), f32)]
    tasks += [(attend, name, case, WEIRD[case], dtype) for name in METHODS for case in CASES for dtype in LIMITS]
    tasks += [(step, name, case, steps[case], dtype) for name in METHODS for case in steps for dtype in LIMITS]
    tasks += [(attend, "rdn", case, WEIRD[case], f32) for case in WEIRD if case not in CASES]
    tasks += [(attend, "rdn", "largest", Case(B=1, T=33, H=1, K=256, V=255, state=True), f32)]
    # large enough to be split among threads, and longer than a segment of backward
    tasks += [(attend, name, "split", Case(B=1, T=300, H=1, K=64, V=120, state=True), f32) for name in METHODS]
    tasks += [(tiles, name, "AMX packed", WEIRD["packed"], torch.bfloat16) for name in METHODS]
    tasks += [(tiles, "rdn", "AMX wide", WEIRD["wide"], torch.bfloat16)]
    failed = 0
    for function, name, label, case, dtype in tasks:
        before, told = time.monotonic(), "ok"
        try:
            function(name, case, dtype)
        except AssertionError as error:
            failed, told = failed + 1, f"FAILED: {error}"
        print(f"{name:12} {label:15} {str(dtype)[6:]:9} {time.monotonic() - before:5.1f} s  {told}", flush=True)
    print(f"{len(tasks) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
