"""The native CPU backend: a ctypes binding of the C++ kernels in csrc/, built by setup.py into _native.so.

Tensors come in detached and checked. Inputs keep their strides as long as the last dimension is contiguous; gates
become contiguous float32. The kernels take q, k, v in float32, bfloat16 or float16, sum in float32 and keep states
in float32; they use as many threads as torch would, and give the same bits for any number of them.

On CPUs with AMX the forward of bfloat16 rounds states and updates to bfloat16 where they enter large products; triangular
systems, sums and backward stay in float32. The first such call tries AMX in a child process: see `amx`. AMD's CPUs with
AVX512_BF16 do the same (`dots`), but not where a clip's gradient will be asked for.

What forward leaves for backward: `saved`, states of some tokens and, of float32 inputs, a token's products with the keys of its
chunk; pS and pR, of float32 inputs again, what S and R predict for every token. Backward computes the rest again. It writes the
gradients of v and k where the predictions were.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..method import Method
from . import memory

MAX_SIZE = 256  # of K and V
_HERE = Path(__file__).parent
_FLOAT = torch.float32
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CORRECTIONS = {"none": 0, "token": 1, "fitted": 2}
_LOSSES = {"l2": 0, "huber": 1, "logcosh": 2}
_ARGS = struct.Struct("=54qd")  # struct Args in csrc/args.h: 26 pointers, 7 sizes, 12 strides, 9 switches, the clip
_PLAN = struct.Struct("=5q")  # what struct Plan in csrc/exchange.h has besides
_INTERPRETER = (  # functions of Python's in struct Python there
    "PyEval_SaveThread", "PyEval_RestoreThread", "PyObject_CallFunctionObjArgs", "PyObject_Type", "Py_IncRef", "Py_DecRef",
    "PyLong_AsLong", "PyBytes_AsString", "PyErr_Clear", "PyErr_SetObject",
)  # fmt: skip
PlainStep = Callable[..., Tensor | None]
_POSITIVE = "log_alpha: expected values <= 0, natural logarithms of decays in [0, 1]; got a positive one"


class _Library:
    """The loaded library, or the reason why there is none."""

    step: Callable[[bytes], int]

    def __init__(self) -> None:
        self.missing: str | None = None
        path = Path(os.environ.get("RLA_NATIVE_LIBRARY", _HERE / "_native.so"))
        if not path.exists():
            reason = _HERE / "_native.txt"
            self.missing = reason.read_text().strip() if reason.exists() else f"{path.name} is not built; run make"
            return
        try:
            library = ctypes.CDLL(str(path))
            library.rla_stamp.restype = library.rla_isa.restype = library.rla_amx_missing.restype = ctypes.c_char_p
            stamp = library.rla_stamp().decode()
            size = library.rla_args_size()
        except (OSError, AttributeError) as error:
            self.missing = f"{path.name} does not load: {error}"
            return
        if (_HERE / "csrc").exists() and stamp.split(":")[1] != _source_hash():
            self.missing = f"{path.name} was built from other sources; run make"
            return
        assert size == _ARGS.size
        self.path, self.library = path, library
        self.isa: str = library.rla_isa().decode()
        self.panel: int = library.rla_panel()
        self.chunk: int = library.rla_chunk()
        for name in ("forward", "backward", "step"):
            function = getattr(library, f"rla_{name}")
            function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
            setattr(self, name, function)


def _source_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted((_HERE / "csrc").iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def _library() -> _Library:
    return _Library()


def missing() -> str | None:
    """Why the kernels cannot be used on this machine; None if they can."""
    return _library().missing


def isa() -> str:
    """The instruction set in use: portable, avx2 or avx512."""
    return _library().isa


def dots() -> bool:
    """Whether bfloat16 uses AVX512_BF16, its dot products of pairs, where it does without AMX."""
    library = _library()
    return library.missing is None and bool(library.library.rla_dots())


_AMX_PROBE = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).rla_amx_check())"
_AMX_SECONDS = 60.0


@functools.cache
def amx() -> str | None:
    """Why bfloat16 does without AMX; None if it uses it, from this call on.

    A virtual machine may promise AMX and kill a process that uses it, so a child process multiplies two matrices first.
    RLA_NATIVE_ISA=avx512 in the environment does without, and without `dots`.
    """
    library = _library()
    if library.missing is not None:
        return library.missing
    reason: bytes | None = library.library.rla_amx_missing()
    if reason is not None:
        return reason.decode()
    if not sys.executable or getattr(sys, "frozen", False):
        return "there is no Python interpreter to try it in"
    command = [sys.executable, "-I", "-S", "-c", _AMX_PROBE, str(library.path.resolve())]
    try:
        code = subprocess.run(command, capture_output=True, timeout=_AMX_SECONDS, check=False).returncode
    except (OSError, subprocess.SubprocessError) as error:
        return f"it could not be tried: {error}"
    if code < 0:
        return f"the CPU promises it, but a process that uses it dies with {signal.Signals(-code).name}"
    if code > 0:
        return f"the CPU promises it, but it fails (exit code {code} of the trial)"
    return "the operating system refuses it" if library.library.rla_amx_start() else None


def any_positive(x: Tensor) -> bool:
    """Whether a tensor has a number above 0; where the library reads it in a tenth of torch's time."""
    library = _library()
    if type(x) is Tensor and x.dtype is _FLOAT and x.device.type == "cpu" and x.is_contiguous() and library.missing is None:
        return bool(library.library.rla_any_positive(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.numel())))
    return bool((x > 0).any())


