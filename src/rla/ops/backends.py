"""The table of backends and the choice among them.

A backend is a module with the functions `missing`, `refuses`, `saved_shape`, `forward` and `backward` (see chunked.py), imported
when it is first asked for. The reference is apart: autograd differentiates it, so it needs no registration with torch.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ..method import Method


@dataclass(frozen=True)
class Backend:
    name: str
    devices: tuple[str, ...]  # device types it is chosen for; empty: any
    summary: str

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"rla.ops.{self.name}")


# In order of preference; the reference is never chosen by itself.
BACKENDS = {
    b.name: b
    for b in (
        Backend("chunked", (), "chunked form in PyTorch; every method, device and dtype"),
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
        why = backend.module.missing()
        rows[name] = BackendStatus(name, why is None, why or backend.summary)
    rows["reference"] = BackendStatus("reference", True, "the paper's recurrence token by token; slow, exact, for checking")
    return rows


@functools.lru_cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


@torch.compiler.assume_constant_result
def _choose(name: str | None, device: str, dtype: torch.dtype, K: int, V: int, vector: bool) -> str:
    if name is not None:
        if name not in NAMES:
            raise ValueError(f"backend: expected one of {', '.join(NAMES)} or None; got {name!r}")
        if name != "reference":
            module = BACKENDS[name].module
            why = module.missing() or module.refuses(device, dtype, K, V, vector)
            if why is not None:
                raise ValueError(f"backend: {name!r} can't serve this call: {why}")
        return name
    for backend in BACKENDS.values():
        if backend.devices and device not in backend.devices:
            continue
        why = backend.module.missing()
        if why is not None:
            _warn_once(f"rla: backend {backend.name!r} is not usable here ({why}); using a slower one. See `rla doctor`.")
        elif backend.module.refuses(device, dtype, K, V, vector) is None:
            return backend.name
    raise AssertionError("chunked serves everything")


def choose(name: str | None, q: Tensor, v: Tensor, method: Method) -> str:
    """The backend to use. A named one that can't serve raises; an automatic choice moves on to the next."""
    return _choose(name, q.device.type, q.dtype, q.shape[3], v.shape[3], method.decay == "vector")
