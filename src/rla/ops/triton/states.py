"""States on chip: up to four tiles [BK, BV] of key channels, so that a dot never holds more than one as an operand.

Triton has no arrays of tiles, hence the four names; those beyond K are empty, [1, 1]. Every function goes through the blocks
of key channels in order and reads the tokens' part of each where it is needed.
"""

import triton
import triton.language as tl

from .common import read, read_t


@triton.jit
def no_states(K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    zero = tl.zeros([BK, BV], tl.float32)
    none = tl.zeros([1, 1], tl.float32)
    return zero, zero if K > BK else none, zero if K > 2 * BK else none, zero if K > 3 * BK else none


@triton.jit
def load_states(at, iv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """A state [K, V], columns iv of it."""
    ik = tl.arange(0, BK)
    none = tl.zeros([1, 1], tl.float32)
    M0, M1, M2, M3 = read(at, ik, K, V, iv, V, BV).to(tl.float32), none, none, none
    if K > BK:
        M1 = read(at, ik + BK, K, V, iv, V, BV).to(tl.float32)
    if K > 2 * BK:
        M2 = read(at, ik + 2 * BK, K, V, iv, V, BV).to(tl.float32)
    if K > 3 * BK:
        M3 = read(at, ik + 3 * BK, K, V, iv, V, BV).to(tl.float32)
    return M0, M1, M2, M3


@triton.jit
def store_states(at, M0, M1, M2, M3, iv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    _store(at, M0, 0, iv, K, V, BK, BV)
    if K > BK:
        _store(at, M1, 1, iv, K, V, BK, BV)
    if K > 2 * BK:
        _store(at, M2, 2, iv, K, V, BK, BV)
    if K > 3 * BK:
        _store(at, M3, 3, iv, K, V, BK, BV)


@triton.jit
def _store(at, M, BLOCK: tl.constexpr, iv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    ik = BLOCK * BK + tl.arange(0, BK)
    pointers = at + ik[:, None] * V + iv[None, :]
    if K % BK == 0 and V % BV == 0:
        tl.store(pointers, M.to(at.dtype.element_ty))
    else:
        tl.store(pointers, M.to(at.dtype.element_ty), mask=(ik < K)[:, None] & (iv < V)[None, :])


@triton.jit
def views(
    k, q, i, rows, stride, S0, S1, S2, S3, R0, R1, R2, R3, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KS: tl.constexpr, KR: tl.constexpr, QS: tl.constexpr, QR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products k S, k R, q S and q R that are asked for, [C, BV] each; zeros for the others."""
    zero = tl.zeros([C, BV], tl.float32)
    kS, kR, qS, qR = _view(k, q, i, rows, stride, 0, S0, R0, zero, zero, zero, zero, K, BK, KS, KR, QS, QR, PRECISION)
    if K > BK:
        kS, kR, qS, qR = _view(k, q, i, rows, stride, 1, S1, R1, kS, kR, qS, qR, K, BK, KS, KR, QS, QR, PRECISION)
    if K > 2 * BK:
        kS, kR, qS, qR = _view(k, q, i, rows, stride, 2, S2, R2, kS, kR, qS, qR, K, BK, KS, KR, QS, QR, PRECISION)
    if K > 3 * BK:
        kS, kR, qS, qR = _view(k, q, i, rows, stride, 3, S3, R3, kS, kR, qS, qR, K, BK, KS, KR, QS, QR, PRECISION)
    return kS, kR, qS, qR


@triton.jit
def _view(
    k, q, i, rows, stride, BLOCK: tl.constexpr, S, R, kS, kR, qS, qR, K: tl.constexpr, BK: tl.constexpr,
    KS: tl.constexpr, KR: tl.constexpr, QS: tl.constexpr, QR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    ik = BLOCK * BK + tl.arange(0, BK)
    if KS or KR:
        bk = read(k, i, rows, stride, ik, K, BK)
    if QS or QR:
        bq = read(q, i, rows, stride, ik, K, BK)
    if KS or QS:
        Sd = S.to(k.dtype.element_ty)
    if KS:
        kS = tl.dot(bk, Sd, kS, input_precision=PRECISION)
    if QS:
        qS = tl.dot(bq, Sd, qS, input_precision=PRECISION)
    if KR or QR:
        Rd = R.to(k.dtype.element_ty)
    if KR:
        kR = tl.dot(bk, Rd, kR, input_precision=PRECISION)
    if QR:
        qR = tl.dot(bq, Rd, qR, input_precision=PRECISION)
    return kS, kR, qS, qR


@triton.jit
def absorb(
    k, i, rows, stride, decay, x, w, S0, S1, S2, S3, R0, R1, R2, R3, K: tl.constexpr, BK: tl.constexpr, BOTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """S <- decay S + k^T x and, with BOTH, R <- decay R + k^T w."""
    S0, R0 = _absorb(k, i, rows, stride, 0, decay, x, w, S0, R0, K, BK, BOTH, PRECISION)
    if K > BK:
        S1, R1 = _absorb(k, i, rows, stride, 1, decay, x, w, S1, R1, K, BK, BOTH, PRECISION)
    if K > 2 * BK:
        S2, R2 = _absorb(k, i, rows, stride, 2, decay, x, w, S2, R2, K, BK, BOTH, PRECISION)
    if K > 3 * BK:
        S3, R3 = _absorb(k, i, rows, stride, 3, decay, x, w, S3, R3, K, BK, BOTH, PRECISION)
    return S0, S1, S2, S3, R0, R1, R2, R3


@triton.jit
def _absorb(
    k, i, rows, stride, BLOCK: tl.constexpr, decay, x, w, S, R, K: tl.constexpr, BK: tl.constexpr, BOTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    kt = read_t(k, i, rows, stride, BLOCK * BK + tl.arange(0, BK), K, BK)
    S = tl.dot(kt, x, decay * S, input_precision=PRECISION)
    if BOTH:
        R = tl.dot(kt, w, decay * R, input_precision=PRECISION)
    return S, R
