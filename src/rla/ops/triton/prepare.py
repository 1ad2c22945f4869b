"""Kernel 1, one program for each chunk and value head: all that does not depend on a state.

    Q' = (q k^T) * D'      G' = (k k^T) * D'      strictly lower; with the row's own decay A = alpha Q', G = alpha G'
    alpha, E', L, diag_i = q_i . k_i
    Mu = (I + G beta)^-1   Mw = (I + G gamma)^-1  delta rule: `invert`, a program for each of the two

and, where the method says so, q and k divided by their norms. Each is written once and read by every block of value columns.
"""

import triton
import triton.language as tl

from .common import bounds, decay_matrix, decays, gate, inverse, locate, read, write


@triton.jit
def prepare(
    q,  # [B, T, H, K] with strides
    k,
    log_alpha,  # [B * T, HV]
    qn,  # [B * T, H, K], normalised
    kn,
    mats,  # [slots, HV, NM, C, C]: Q', G', room for Mu and Mw
    vecs,  # [slots, HV, 4, C] float32: alpha, E', L, diag
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
    NORM: tl.constexpr,
    COPY: tl.constexpr,
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
    q_norm = tl.zeros([C], tl.float32)
    k_norm = tl.zeros([C], tl.float32)
    if NORM:
        for j in range(0, K, BK):
            bq = read(q, i, rows, q_t, j + tl.arange(0, BK), K, BK).to(tl.float32)
            bk = read(k, i, rows, k_t, j + tl.arange(0, BK), K, BK).to(tl.float32)
            q_norm += tl.sum(bq * bq, 1)
            k_norm += tl.sum(bk * bk, 1)
        q_norm = tl.sqrt(q_norm)
        k_norm = tl.sqrt(k_norm)
        q_norm = tl.where(q_norm < EPS, EPS, q_norm)  # a NaN stays one
        k_norm = tl.where(k_norm < EPS, EPS, k_norm)
    H: tl.constexpr = HV // GROUP
    own = tl.where(h % GROUP == 0, rows, 0)
    at_copy = (begin * H + h // GROUP) * K
    qk = tl.zeros([C, C], tl.float32)
    kk = tl.zeros([C, C], tl.float32)
    diag = tl.zeros([C], tl.float32)
    for j in range(0, K, BK):
        ik = j + tl.arange(0, BK)
        bq = read(q, i, rows, q_t, ik, K, BK)
        bk = read(k, i, rows, k_t, ik, K, BK)
        if NORM:
            bq = (bq.to(tl.float32) / q_norm[:, None]).to(q.dtype.element_ty)
            bk = (bk.to(tl.float32) / k_norm[:, None]).to(k.dtype.element_ty)
        if COPY:
            write(qn + at_copy, bq, i, own, H * K, ik, K, BK)
            write(kn + at_copy, bk, i, own, H * K, ik, K, BK)
        diag += tl.sum(bq.to(tl.float32) * bk.to(tl.float32), 1)
        kt = tl.trans(bk)
        qk = tl.dot(bq, kt, qk, input_precision=PRECISION)
        if DELTA or RESIDUAL:
            kk = tl.dot(bk, kt, kk, input_precision=PRECISION)
    D = decay_matrix(log_alpha, at_gate, i, rows, HV, HAS_ALPHA)
    index = slot.to(tl.int64) * HV + h
    out = mats + index * (NM * C * C) + i[:, None] * C + i[None, :]
    tl.store(out, (qk * D).to(mats.dtype.element_ty))
    if DELTA or RESIDUAL:
        tl.store(out + C * C, (kk * D).to(mats.dtype.element_ty))
    alpha, E_, L = decays(log_alpha, at_gate, i, rows, HV, HAS_ALPHA)
    vec = vecs + index * (4 * C) + i
    tl.store(vec, alpha)
    tl.store(vec + C, E_)
    tl.store(vec + 2 * C, L)
    tl.store(vec + 3 * C, diag)


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
    i = tl.arange(0, C)
    rate = gate(beta, begin * HV + h, i, rows, HV, HAS_BETA, 1.0)
    if FITTED:
        rate = tl.where(system == 0, rate, gate(gamma, begin * HV + h, i, rows, HV, HAS_GAMMA, 1.0))
    index = slot.to(tl.int64) * HV + h
    mat = mats + index * (NM * C * C) + i[:, None] * C + i[None, :]
    alpha = tl.load(vecs + index * (4 * C) + i)
    G = alpha[:, None] * tl.load(mat + C * C).to(tl.float32) * rate[None, :]
    tl.store(mat + (2 + system) * (C * C), inverse(G, C, PRECISION).to(mats.dtype.element_ty))
