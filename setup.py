"""Builds the native CPU library, src/rla/ops/_native.so; everything else about the package is in pyproject.toml.

The library is plain C++17 with a C interface, built with $CXX (default: c++ or g++) and without torch, once for each
instruction set; those of bfloat16 are left out where the compiler doesn't know them. A build that fails does not fail the
install: its reason is left in src/rla/ops/_native.txt, where `rla.backends()` finds it.

    python setup.py build_native               build, if the sources or the flags changed
    python setup.py build_native --model       build build/_native_model.so for tests, to be chosen by
                                               RLA_NATIVE_LIBRARY: portable, with a model of AMX tiles in plain C++
    python setup.py build_native --sanitize    build build/_native_sanitize.so: the same, with address and undefined
                                               behaviour checks:
        LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
        ASAN_OPTIONS=detect_leaks=0 RLA_NATIVE_LIBRARY=build/_native_sanitize.so pytest
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
OPS = ROOT / "src" / "rla" / "ops"
LIBRARY, REASON = OPS / "_native.so", OPS / "_native.txt"
FLAGS = (
    "-std=c++17 -O3 -fPIC -fopenmp -fvisibility=hidden -fno-math-errno -fno-trapping-math "
    "-Wall -Wextra -Wno-maybe-uninitialized"
)
SANITIZE = "-g -O1 -fsanitize=address,undefined -fno-sanitize=alignment,null,object-size -fno-sanitize-recover=undefined"
X86 = {
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512",
}
HALVES = {"amx": "-DRLA_AMX", "dots": "-DRLA_DOTS"}  # forward of bfloat16, on top of avx512
MODEL = "-DRLA_AMX -DRLA_AMX_MODEL"  # on top of portable
KINDS = {"": "", "model": "-O2", "sanitize": SANITIZE}


def source_hash() -> str:
    """Of the C++ sources; rla.ops.native computes the same to find out whether a library is stale."""
    digest = hashlib.sha256()
    for path in sorted((OPS / "csrc").iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compiler() -> list[str]:
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return [next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), "c++")]


def run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"no C++ compiler: {error}") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"{command[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def build(library: Path, kind: str = "", force: bool = False) -> None:
    """Compile every instruction set and link them into `library`, unless it has the same stamp already.

    `kind`: "model" or "sanitize", a library for tests.
    """
    # sanitized, the one source is compiled for the portable instruction set alone: the others take ten minutes each
    x86 = platform.machine().lower() in ("x86_64", "amd64") and not kind
    flags = shlex.split(f"{FLAGS} {KINDS[kind]}") + (["-DRLA_X86"] if x86 else [])
    flags += shlex.split(os.environ.get("CXXFLAGS", ""))
    targets = {"portable": "", **(X86 if x86 else {})}
    halves = {"amx": MODEL} if kind else {}
    if x86 and sys.platform == "linux":
        halves = {isa: f"{X86['avx512']} -mavx512bf16 {define}" for isa, define in HALVES.items()}
    recipe = " ".join(compiler() + flags + [f"{k}:{v}" for k, v in (targets | halves).items()])
    stamp = f"rla-native:{source_hash()}:{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    if library.exists() and not force and stamp.encode() in library.read_bytes():
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:

        def compile(name: str, source: str, options: str) -> str:
            out = f"{folder}/{name}.o"
            run([*compiler(), *flags, "-c", str(OPS / "csrc" / source), *shlex.split(options), "-o", out])
            return out

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = {
                isa: pool.submit(compile, isa, "kernel.cpp", f"-DRLA_ISA={isa} {extra}")
                for isa, extra in (targets | halves).items()
            }
        built = [isa for isa, job in jobs.items() if isa in targets or kind or job.exception() is None]
        objects = [jobs[isa].result() for isa in built]
        defines = " ".join(word for isa in built for word in halves.get(isa, "").split() if word.startswith("-D"))
        objects.append(compile("dispatch", "dispatch.cpp", f"-DRLA_STAMP='\"{stamp}\"' {defines}"))
        out = f"{folder}/library.so"
        run([*compiler(), *flags, "-shared", *objects, "-o", out])
        # a new file under a new inode: a process that has the old one mapped keeps it
        new = library.with_suffix(".new")
        shutil.copyfile(out, new)
        new.chmod(0o755)
        new.replace(library)


def build_or_explain(force: bool = False) -> None:
    try:
        build(LIBRARY, force=force)
        REASON.unlink(missing_ok=True)
    except Exception as error:
        LIBRARY.unlink(missing_ok=True)
        REASON.write_text(f"{error}\n")
        print(f"warning: rla is installed without its native CPU kernels: {error}", file=sys.stderr)


class BuildNative(Command):
    description = "build src/rla/ops/_native.so where its sources have changed"
    user_options = [
        ("model", None, "for tests: portable, with a model of AMX tiles"),
        ("sanitize", None, "the same with address and undefined behaviour checks"),
        ("force", "f", "even if nothing changed"),
    ]
    boolean_options = ["model", "sanitize", "force"]

    def initialize_options(self):
        self.model = self.sanitize = self.force = False

    def finalize_options(self):
        pass

    def run(self):
        kinds = [kind for kind in ("model", "sanitize") if getattr(self, kind)]
        for kind in kinds:
            build(ROOT / "build" / f"_native_{kind}.so", kind, bool(self.force))
        if not kinds:
            build_or_explain(bool(self.force))


class BuildPy(build_py):
    """Builds the library in the source tree and takes it, or the reason of its absence, into the wheel."""

    def run(self):
        build_or_explain()
        super().run()
        if not getattr(self, "editable_mode", False):
            for path in self._native_files():
                self.copy_file(str(path), str(Path(self.build_lib) / "rla" / "ops" / path.name))

    def _native_files(self):
        return [path for path in (LIBRARY, REASON) if path.exists()]

    def get_outputs(self, include_bytecode=True):
        native = [str(Path(self.build_lib) / "rla" / "ops" / path.name) for path in self._native_files()]
        return super().get_outputs(include_bytecode) + native


class NativeDistribution(Distribution):
    def has_ext_modules(self):
        return True  # the wheel belongs to this platform


class BdistWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]  # no Python in the library, so any Python 3


setup(
    distclass=NativeDistribution,
    cmdclass={"build_native": BuildNative, "build_py": BuildPy, "bdist_wheel": BdistWheel},
)
