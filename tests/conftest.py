"""Test set-up: one thread per worker, poisoned memory on request."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # see `rla doctor`; before torch's first product

import hashlib
import sys
import tempfile
from pathlib import Path

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":  # `make triton`: the Triton kernels on CPU tensors
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    import triton_interpreter

    triton_interpreter.mend()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_configure(config):
    from rla.ops.backends import BACKENDS

    # torch.compile's cache does not notice that an operator's shapes have changed: one for each state of the sources
    ops = Path(__file__).parents[1] / "src/rla/ops"
    sources = b"".join(x.read_bytes() for x in sorted([*ops.glob("*.py"), *ops.glob("csrc/*")]))
    cache = Path(tempfile.gettempdir()) / f"rla-inductor-{hashlib.sha256(sources).hexdigest()[:16]}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    if BACKENDS["native"].missing:  # no compiler: automatic choices warn once, which is right and tested elsewhere
        config.addinivalue_line("filterwarnings", "ignore:rla. backend 'native' is not usable here:UserWarning")


@pytest.fixture
def poison(monkeypatch):
    """Fill uninitialised memory with NaN, so that reading it shows."""

    def poisoned(make):
        def wrapper(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
