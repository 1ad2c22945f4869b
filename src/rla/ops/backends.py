"""The table of backends and the choice among them.

A backend is a module with the functions `refuses`, `saved_shapes`, `forward` and `backward` (see chunked.py). The reference is
apart: autograd differentiates it.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ..method import Method
from . import chunked, native, triton


@dataclass(frozen=True)
class Backend:
    name: str
    devices: tuple[str, ...]  # device types it is chosen for; empty: any
    summary: str
    module: ModuleType
    missing: str | None  # why it can't be used on this machine


# In order of preference; the reference is never chosen by itself.
BACKENDS = {
    b.name: b
    for b in (
        Backend(
            "native",
            ("cpu",),
            "C++ kernels for CPUs, S and R in one pass; no vector decay or float64, K and V up to 256",
            native,
            native.missing(),
        ),
        Backend(
            "triton",
            ("cuda",),
            "Triton kernels for NVIDIA and AMD GPUs, S and R in one pass; no vector decay or float64, K and V up to 256",
            triton,
            triton.missing(),
        ),
        Backend("chunked", (), "chunked form in PyTorch; every method, device and dtype", chunked, None),
    )
}
NAMES = (*BACKENDS, "reference")


@dataclass(frozen=True)
class BackendStatus:
    """One row of `rla.backends()`."""

    name: str
    usable: bool
    reason: str  # why it is unusable; else what it is


def backends() -> dict[str, BackendStatus]:
    """Which backends can be used on this machine, and why the others can't."""
    rows = {}
    for name, backend in BACKENDS.items():
        why = backend.missing
        if why is None and backend.devices == ("cuda",) and not (torch.cuda.is_available() or triton.interpreted()):
            why = "torch sees no GPU"
        rows[name] = BackendStatus(name, why is None, why or backend.summary)
    rows["reference"] = BackendStatus("reference", True, "the paper's recurrence token by token; slow, exact, for checking")
    return rows


@functools.lru_cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def choose(name: str | None, q: Tensor, v: Tensor, method: Method) -> str:
    """The backend to use. A named one that can't serve raises; an automatic choice moves on to the next."""
    problem = (q.device.type, q.dtype, q.shape[3], v.shape[3], method.decay == "vector")
    if name is not None:
        if name not in NAMES:
            raise ValueError(f"backend: expected one of {', '.join(NAMES)} or None; got {name!r}")
        if name != "reference":
            why = BACKENDS[name].missing or BACKENDS[name].module.refuses(*problem)
            if why is not None:
                raise ValueError(f"backend: {name!r} can't serve this call: {why}")
        return name
    for backend in BACKENDS.values():
        if backend.devices and q.device.type not in backend.devices:
            continue
        if backend.missing is not None:
            if not torch.compiler.is_compiling():
                why = f"backend {backend.name!r} is not usable here ({backend.missing})"
                _warn_once(f"rla: {why}; using a slower one. See `rla doctor`.")
        elif backend.module.refuses(*problem) is None:
            return backend.name
    raise AssertionError("chunked serves everything")
