"""Kernel 1, one program for each chunk and value head: products between tokens and decays, which depend on no state.

    Q' = (q k^T) * D'      G' = (k k^T) * D'      strictly lower; with the row's own decay A = alpha Q', G = alpha G'
    alpha, E', L, diag_i = q_i . k_i, 1 / |k_i|

and, where the method says so, q and k divided by their norms. Each is written once and read by every block of value columns.
With FINE, G' has twice the digits: what the dtype leaves of it is written as a matrix of its own.
"""

import triton
import triton.language as tl

from .common import bounds, decay_matrix, decays, halves, locate, read, write


@triton.jit
def prepare(
    q,  # [B, T, H, K] with strides
    k,
    log_alpha,  # [B * T, HV]
    qn,  # [B * T, H, K], normalised
    kn,
    mats,  # [slots, HV, NM, C, C]: Q', G', room for Mu and Mw; FINE: the rest of G', room for that of Mu
    vecs,  # [slots, HV, 5, C] float32: alpha, E', L, diag, 1 / |k|
    cu,
    N,
    T,
    HV: tl.constexpr,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    EPS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    NM: tl.constexpr,
    DELTA: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FINE: tl.constexpr,
    NORM: tl.constexpr,
    COPY_Q: tl.constexpr,
    COPY_K: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    h, slot = pid % HV, pid // HV
    n, chunk = locate(cu, slot, N, T, C, PACKED)
    first, last = bounds(cu, n, T, PACKED)
    begin = first + chunk * C  # int64
    rows = tl.minimum(last - begin, C).to(tl.int32)  # <= 0 in a slot that nobody owns
    i = tl.arange(0, C)
    at_gate = begin * HV + h
    if PACKED:
        q += begin * q_t + (h // GROUP) * q_h
        k += begin * k_t + (h // GROUP) * k_h
    else:
        q += n.to(tl.int64) * q_b + (begin - first) * q_t + (h // GROUP) * q_h
        k += n.to(tl.int64) * k_b + (begin - first) * k_t + (h // GROUP) * k_h
    q_scale = tl.zeros([C], tl.float32)
    k_scale = tl.zeros([C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    kk = tl.zeros([C, C], tl.float32)
    diag = tl.zeros([C], tl.float32)
    for j in range(0, K, BK):
        ik = j + tl.arange(0, BK)
        bq = read(q, i, rows, q_t, ik, K, BK)
        bk = read(k, i, rows, k_t, ik, K, BK)
        kt = tl.trans(bk)
        qk = tl.dot(bq, kt, qk, input_precision=PRECISION)
        if DELTA or RESIDUAL:
            kk = tl.dot(bk, kt, kk, input_precision=PRECISION)
        fq, fk = bq.to(tl.float32), bk.to(tl.float32)
        diag += tl.sum(fq * fk, 1)
        if NORM:
            q_scale += tl.sum(fq * fq, 1)
            k_scale += tl.sum(fk * fk, 1)
    if NORM:
        q_scale = tl.sqrt(q_scale)
        k_scale = tl.sqrt(k_scale)
        q_scale = 1.0 / tl.where(q_scale < EPS, EPS, q_scale)  # a NaN stays one
        k_scale = 1.0 / tl.where(k_scale < EPS, EPS, k_scale)
        qk *= q_scale[:, None] * k_scale[None, :]
        kk *= k_scale[:, None] * k_scale[None, :]
        diag *= q_scale * k_scale
    else:
        q_scale += 1.0
        k_scale += 1.0
    D = decay_matrix(log_alpha, at_gate, i, rows, HV, HAS_ALPHA)
    index = slot.to(tl.int64) * HV + h
    out = mats + index * (NM * C * C) + i[:, None] * C + i[None, :]
    tl.store(out, (qk * D).to(mats.dtype.element_ty))
    if DELTA or RESIDUAL:
        G, G_low = halves(kk * D, mats)
        tl.store(out + C * C, G)
        if FINE:
            tl.store(out + (NM - 1 - DELTA) * (C * C), G_low)
    alpha, E_, L = decays(log_alpha, at_gate, i, rows, HV, HAS_ALPHA)
    vec = vecs + index * (5 * C) + i
    tl.store(vec, alpha)
    tl.store(vec + C, E_)
    tl.store(vec + 2 * C, L)
    tl.store(vec + 3 * C, diag)
    tl.store(vec + 4 * C, k_scale)
    H: tl.constexpr = HV // GROUP
    own = tl.where(h % GROUP == 0, rows, 0)
    at_copy = (begin * H + h // GROUP) * K
    for j in range(0, K, BK):
        ik = j + tl.arange(0, BK)
        if COPY_Q:
            bq = read(q, i, rows, q_t, ik, K, BK).to(tl.float32)
            write(qn + at_copy, bq * q_scale[:, None], i, own, H * K, ik, K, BK)
        if COPY_K:
            bk = read(k, i, rows, k_t, ik, K, BK).to(tl.float32)
            write(kn + at_copy, bk * k_scale[:, None], i, own, H * K, ik, K, BK)