def refuses(device: str, dtype: torch.dtype, K: int, V: int, vector: bool) -> str | None:
    """Why the kernels cannot serve such tensors; None if they can."""
    if device != "cpu":
        return f"native runs on the CPU; q is on {device}"
    if dtype not in _DTYPES:
        return f"native computes in float32 (float32, bfloat16 or float16 inputs); q is {dtype}"
    if K > MAX_SIZE or V > MAX_SIZE:
        return f"native serves K and V up to {MAX_SIZE}; got K = {K}, V = {V}"
    return "native has no vector decay" if vector else None


def _predicts(method: Method, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether forward keeps what S predicts for backward, and what R predicts."""
    delta, kept = method.rule == "delta", dtype is _FLOAT
    return kept and (delta or method.has_residual), kept and delta and method.has_R


def _pairs(method: Method, dtype: torch.dtype) -> int:
    """Products of a token with the keys of its chunk that forward keeps for backward."""
    plain_sum = method.has_residual and not method.gate_output
    return (1 + plain_sum + _predicts(method, dtype)[0]) * _library().chunk if dtype is _FLOAT else 0


def _width(V: int) -> int:
    """V, rounded up to whole panels."""
    panel = _library().panel
    return -(-V // panel) * panel


def _segments(K: int, V: int, packed: bool, method: Method, dtype: torch.dtype) -> tuple[int, int]:
    """Where states are saved: every so many tokens, but one time in so many not (0: always); struct Segments in csrc/chunk.h.

    As often as goes with q, k, v, o and their gradients taking no less memory than what is saved: backward computes less again.
    Predictions whose memory a gradient gets don't count. Tokens are those of whole chunks; of two, which AMX takes at a time,
    for half precision.
    """
    every = _library().chunk * (1 if dtype is _FLOAT else 2)
    states = (1 + method.has_R) * K * _width(V)
    alone = V if K != V and _predicts(method, dtype)[1] else 0  # a prediction of R that is no place for dk
    # numbers for states, of a token and value head
    room = max((K + V) * dtype.itemsize - _pairs(method, dtype) - alone, K + V)
    while states > 2 * every * room:
        every *= 2
    if states <= every * room:
        return every, 0
    return (2 * every, 0) if packed else (every, states // (states - every * room))


def saved_shapes(q: Tensor, v: Tensor, N: int, method: Method) -> tuple[tuple[int, ...], ...]:
    """The shapes of `saved`, pS and pR. A packed sequence of l tokens fills (l - 1) // every slots: T // every are enough."""
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    every, skip = _segments(K, V, N != B, method, q.dtype)
    last = max(T - 1, 0) // every
    slots = T // every if N != B else B * (last - ((last + 1) // skip if skip else 0))
    saved = HV * (B * T * _pairs(method, q.dtype) + slots * (1 + method.has_R) * K * _width(V))
    return (saved,), *((B, T, HV, V) if kept else (0,) for kept in _predicts(method, v.dtype))


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _rows(x: Tensor) -> Tensor:
    """`x` with a contiguous last dimension."""
    return x if x.is_contiguous() or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _float(x: Tensor | None) -> Tensor | None:
    """`x` as the kernels take gates and states; without a call into torch if it is so already."""
    if x is None or (x.dtype == torch.float32 and x.is_contiguous()):
        return x
    return x.to(torch.float32).contiguous()


def _by_columns(x: Tensor | None) -> Tensor | None:
    """A state [N, HV, K, V] as the kernels take it: float32, [N, HV, V, K] contiguous. No copy of one that they made."""
    return None if x is None else _float(x.mT)


def lies_by_columns(x: Tensor) -> bool:
    """Whether `step` can update this state [N, HV, K, V] in place."""
    _, HV, K, V = x.shape
    return x.stride() == (HV * K * V, K * V, 1, K) or x.mT.is_contiguous()


def empty_state(q: Tensor, v: Tensor, N: int) -> Tensor:
    """[N, HV, K, V] in the layout of the kernels."""
    return q.new_empty(N, v.shape[2], v.shape[3], q.shape[3], dtype=torch.float32).mT


@functools.cache
def _switches(method: Method) -> tuple[tuple[int, ...], float]:
    words = (method.rule == "delta", _CORRECTIONS[method.correction], method.gate_output, _LOSSES[method.loss], method.qk_norm)
    return tuple(map(int, words)), float(method.clip)


def _call(
    name: str, method: Method, q: Tensor, k: Tensor, v: Tensor, N: int, do: Tensor | None, pointers: tuple[int, ...]
) -> int:
    """Run a kernel. `pointers`: those of struct Args from `o` on. Returns 0 unless the kernel refuses."""
    words, clip = _switches(method)
    B, T, H, K = q.shape
    _, _, HV, V = v.shape
    q0, q1, q2, _ = q.stride()
    k0, k1, k2, _ = k.stride()
    v0, v1, v2, _ = v.stride()
    d0, d1, d2, _ = (0, 0, 0, 0) if do is None else do.stride()
    packed = _ARGS.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if do is None else do.data_ptr(), *pointers,
        B, T, H, HV, K, V, N, q0, q1, q2, k0, k1, k2, v0, v1, v2, d0, d1, d2,
        _DTYPES[q.dtype], *words, torch.get_num_threads(), *_segments(K, V, N != B, method, q.dtype), clip,
    )  # fmt: skip
    function: Callable[[bytes], int] = getattr(_library(), name)
    return function(packed)


