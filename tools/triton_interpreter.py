"""Triton's interpreter made fit for tests: bfloat16 that is right, watched memory, counted work.

    mend()      bfloat16 casts round to nearest even and dots multiply numbers (the interpreter alone truncates, and multiplies
                the bits); arithmetic on bfloat16 values raises, for the kernels compute in float32; dots of float32 numbers
                lose the digits that their `input_precision` loses
    watched()   accesses outside the tensors given to a kernel, and races between its programs, raise MemoryFault
    counted()   bytes and floating-point operations of each kernel, by name

Set TRITON_INTERPRET=1 before anything imports triton. For triton 3.7 to 3.9.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
PRECISIONS = ("tf32", "tf32x3", "ieee", "bf16x3")
SECTOR = 32  # bytes that a GPU moves at least
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)


class MemoryFault(AssertionError):
    """A kernel read or wrote where it must not."""


def to_float(bits: np.ndarray) -> np.ndarray:
    """The numbers of bfloat16 bits, float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bits(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits of float32 numbers, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _numbers(handle: Handle) -> np.ndarray:
    return to_float(handle.data) if handle.dtype.scalar == tl.bfloat16 else handle.data


def product(a: np.ndarray, b: np.ndarray, precision: str) -> np.ndarray:
    """The product of float32 matrices as tensor cores make it.

    TF32 drops 13 bits; x3: the sum of the products of two parts of each, without the smallest; IEEE: all digits.
    """
    if precision == "IEEE" or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return a @ b

    def short(x: np.ndarray) -> np.ndarray:
        if precision.startswith("BF16"):
            return to_float(to_bits(x))
        return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    p, q = short(a), short(b)
    if precision == "TF32":
        return p @ q
    assert precision in ("TF32x3", "BF16x3"), precision
    return short(a - p) @ q + p @ short(b - q) + p @ q


def mend() -> None:
    """Patch the interpreter, once and for good."""
    if getattr(Builder, "_mended", False):
        return
    Builder._mended = True
    cast, fp_to_fp = Builder.cast_impl, Builder.create_fp_to_fp
    binary, unary = Builder.binary_op, Builder.unary_op

    def cast_impl(self, src, dst_type):
        source, wanted = src.dtype.scalar, dst_type.scalar
        if source == wanted or tl.bfloat16 not in (source, wanted):
            return cast(self, src, dst_type)
        numbers = _numbers(src).astype(np.float32)
        if wanted == tl.bfloat16:
            return Handle(to_bits(numbers), tl.bfloat16)
        return cast(self, Handle(numbers, tl.float32), dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        mended = tl.bfloat16 in (src.dtype.scalar, dst_type.scalar)
        return cast_impl(self, src, dst_type) if mended else fp_to_fp(self, src, dst_type, rounding_mode)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        assert d.dtype.scalar == tl.float32, "the kernels add up in float32"
        precision = input_precision.name if a.dtype.scalar == tl.float32 else "IEEE"
        numbers = (_numbers(x).astype(np.float32) for x in (a, b))
        return Handle(product(*numbers, precision) + d.data, tl.float32)

    def binary_op(self, lhs, rhs, op):
        if tl.bfloat16 in (lhs.dtype.scalar, rhs.dtype.scalar) and op not in _BITWISE:
            raise TypeError(f"{op.__name__} of bfloat16: the interpreter would compute with bits; convert to float32")
        return binary(self, lhs, rhs, op)

    def unary_op(self, arg, op):
        if arg.dtype.scalar == tl.bfloat16:
            raise TypeError(f"{op.__name__} of bfloat16: the interpreter would compute with bits; convert to float32")
        return unary(self, arg, op)

    for function in (cast_impl, create_fp_to_fp, create_dot, binary_op, unary_op):
        setattr(Builder, function.__name__, function)

    # Without `debug` the checks for overflow are computed and thrown away: a tenth of a kernel's time.
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.InterpreterOptions(), allowed_dot_input_precisions=PRECISIONS, sanitize_overflow=False
    )

    # A launch patches triton.language as each function sees it: once for each module is enough, not for each call.
    patched: set[int] = set()
    run = interpreter.GridExecutor.__call__

    def call_function(self, *args, **kwargs):
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    def call_kernel(self, *args, **kwargs):
        patched.clear()
        return run(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call_function
    interpreter.GridExecutor.__call__ = call_kernel


@contextlib.contextmanager
def _hooked(
    access: Callable[[str, np.ndarray, int], None],
    launch: Callable[[str, list[torch.Tensor]], contextlib.AbstractContextManager[None]],
    dot: Callable[[Handle, Handle], None] = lambda a, b: None,
) -> Iterator[None]:
    """Call `access(kind, addresses, bytes each)` at loads and stores, `launch(name, tensors)` around kernels, `dot` at dots."""
    load, store, product = Builder.create_masked_load, Builder.create_masked_store, Builder.create_dot
    run = interpreter.GridExecutor.__call__

    def seen(kind: str, pointers: Handle, mask: Handle) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        if addresses.size:
            access(kind, addresses, pointers.get_element_ty().primitive_bitwidth // 8)

    def create_masked_load(self, pointers, mask, *rest):
        seen("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def create_masked_store(self, pointers, value, mask, *rest):
        seen("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def create_dot(self, a, b, *rest):
        dot(a, b)
        return product(self, a, b, *rest)

    def call(self, *args, **kwargs):
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        with launch(self.fn.__name__, tensors):
            return run(self, *args, **kwargs)

    patched: dict[str, Any] = {
        "create_masked_load": create_masked_load,
        "create_masked_store": create_masked_store,
        "create_dot": create_dot,
    }
    for name, function in patched.items():
        setattr(Builder, name, function)
    interpreter.GridExecutor.__call__ = call
    try:
        yield
    finally:
        Builder.create_masked_load, Builder.create_masked_store, Builder.create_dot = load, store, product
        interpreter.GridExecutor.__call__ = run


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raise MemoryFault for what a GPU would let pass: a stray access, or two programs at one address, one of them writing."""
    ranges: list[tuple[int, int]] = []
    accesses: dict[str, list[tuple[np.ndarray, int]]] = {"load": [], "store": []}
    program = [0]
    kernel = [""]
    set_grid = Builder.set_grid_idx

    def access(kind: str, addresses: np.ndarray, size: int) -> None:
        lows = np.array([low for low, _ in ranges], np.uint64)
        highs = np.array([high for _, high in ranges], np.uint64)
        place = np.searchsorted(lows, addresses, side="right") - 1
        outside = (place < 0) | (addresses + np.uint64(size) > highs[np.maximum(place, 0)])
        if outside.any():
            raise MemoryFault(f"{kernel[0]}: {kind} outside the tensors, {int(outside.sum())} of {outside.size} addresses")
        accesses[kind].append((np.unique(addresses), program[0]))

    def set_grid_idx(self, x, y, z):
        program[0] = x + (y << 24) + (z << 44)
        return set_grid(self, x, y, z)

    @contextlib.contextmanager
    def launch(name: str, tensors: list[torch.Tensor]) -> Iterator[None]:
        kernel[0] = name
        spans = sorted(
            (
                x.data_ptr(),
                x.data_ptr() + x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))),
            )
            for x in tensors
            if x.numel()
        )
        ranges[:] = []
        for low, high in spans:  # views of one tensor may overlap
            if ranges and low <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(high, ranges[-1][1]))
            else:
                ranges.append((low, high))
        for kind in accesses.values():
            kind.clear()
        yield
        stored, by = _flat(accesses["store"])
        if (stored[1:] == stored[:-1]).any():
            raise MemoryFault(f"{name}: two programs store to one address")
        loaded, reader = _flat(accesses["load"])
        place = np.minimum(np.searchsorted(stored, loaded), max(len(stored) - 1, 0))
        if len(stored) and ((stored[place] == loaded) & (by[place] != reader)).any():
            raise MemoryFault(f"{name}: a program loads what another stores")

    Builder.set_grid_idx = set_grid_idx
    try:
        with _hooked(access, launch):
            yield
    finally:
        Builder.set_grid_idx = set_grid


def _flat(accesses: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct pairs of address and program, by address."""
    if not accesses:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    addresses = np.concatenate([a for a, _ in accesses])
    programs = np.concatenate([np.full(a.size, p, np.int64) for a, p in accesses])
    order = np.lexsort((programs, addresses))
    addresses, programs = addresses[order], programs[order]
    new = np.ones(addresses.size, bool)
    new[1:] = (addresses[1:] != addresses[:-1]) | (programs[1:] != programs[:-1])
    return addresses[new], programs[new]


@dataclasses.dataclass
class Work:
    """What the launches of one kernel did.

    `read` and `written`: every load and store. `moved`: each 32-byte sector that a launch reads, and each that it writes, once:
    what a cache that forgets nothing within a launch leaves for the memory.
    """

    read: int = 0
    written: int = 0
    moved: int = 0
    flops: int = 0
    launches: int = 0
    sectors: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=lambda: {"load": [], "store": []}, repr=False)


@contextlib.contextmanager
def counted() -> Iterator[dict[str, Work]]:
    """The work of each kernel launched inside, by its name."""
    works: dict[str, Work] = collections.defaultdict(Work)
    current = [Work()]

    def access(kind: str, addresses: np.ndarray, size: int) -> None:
        work = current[0]
        if kind == "load":
            work.read += addresses.size * size
        else:
            work.written += addresses.size * size
        work.sectors[kind].append(np.unique(addresses // np.uint64(SECTOR)))

    def dot(a: Handle, b: Handle) -> None:
        current[0].flops += 2 * a.data.size * b.data.shape[-1]

    @contextlib.contextmanager
    def launch(name: str, tensors: list[torch.Tensor]) -> Iterator[None]:
        work = current[0] = works[name]
        yield
        work.launches += 1
        for sectors in work.sectors.values():
            if sectors:
                work.moved += SECTOR * np.unique(np.concatenate(sectors)).size
            sectors.clear()

    with _hooked(access, launch, dot):
        yield works
