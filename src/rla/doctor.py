"""`rla doctor`: what this machine has, which backends are usable, and whether bfloat16 products crash here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import signal
import subprocess
import sys

import torch

from . import __version__
from .ops import backends, native

PACKAGES = ("torch", "numpy", "triton", "transformers", "lm_eval", "datasets", "tokenizers", "safetensors", "onnxruntime")
INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "sve")

_BF16_PROBE = """
import torch
a = torch.randn(256, 256).bfloat16()
error = ((a @ a).float() - a.float() @ a.float()).norm() / (a.float() @ a.float()).norm()
raise SystemExit(0 if error < 0.02 else 3)
"""


def main() -> int:
    """Show versions, the CPU's instruction sets, the usable backends, and whether bfloat16 products crash on this machine."""
    print(f"rla {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    print("\npackages")
    for name in PACKAGES:
        print(f"  {name:<14}{_version(name)}")
    print("\nprocessor")
    flags = cpu_flags()
    print(f"  {cpu_name()}, {os.cpu_count()} logical cores, torch uses {torch.get_num_threads()} threads")
    print(f"  instruction sets: {' '.join(f for f in INSTRUCTION_SETS if f in flags) or 'unknown'}")
    if torch.cuda.is_available():
        print(f"  GPUs: {', '.join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))}")
    print("\nbackends")
    for status in backends().values():
        print(f"  {status.name:<11}{'usable' if status.usable else 'NOT USABLE':<12}{status.reason}")
    print(f"\nnative kernels\n  {native_report()}")
    print("\nbfloat16 matrix products on the CPU")
    print(f"  {bf16_report()}")
    return 0


def native_report() -> str:
    """The instruction sets that the native kernels use. AMX is tried, if no bfloat16 call has done so yet."""
    if native.missing() is not None:
        return "none"
    why = native.amx()
    if why is None:
        return f"{native.isa()}, AMX for bfloat16: yes"
    return f"{native.isa()}, AMX for bfloat16: no ({why}), AVX512_BF16: {'yes' if native.dots() else 'no'}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpuinfo() -> dict[str, str]:
    try:
        with open("/proc/cpuinfo") as file:
            rows = [line.split(":", 1) for line in file if ":" in line]
    except OSError:
        return {}
    return {row[0].strip(): row[1].strip() for row in rows}


def cpu_name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    info = _cpuinfo()
    return set((info.get("flags") or info.get("Features") or "").split())


def bf16_probe(**environment: str) -> int:
    """Exit code of a child process that multiplies bfloat16 matrices: 0 right, 3 wrong, negative: died of that signal."""
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", _BF16_PROBE], env=env, capture_output=True, check=False).returncode


def bf16_report() -> str:
    code = bf16_probe()
    if code == 0:
        return "work"
    cure = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
    how = f"die with {signal.Signals(-code).name}" if code < 0 else f"fail (exit code {code} of the probe)"
    name, value = cure.split("=")
    if bf16_probe(**{name: value}) == 0:
        return f"{how}: set {cure} in the environment before Python starts (tried: it cures this)"
    return f"{how}, with {cure} too: use float32 or float16 on this machine"
