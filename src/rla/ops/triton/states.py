"""States on chip: a tuple of tiles of key channels, so that a dot never holds more than one as an operand.

A tile is [BK, BV]. With GROUPS > 1 it is [GROUPS, BK, BV], and a dot with it is a batch of GROUPS dots, of which each warp has
its own: warps share the key channels among them. Without, they share a product's rows, and where a chunk has fewer rows than
the warps cover, all of them compute the same. k S is then a sum over the groups, through shared memory; k^T x needs none.

Every function goes through the blocks of key channels in order and reads the tokens' part of each where it is needed. Tuples
grow by `+`, for triton knows no stars.
"""

import triton
import triton.language as tl

from .common import halves, read, read_t


@triton.jit
def channels(block, BK: tl.constexpr, GROUPS: tl.constexpr):
    """The key channels of a tile, [BK] or [GROUPS, BK]."""
    ik = tl.arange(0, BK)
    if GROUPS > 1:
        ik = tl.arange(0, GROUPS)[:, None] * BK + ik[None, :]
    return block * (GROUPS * BK) + ik


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr):
    """[ROWS, COLUMNS], or a batch of GROUPS of them."""
    if GROUPS > 1:
        x = tl.zeros([GROUPS, ROWS, COLUMNS], tl.float32)
    else:
        x = tl.zeros([ROWS, COLUMNS], tl.float32)
    return x


@triton.jit
def alike(x, GROUPS: tl.constexpr):
    """The same [C, BV] for every group."""
    if GROUPS > 1:
        x = tl.broadcast_to(x[None, :, :], [GROUPS, x.shape[0], x.shape[1]])
    return x


@triton.jit
def no_states(K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUPS: tl.constexpr):
    tiles = ()
    for _ in tl.static_range((K + GROUPS * BK - 1) // (GROUPS * BK)):
        tiles = tiles + (zeros(BK, BV, GROUPS),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def load_states(at, iv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUPS: tl.constexpr):
    """A state [K, V], columns iv of it."""
    tiles = ()
    for block in tl.static_range((K + GROUPS * BK - 1) // (GROUPS * BK)):
        ik = channels(block, BK, GROUPS)
        pointers = at + tl.expand_dims(ik, -1) * V + iv[None, :]
        if K % (GROUPS * BK) == 0 and V % BV == 0:
            M = tl.load(pointers)
        else:
            M = tl.load(pointers, mask=tl.expand_dims(ik < K, -1) & (iv < V)[None, :], other=0.0)
        tiles = tiles + (M.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def store_states(at, tiles, iv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUPS: tl.constexpr):
    for block in tl.static_range((K + GROUPS * BK - 1) // (GROUPS * BK)):
        ik = channels(block, BK, GROUPS)
        pointers = at + tl.expand_dims(ik, -1) * V + iv[None, :]
        M = tiles[block].to(at.dtype.element_ty)
        if K % (GROUPS * BK) == 0 and V % BV == 0:
            tl.store(pointers, M)
        else:
            tl.store(pointers, M, mask=tl.expand_dims(ik < K, -1) & (iv < V)[None, :])


@triton.jit
def views(
    k, q, i, rows, stride, S, R, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUPS: tl.constexpr,
    KS: tl.constexpr, KR: tl.constexpr, QS: tl.constexpr, QR: tl.constexpr, FINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products k S, k R, q S and q R that are asked for, [C, BV] each; zeros for the others.

    With FINE, k S is that of S as a sum of two halves.
    """
    kS = zeros(C, BV, GROUPS)
    kR = kS
    qS = kS
    qR = kS
    for block in tl.static_range((K + GROUPS * BK - 1) // (GROUPS * BK)):
        # First all of k, then all of q: fewer operands at once.
        ik = channels(block, BK, GROUPS)
        if KS or QS:
            Sd, S_low = halves(S[block], k)
        if KR or QR:
            Rd = R[block].to(k.dtype.element_ty)
        if KS or KR:
            bk = read(k, i, rows, stride, ik, K, GROUPS * BK)
        if KS:
            kS = tl.dot(bk, Sd, kS, input_precision=PRECISION)
            if FINE:
                kS = tl.dot(bk, S_low, kS)
        if KR:
            kR = tl.dot(bk, Rd, kR, input_precision=PRECISION)
        if QS or QR:
            bq = read(q, i, rows, stride, ik, K, GROUPS * BK)
        if QR:
            qR = tl.dot(bq, Rd, qR, input_precision=PRECISION)
        if QS:
            qS = tl.dot(bq, Sd, qS, input_precision=PRECISION)
    if GROUPS > 1:
        kS = tl.sum(kS, 0)
        kR = tl.sum(kR, 0)
        qS = tl.sum(qS, 0)
        qR = tl.sum(qR, 0)
    return kS, kR, qS, qR


@triton.jit
def absorb(
    k, i, rows, stride, decay, x, x_low, w, S, R, K: tl.constexpr, BK: tl.constexpr, GROUPS: tl.constexpr, BOTH: tl.constexpr,
    FINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S <- decay S + k^T x and, with BOTH, R <- decay R + k^T w. With FINE, x + x_low is in x's place."""
    new_S = ()
    new_R = ()
    x = alike(x, GROUPS)
    x_low = alike(x_low, GROUPS)
    w = alike(w, GROUPS)
    for block in tl.static_range((K + GROUPS * BK - 1) // (GROUPS * BK)):
        kt = read_t(k, i, rows, stride, channels(block, BK, GROUPS), K, GROUPS * BK)
        M = tl.dot(kt, x, decay * S[block], input_precision=PRECISION)
        if FINE:
            M = tl.dot(kt, x_low, M)
        new_S = new_S + (M,)  # type: ignore[assignment]  # noqa: RUF005
        if BOTH:
            new_R = new_R + (tl.dot(kt, w, decay * R[block], input_precision=PRECISION),)  # type: ignore[assignment]  # noqa: RUF005
        else:
            new_R = new_R + (R[block],)  # type: ignore[assignment]  # noqa: RUF005
    return new_S, new_R
