"""Kernel 2, for the delta rule, one program for each chunk, value head and state: inverses of unit lower triangular matrices.

    Mu = (I + G beta)^-1      Mw = (I + G gamma)^-1      with G = alpha G' by rows and the rate by columns

Blocks of 16 x 16. Those on the diagonal, D_i, are inverted by substitution; the others follow from top to bottom,

    X_ij = -D_i (M_ij D_j + M_i,j+1 X_j+1,j + ... + M_i,i-1 X_i-1,j)      M = G rate

in float32: for C = 64 that is 16 products of blocks. A power series would need no substitution, but its terms grow like
binomials where keys are alike. With FINE, what the dtype leaves of Mu is written too.
"""

import triton
import triton.language as tl

from .common import bounds, gate, halves, locate


@triton.jit
def invert(
    beta,  # [B * T, HV]
    gamma,
    mats,
    vecs,
    cu,
    N,
    T,
    HV: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    NM: tl.constexpr,
    FITTED: tl.constexpr,
    FINE: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    SYSTEMS: tl.constexpr = 2 if FITTED else 1
    pid = tl.program_id(0)
    system, h, slot = pid % SYSTEMS, pid // SYSTEMS % HV, pid // SYSTEMS // HV
    n, chunk = locate(cu, slot, N, T, C, PACKED)
    first, last = bounds(cu, n, T, PACKED)
    begin = first + chunk * C
    rows = tl.minimum(last - begin, C).to(tl.int32)
    at_gate = begin * HV + h
    index = slot.to(tl.int64) * HV + h
    mat = mats + index * (NM * C * C)
    vec = vecs + index * (5 * C)
    out = mat + (2 + system) * (C * C)
    low = mat + (NM - 1) * (C * C)
    keep = FINE and system == 0

    X = _diagonals(mat, vec, beta, gamma, system, at_gate, rows, HV, C, NM, FITTED, FINE, HAS_BETA, HAS_GAMMA)
    D0 = _pick(X, 0, C)
    _put(out, low, D0, 0, 0, keep, C)
    if C > 16:
        D1 = _pick(X, 1, C)
        M10 = _block(mat, vec, beta, gamma, system, at_gate, rows, HV, 1, 0, C, NM, FITTED, FINE, HAS_BETA, HAS_GAMMA)
        X1 = _next(D1, tl.dot(M10, D0, input_precision=PRECISION), PRECISION)
        _put(out, low, X1, 1, 0, keep, C)
        _put(out, low, D1, 1, 1, keep, C)
        _put(out, low, tl.zeros([16, 16], tl.float32), 0, 1, keep, C)
    if C > 32:
        D2 = _pick(X, 2, C)
        M20 = _block(mat, vec, beta, gamma, system, at_gate, rows, HV, 2, 0, C, NM, FITTED, FINE, HAS_BETA, HAS_GAMMA)
        M21 = _block(mat, vec, beta, gamma, system, at_gate, rows, HV, 2, 1, C, NM, FITTED, FINE, HAS_BETA, HAS_GAMMA)
        sums = tl.dot(M20, D0, input_precision=PRECISION)
        X2 = _next(D2, tl.dot(M21, X1, sums, input_precision=PRECISION), PRECISION)
        Y2 = _next(D2, tl.dot(M21, D1, input_precision=PRECISION), PRECISION)
        _put(out, low, X2, 2, 0, keep, C)
        _put(out, low, Y2, 2, 1, keep, C)
        _put(out, low, D2, 2, 2, keep, C)
        D3 = _pick(X, 3, C)
        M30 = _block(mat, vec, beta, gamma, system, at_gate, rows, HV, 3, 0, C, NM, FITTED, FINE, HAS_BETA, HAS_GAMMA)
        M31 = _block(mat, vec, beta, gamma, system, at_gate, rows, HV, 3, 1, C, NM, FITTED, FINE, HAS_BETA, HAS_GAMMA)
        M32 = _block(mat, vec, beta, gamma, system, at_gate, rows, HV, 3, 2, C, NM, FITTED, FINE, HAS_BETA, HAS_GAMMA)
        sums = tl.dot(M30, D0, input_precision=PRECISION)
        sums = tl.dot(M31, X1, sums, input_precision=PRECISION)
        _put(out, low, _next(D3, tl.dot(M32, X2, sums, input_precision=PRECISION), PRECISION), 3, 0, keep, C)
        sums = tl.dot(M31, D1, input_precision=PRECISION)
        _put(out, low, _next(D3, tl.dot(M32, Y2, sums, input_precision=PRECISION), PRECISION), 3, 1, keep, C)
        sums = tl.dot(M32, D2, input_precision=PRECISION)
        _put(out, low, _next(D3, sums, PRECISION), 3, 2, keep, C)
        _put(out, low, D3, 3, 3, keep, C)
        for column in tl.static_range(2, 4):
            for row in tl.static_range(column):
                _put(out, low, tl.zeros([16, 16], tl.float32), row, column, keep, C)


@triton.jit
def _entries(
    mat, vec, beta, gamma, system, at, rows, i, j, HV: tl.constexpr, C: tl.constexpr,
    NM: tl.constexpr, FITTED: tl.constexpr, FINE: tl.constexpr, HAS_BETA: tl.constexpr, HAS_GAMMA: tl.constexpr,
):  # fmt: skip
    """M = alpha G' rate at rows i and columns j, float32."""
    rate = gate(beta, at, j, rows, HV, HAS_BETA, 1.0)
    if FITTED:
        rate = tl.where(system == 0, rate, gate(gamma, at, j, rows, HV, HAS_GAMMA, 1.0))
    place = i * C + j
    G = tl.load(mat + C * C + place).to(tl.float32)
    if FINE:
        G += tl.load(mat + (NM - 2) * (C * C) + place).to(tl.float32)
    return tl.load(vec + i) * G * rate


@triton.jit
def _block(
    mat, vec, beta, gamma, system, at, rows, HV: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, C: tl.constexpr,
    NM: tl.constexpr, FITTED: tl.constexpr, FINE: tl.constexpr, HAS_BETA: tl.constexpr, HAS_GAMMA: tl.constexpr,
):  # fmt: skip
    i, j = 16 * ROW + tl.arange(0, 16)[:, None], 16 * COLUMN + tl.arange(0, 16)[None, :]
    return _entries(mat, vec, beta, gamma, system, at, rows, i, j, HV, C, NM, FITTED, FINE, HAS_BETA, HAS_GAMMA)


@triton.jit
def _diagonals(
    mat, vec, beta, gamma, system, at, rows, HV: tl.constexpr, C: tl.constexpr,
    NM: tl.constexpr, FITTED: tl.constexpr, FINE: tl.constexpr, HAS_BETA: tl.constexpr, HAS_GAMMA: tl.constexpr,
):  # fmt: skip
    """(I + M)^-1 of all blocks on the diagonal, [C / 16, 16, 16]: row by row, from the rows above."""
    block = 16 * tl.arange(0, C // 16)[:, None, None]
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    M = _entries(mat, vec, beta, gamma, system, at, rows, block + i, block + j, HV, C, NM, FITTED, FINE, HAS_BETA, HAS_GAMMA)
    X = tl.where(i == j, 1.0, 0.0) + tl.zeros([C // 16, 16, 16], tl.float32)
    for s in range(1, 16):
        row = tl.sum(tl.where(i == s, M, 0.0), 1)
        X = tl.where(i == s, X - tl.sum(row[:, :, None] * X, 1)[:, None, :], X)
    return X


@triton.jit
def _pick(X, BLOCK: tl.constexpr, C: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, C // 16)[:, None, None] == BLOCK, X, 0.0), 0)


@triton.jit
def _next(D, sums, PRECISION: tl.constexpr):
    return -tl.dot(D, sums, input_precision=PRECISION)


@triton.jit
def _put(at, low, X, ROW: tl.constexpr, COLUMN: tl.constexpr, keep, C: tl.constexpr):
    place = (16 * ROW + tl.arange(0, 16))[:, None] * C + (16 * COLUMN + tl.arange(0, 16))[None, :]
    high, rest = halves(X, at)
    tl.store(at + place, high)
    if keep:
        tl.store(low + place, rest)
