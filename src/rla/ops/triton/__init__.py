"""The Triton backend: chunk-parallel kernels for NVIDIA and AMD GPUs. See docs/kernels.md.

Triton itself is imported with `forward`, `backward` and `step`, by the first use of one. With TRITON_INTERPRET=1 in the
environment the kernels run in Triton's interpreter, on CPU tensors: how they are tested on a machine without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...method import Method

if TYPE_CHECKING:
    from .launch import backward as backward
    from .launch import forward as forward
    from .launch import step as step

MAX_SIZE = 256  # of K and V
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def missing() -> str | None:
    """Why the kernels cannot be used on this machine; None if they can. Does not import triton."""
    if importlib.util.find_spec("triton") is None:
        return 'triton is not installed; pip install "residual-linear-attention[gpu]"'
    return None


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def refuses(device: str, dtype: torch.dtype, K: int, V: int, vector: bool) -> str | None:
    """Why the kernels cannot serve such tensors; None if they can."""
    if device != "cuda" and not (device == "cpu" and interpreted()):
        return f"triton runs on NVIDIA and AMD GPUs; q is on {device}"
    if dtype not in _DTYPES:
        return f"triton computes in float32 (float32, bfloat16 or float16 inputs); q is {dtype}"
    if K > MAX_SIZE or V > MAX_SIZE:
        return f"triton serves K and V up to {MAX_SIZE}; got K = {K}, V = {V}"
    return "triton has no vector decay" if vector else None


def segment(K: int, V: int, itemsize: int, states: int) -> int:
    """Tokens between the states kept for backward: so many that these take at most half the bytes of q, k, v and o."""
    tokens = 64
    while states * K * V * 4 > tokens * (K + V) * itemsize:
        tokens *= 2
    return tokens


def saved_shapes(q: Tensor, v: Tensor, N: int, method: Method) -> tuple[tuple[int, ...]]:
    """The shape of `saved`. A packed sequence of l tokens fills (l - 1) // segment slots, so T // segment are enough."""
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    states = 1 + method.has_R
    tokens = segment(K, V, q.element_size(), states)
    slots = T // tokens if N != B else B * (max(T - 1, 0) // tokens)
    return ((slots, HV, states, K, V),)


def __getattr__(name: str) -> Any:
    if name not in ("forward", "backward", "step"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import launch

    return getattr(launch, name)