def forward(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,
    v: Tensor,  # [B, T, HV, V]
    log_alpha: Tensor | None,  # [B, T, HV]
    beta: Tensor | None,
    gamma: Tensor | None,
    S0: Tensor | None,  # [N, HV, K, V] float32
    R0: Tensor | None,
    cu_seqlens: Tensor | None,  # [N + 1]
    method: Method,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Output, final S, final R (empty if the method has none), and for backward saved, pS, pR (empty unless `save`)."""
    dtype = q.dtype
    if dtype == torch.bfloat16:
        amx()
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    q, k, v = _rows(q), _rows(k), _rows(v)
    log_alpha, beta, gamma = map(_float, (log_alpha, beta, gamma))
    S0, R0 = _by_columns(S0), _by_columns(R0)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()
    B, T, HV, V = v.shape
    o = memory.empty((B, T, HV, V), dtype)
    S = empty_state(q, v, N)
    R = empty_state(q, v, N) if method.has_R else S.new_empty(0)
    kept = tuple(memory.empty(shape, _FLOAT) for shape in (saved_shapes(q, v, N, method) if save else ((0,),) * 3))
    pointers = (
        o.data_ptr(), 0, 0, 0, *map(_pointer, (log_alpha, beta, gamma, S0, R0)), 0, 0,
        *map(_pointer, (S, R, *kept)), 0, 0, 0, 0, 0, _pointer(cu_seqlens),
    )  # fmt: skip
    _call("forward", method, q, k, v, N, None, pointers)
    return o, S, R, kept


def backward(
    do: Tensor,  # [B, T, HV, V]
    dS: Tensor | None,  # [N, HV, K, V]
    dR: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    S0: Tensor | None,
    R0: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: Sequence[Tensor],  # saved, pS, pR
    method: Method,
    overwrite: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_alpha, beta, gamma, S0, R0; None for what is None.

    overwrite: write that of v to pS where there is one, and that of k to pR where there is one of its shape.
    """
    _, pS, pR = kept
    inputs = (q, k, v, log_alpha, beta, gamma, S0, R0)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    q, k, v = _rows(q), _rows(k), _rows(v)
    do = _rows(do.to(q.dtype))
    log_alpha, beta, gamma = map(_float, (log_alpha, beta, gamma))
    S0, R0, dS, dR = map(_by_columns, (S0, R0, dS, dR))
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()
    dq = memory.empty(q.shape, q.dtype)
    dk = pR if overwrite and pR.shape == k.shape else memory.empty(k.shape, k.dtype)
    dv = pS if overwrite and pS.shape == v.shape else memory.empty(v.shape, v.dtype)
    da, db, dg = (None if x is None else torch.empty_like(x) for x in (log_alpha, beta, gamma))
    dS0, dR0 = (None if x is None else torch.empty_like(x) for x in (S0, R0))
    if not method.has_residual and dg is not None:
        dg.zero_()
    if not method.has_R and dR0 is not None:
        dR0.zero_()
    pointers = (
        0, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), *map(_pointer, (log_alpha, beta, gamma, S0, R0, dS, dR)),
        0, 0, *map(_pointer, (*kept, da, db, dg, dS0, dR0, cu_seqlens)),
    )  # fmt: skip
    _call("backward", method, q, k, v, N, do, pointers)
    dS0, dR0 = (None if x is None else x.mT.contiguous() for x in (dS0, dR0))
    gradients = (dq, dk, dv, da, db, dg, dS0, dR0)
    return tuple(None if x is None or g is None else g.to(x.dtype) for x, g in zip(inputs, gradients, strict=True))


