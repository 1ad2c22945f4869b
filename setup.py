"""Builds the native CPU library, src/rla/ops/_native.so; everything else about the package is in pyproject.toml.

The library is plain C++17 with a C interface, built with $CXX (default: c++ or g++) and without torch, once for each
instruction set. A build that fails does not fail the install: its reason is left in src/rla/ops/_native.txt, where
`rla.backends()` finds it.

    python setup.py build_native               build, if the sources or the flags changed
    python setup.py build_native --sanitize    build build/_native_sanitize.so, with address and undefined behaviour
                                               checks, to be chosen by RLA_NATIVE_LIBRARY:
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


def build(library: Path, sanitize: bool = False, force: bool = False) -> None:
    """Compile every instruction set and link them into `library`, unless it has the same stamp already."""
    # sanitized, the one source is compiled for the portable instruction set alone: the others take ten minutes each
    x86 = platform.machine().lower() in ("x86_64", "amd64") and not sanitize
    flags = shlex.split(FLAGS) + (shlex.split(SANITIZE) if sanitize else []) + (["-DRLA_X86"] if x86 else [])
    flags += shlex.split(os.environ.get("CXXFLAGS", ""))
    targets = {"portable": "", **(X86 if x86 else {})}
    recipe = " ".join(compiler() + flags + [f"{k}:{v}" for k, v in targets.items()])
    stamp = f"rla-native:{source_hash()}:{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    if library.exists() and not force and stamp.encode() in library.read_bytes():
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        units = [("dispatch", ["dispatch.cpp", f'-DRLA_STAMP="{stamp}"'])]
        units += [(isa, ["kernel.cpp", f"-DRLA_ISA={isa}", *shlex.split(extra)]) for isa, extra in targets.items()]
        commands = [
            [*compiler(), *flags, "-c", str(OPS / "csrc" / source), *options, "-o", f"{folder}/{name}.o"]
            for name, (source, *options) in units
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, commands))
        out = f"{folder}/library.so"
        run([*compiler(), *flags, "-shared", *(f"{folder}/{name}.o" for name, _ in units), "-o", out])
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
        ("sanitize", None, "with address and undefined behaviour checks"),
        ("force", "f", "even if nothing changed"),
    ]
    boolean_options = ["sanitize", "force"]

    def initialize_options(self):
        self.sanitize = self.force = False

    def finalize_options(self):
        pass

    def run(self):
        if self.sanitize:
            build(ROOT / "build" / "_native_sanitize.so", sanitize=True, force=bool(self.force))
        else:
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
