"""Sizes of the kernels' tiles, by a rule from K, V, the dtype and the kind of device. Nothing is searched, and the length of a
sequence plays no part.

`tools/gpu_check.py` compiles every row for every target and fails where registers spill.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """Key channels and value columns of a tile, warps of a program, stages of its loads' pipeline; tiles in a batch."""

    BK: int
    BV: int
    warps: int
    stages: int
    groups: int = 1  # see states.py


@dataclass(frozen=True)
class Config:
    C: int  # tokens of a chunk
    precision: str  # of dots of float32 numbers
    prepare: Tile
    invert: Tile
    scan: Tile
    reverse: Tile
    between_q: Tile
    between_k: Tile
    grads_q: Tile
    grads_k: Tile
    finish: Tile
    step: Tile


def power(n: int, most: int = 256) -> int:
    """The power of two that covers n, from 16 (the least a dot takes) to `most`."""
    return min(most, max(16, 1 << (n - 1).bit_length()))


SMALL = (86, 89, 120, 121)  # compute capabilities with 99 KiB of shared memory a block


def configure(
    K: int, V: int, itemsize: int, device: str, arch: int = 0, *, additive: bool = False, residual: bool = True
) -> Config:
    """The sizes for q of K and v of V channels and `itemsize` bytes.

    device: "cuda" with its compute capability (80, 90, 100 ...), "hip", or "cpu" in the interpreter. The method: its
    rule, and whether it corrects by a residual.
    """
    half, nvidia, small = itemsize == 2, device != "hip", arch in SMALL
    plain = additive and not residual
    arch = 89 if small else arch  # 12.x has the tensor cores' instructions of 8.9, not those of 10.0
    # float32 numbers go through tensor cores as three TF32 products, on AMD GPUs as they are; of half-precision inputs only
    # the inverses are float32. An operand in parts takes more registers: chunks and blocks of columns are smaller.
    precision = "tf32x3" if nvidia else "ieee"
    C = 64 if half else (32 if nvidia or K <= 128 else 16)
    BK = 64 if half or K > 128 else 32
    BV = 16 if half or not nvidia else 8
    # Loads ahead of their use save registers; not in half precision at K = 256, where the buffers don't fit, nor on Blackwell,
    # where its accumulators have a memory of their own.
    stages = 2 if device == "cuda" and (not half or (K <= 128 and arch < 100)) else 1
    warps = 4 if C > 16 else 1  # more would load less than 16 bytes each
    scan = reverse = Tile(power(K, BK), power(V, BV), 4, stages)
    if not half and nvidia:
        # A chunk has rows for two warps: they share key channels instead, 16 or 32 each.
        shares = 8 if K > 128 else 4
        groups = min(shares, power(K) // 16)
        scan = reverse = Tile(power(K) // groups, power(V, BV), shares, stages, groups)
        if arch >= 100 and 64 < K <= 128:  # two stages spill there
            reverse = replace(reverse, stages=1)
    elif device == "cuda":
        if arch >= 100:
            scan = replace(scan, warps=8)
            if 64 < K <= 128 and not residual:  # of GDN in four, ptxas of triton 3.9.0 spills three registers
                reverse = replace(reverse, warps=8)
        elif K > 128:
            scan = Tile(BK, 8, 4, stages)
        if additive and residual and arch < 100:
            # No product waits for another there: more loads are under way than registers hold.
            if K > 128:
                scan = replace(scan, warps=8) if arch >= 90 else replace(scan, stages=2)
            elif arch < 90:
                scan = replace(scan, BK=power(K, 128))
        if arch < 90 and K > 32:  # operands of its dots come from registers there
            reverse = Tile(32, power(V, BV), 4, 2) if K <= 128 else Tile(64, power(V, BV), 8, 2)
    between_q = between_k = Tile(0, power(V, 16), 8 if half else warps, 1)
    if plain:  # dbeta alone
        between_k = Tile(0, power(V, 64), 4, 1)
    grads_k = Tile(power(K, 32 if half else 16), power(V, 16), warps if half or plain or not nvidia else 8, 1)
    if half and device == "cuda":  # its three sums of [C, BK] are what counts: smaller ones, or more warps to hold them
        if arch < 90:
            grads_k = replace(grads_k, BK=16)
        elif arch >= 100:
            # With 16 columns ptxas of triton 3.9.0 spills two registers of GDN at K = 64.
            grads_k = replace(grads_k, BV=power(V, 32), warps=8)
    prepare = Tile(power(K, 64 if half else 32), 0, warps, 1)
    if plain and device == "cuda":  # there ptxas of triton 3.9.0 may stop at 128 registers and spill the next ones
        if not half:
            prepare = replace(prepare, BK=16)
        elif arch >= 100 and 32 < K <= 64:
            prepare = replace(prepare, warps=8)
    if small:
        scan = replace(scan, stages=1)
        if not half or K > 128:  # up to there two fit, and with one registers spill
            reverse = replace(reverse, stages=1)
        elif K > 64 and residual:  # with 16 columns too
            reverse = replace(reverse, BV=power(V, 8))
            if additive:
                scan = Tile(64, power(V, 8), 4, 1)
    return Config(
        C=C,
        precision=precision,
        prepare=prepare,
        invert=Tile(0, 0, 2 if half else 1, 1),
        scan=scan,
        reverse=reverse,
        between_q=between_q,
        between_k=between_k,
        grads_q=Tile(power(K, 32), power(V, 32 if half else 16), warps, 1),
        grads_k=grads_k,
        finish=Tile(power(K), 0, 2, 1),
        step=Tile(power(K), power(V, 16), 4, 1),
    )