def step(
    q: Tensor,  # [B, 1, H, K]
    k: Tensor,
    v: Tensor,  # [B, 1, HV, V]
    log_alpha: Tensor | None,  # [B, 1, HV]
    beta: Tensor | None,
    gamma: Tensor | None,
    S: Tensor,  # [B, HV, K, V] float32, lies_by_columns, updated in place
    R: Tensor | None,
    method: Method,
) -> Tensor:
    """One token. Returns the output [B, 1, HV, V]; ValueError, with nothing changed, if a log_alpha is positive."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    log_alpha, beta, gamma = _float(log_alpha), _float(beta), _float(gamma)
    o = torch.empty_like(v) if v.is_contiguous() else torch.empty_like(v, memory_format=torch.contiguous_format)
    pointers = (
        o.data_ptr(), 0, 0, 0, _pointer(log_alpha), _pointer(beta), _pointer(gamma), 0, 0, 0, 0,
        S.data_ptr(), _pointer(R), 0, 0, 0, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    if _call("step", method, q, k, v, q.shape[0], None, pointers):
        raise ValueError(_POSITIVE)
    return o


@functools.cache
def _exchange() -> Callable[[bytes], PlainStep] | None:
    """What makes a plan, struct Plan in csrc/exchange.h, a function; None where torch (< 2.10) has no such interface."""
    library, capsule = _library(), getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if library.missing is not None or capsule is None:
        return None
    python, pointer, thing = ctypes.pythonapi, ctypes.c_void_p, ctypes.py_object
    api = ctypes.PYFUNCTYPE(pointer, thing, ctypes.c_char_p)(("PyCapsule_GetPointer", python))(capsule, b"dlpack_exchange_api")
    held = (None, Tensor, ValueError, _POSITIVE, torch.empty_like, torch.get_num_threads)
    functions = [ctypes.cast(getattr(python, name), pointer).value for name in _INTERPRETER]
    given = struct.pack(f"={1 + len(held) + len(functions)}q", api, *map(id, held), *functions)
    if library.library.rla_set_python(given):
        return None
    assert library.library.rla_plan_size() == _ARGS.size + _PLAN.size
    library.library.rla_plain_step.restype = pointer
    new = ctypes.PYFUNCTYPE(thing, pointer, thing, pointer)(("PyCFunction_NewEx", python))

    def make(
        plan: bytes, held: tuple[object, ...] = held
    ) -> PlainStep:  # the library has addresses alone, these are the references
        return new(library.library.rla_plain_step(), plan, None)

    return make


@functools.cache
def plain_step(method: Method) -> PlainStep | None:
    """`step` in the common case, tensors that the kernel takes as they are, with all the checks that it needs; None if never.

    Its arguments are q, k, v, log_alpha, beta, gamma, S, R; it returns None if these have to go through the full checks. The
    kernel takes some 40 microseconds and the full checks as much again. What is served here would pass them all.
    """
    make = _exchange()
    if make is None or method.decay == "vector":
        return None
    words, clip = _switches(method)
    tied = method.gamma == "tied" and method.has_residual
    given = (method.decay != "none", method.rate != "one", method.has_residual and not tied, method.has_R, tied)
    # a step saves nothing, but a segment has a length
    return make(_ARGS.pack(*[0] * 46, *words, 1, 1, 0, clip) + _PLAN.pack(*given))
