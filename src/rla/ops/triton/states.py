"""States on chip: a tuple of tiles [BK, BV] of key channels, so that a dot never holds more than one as an operand.

Every function goes through the blocks of key channels in order and reads the tokens' part of each where it is needed. Tuples
grow by `+`, for triton knows no stars.
"""

import triton
import triton.language as tl

from .common import halves, read, read_t


@triton.jit
def no_states(K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    tiles = ()
    for _ in tl.static_range((K + BK - 1) // BK):
        tiles = tiles + (tl.zeros([BK, BV], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def load_states(at, iv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """A state [K, V], columns iv of it."""
    tiles = ()
    for block in tl.static_range((K + BK - 1) // BK):
        tiles = tiles + (read(at, block * BK + tl.arange(0, BK), K, V, iv, V, BV).to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def store_states(at, tiles, iv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    for block in tl.static_range((K + BK - 1) // BK):
        ik = block * BK + tl.arange(0, BK)
        pointers = at + ik[:, None] * V + iv[None, :]
        M = tiles[block].to(at.dtype.element_ty)
        if K % BK == 0 and V % BV == 0:
            tl.store(pointers, M)
        else:
            tl.store(pointers, M, mask=(ik < K)[:, None] & (iv < V)[None, :])


@triton.jit
def views(
    k, q, i, rows, stride, S, R, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KS: tl.constexpr, KR: tl.constexpr, QS: tl.constexpr, QR: tl.constexpr, FINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products k S, k R, q S and q R that are asked for, [C, BV] each; zeros for the others.

    With FINE, k S is that of S as a sum of two halves.
    """
    kS = tl.zeros([C, BV], tl.float32)
    kR = tl.zeros([C, BV], tl.float32)
    qS = tl.zeros([C, BV], tl.float32)
    qR = tl.zeros([C, BV], tl.float32)
    for block in tl.static_range((K + BK - 1) // BK):
        # First all of k, then all of q: fewer operands at once.
        ik = block * BK + tl.arange(0, BK)
        if KS or QS:
            Sd, S_low = halves(S[block], k)
        if KR or QR:
            Rd = R[block].to(k.dtype.element_ty)
        if KS or KR:
            bk = read(k, i, rows, stride, ik, K, BK)
        if KS:
            kS = tl.dot(bk, Sd, kS, input_precision=PRECISION)
            if FINE:
                kS = tl.dot(bk, S_low, kS)
        if KR:
            kR = tl.dot(bk, Rd, kR, input_precision=PRECISION)
        if QS or QR:
            bq = read(q, i, rows, stride, ik, K, BK)
        if QR:
            qR = tl.dot(bq, Rd, qR, input_precision=PRECISION)
        if QS:
            qS = tl.dot(bq, Sd, qS, input_precision=PRECISION)
    return kS, kR, qS, qR


@triton.jit
def absorb(
    k, i, rows, stride, decay, x, x_low, w, S, R, K: tl.constexpr, BK: tl.constexpr, BOTH: tl.constexpr, FINE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """S <- decay S + k^T x and, with BOTH, R <- decay R + k^T w. With FINE, x + x_low is in x's place."""
    new_S = ()
    new_R = ()
    for block in tl.static_range((K + BK - 1) // BK):
        kt = read_t(k, i, rows, stride, block * BK + tl.arange(0, BK), K, BK)
        M = tl.dot(kt, x, decay * S[block], input_precision=PRECISION)
        if FINE:
            M = tl.dot(kt, x_low, M)
        new_S = new_S + (M,)  # type: ignore[assignment]  # noqa: RUF005
        if BOTH:
            new_R = new_R + (tl.dot(kt, w, decay * R[block], input_precision=PRECISION),)  # type: ignore[assignment]  # noqa: RUF005
        else:
            new_R = new_R + (R[block],)  # type: ignore[assignment]  # noqa: RUF005
    return new_S, new_R
