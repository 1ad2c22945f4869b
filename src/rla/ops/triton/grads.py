"""Kernels 5 and 6, backward: gradients of q (QUERY) or of k and the gates, one program for each chunk and value head.

    dq = E (do S^T + gamma do R^T) + (dA D) k
    dk = L (u dS^T + w dR^T) - E (by S^T + gz R^T) - E' de S^T + (dA D)^T q + (N + N^T) k,   N = dG D + dG' D'

a block of key channels at a time. The last launch, that of dk, adds up the shares in the gradients of log_alpha and gamma
that the others left in `parts`. `finish` adds the value heads that share a key head and goes back through the norm.
"""

import triton
import triton.language as tl

from .common import bounds, gate, locate, read, read_t, square, square_t, vectors, write


@triton.jit
def grads(
    q,  # [B * T, H, K]
    k,
    do,  # [B * T, HV, V]
    beta,  # [B * T, HV]
    gamma,
    vecs,
    xs,  # [B * T, HV, V]
    xws,
    ys,
    zs,
    dv,
    states,  # [slots, HV, 1 or 2, K, V]
    adjoints,
    dmats,
    parts,
    cu,
    dxs,  # [B * T, HV, K], dq or dk
    dlog_alpha,  # [B * T, HV]
    dgamma,
    N,
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY: tl.constexpr,
    DELTA: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FITTED: tl.constexpr,
    GATED: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    NS: tl.constexpr = 2 if FITTED else 1
    H: tl.constexpr = HV // GROUP
    h, slot = pid % HV, pid // HV
    n, chunk = locate(cu, slot, N, T, C, PACKED)
    first, last = bounds(cu, n, T, PACKED)
    i = tl.arange(0, C)
    begin = first + chunk * C
    rows = tl.minimum(last - begin, C).to(tl.int32)  # <= 0 in a slot that nobody owns
    at_gate = begin * HV + h
    at_value = at_gate * V
    at_key = (begin * H + h // GROUP) * K
    index = slot.to(tl.int64) * HV + h
    at_state = index * NS * K * V
    part = parts + index * (9 * C) + i
    dmat = dmats + index * (2 * C * C)
    alpha, E_, L, _, E_C = vectors(vecs, index, i, C)
    E = alpha * E_
    b = gate(beta, at_gate, i, rows, HV, HAS_BETA, 1.0)
    g = gate(gamma, at_gate, i, rows, HV, HAS_GAMMA, 1.0)
    go = g if GATED else tl.where(i < rows, 1.0, 0.0)  # what scales the correction in the output
    db = tl.zeros([C], tl.float32)
    db_ = tl.zeros([C], tl.float32)
    sum_gamma = tl.zeros([C], tl.float32)
    carried = 0.0  # adjoint of the exponent of E_C
    for j in range(0, K, BK):
        ik = j + tl.arange(0, BK)
        if QUERY:
            qS = tl.zeros([C, BK], tl.float32)  # do S^T
            qR = tl.zeros([C, BK], tl.float32)  # do R^T
            for m in range(0, V, BV):
                iv = m + tl.arange(0, BV)
                bo = read(do + at_value, i, rows, HV * V, iv, V, BV)
                St = read_t(states + at_state, ik, K, V, iv, V, BV)  # [BV, BK]
                qS = tl.dot(bo, St, qS, input_precision=PRECISION)
                if FITTED:
                    Rt = read_t(states + at_state + K * V, ik, K, V, iv, V, BV)
                    qR = tl.dot(bo, Rt, qR, input_precision=PRECISION)
            bq = read(q + at_key, i, rows, H * K, ik, K, BK).to(tl.float32)
            share = tl.sum(bq * qS, 1)
            if RESIDUAL and not GATED:
                db_ += E_ * share
                dx = E_[:, None] * qS
            else:
                db += E * share
                dx = E[:, None] * qS
            if FITTED:
                share = E * tl.sum(bq * qR, 1)
                db += go * share
                dx += (E * go)[:, None] * qR
                if GATED:
                    sum_gamma += share
            bk = read(k + at_key, i, rows, H * K, ik, K, BK)
            dx = tl.dot(square(dmat, i, C), bk, dx, input_precision=PRECISION)
        else:
            kd = tl.zeros([C, BK], tl.float32)  # u dS^T + w dR^T
            kE = tl.zeros([C, BK], tl.float32)  # by S^T + gz R^T
            kE_ = tl.zeros([C, BK], tl.float32)  # de S^T
            for m in range(0, V, BV):
                iv = m + tl.arange(0, BV)
                x = read(xs + at_value, i, rows, HV * V, iv, V, BV)
                St = read_t(states + at_state, ik, K, V, iv, V, BV)  # [BV, BK]
                dSt = read_t(adjoints + at_state, ik, K, V, iv, V, BV)
                carried += tl.sum(St.to(tl.float32) * dSt.to(tl.float32))
                kd = tl.dot((b[:, None] * x.to(tl.float32)).to(x.dtype), dSt, kd, input_precision=PRECISION)
                if DELTA or RESIDUAL:
                    by = b[:, None] * read(ys + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32)
                if DELTA:
                    kE = tl.dot(by.to(x.dtype), St, kE, input_precision=PRECISION)
                if RESIDUAL:
                    de = read(dv + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32) - by
                    kE_ = tl.dot(de.to(x.dtype), St, kE_, input_precision=PRECISION)
                if FITTED:
                    w = g[:, None] * read(xws + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32)
                    Rt = read_t(states + at_state + K * V, ik, K, V, iv, V, BV)
                    dRt = read_t(adjoints + at_state + K * V, ik, K, V, iv, V, BV)
                    carried += tl.sum(Rt.to(tl.float32) * dRt.to(tl.float32))
                    kd = tl.dot(w.to(x.dtype), dRt, kd, input_precision=PRECISION)
                    if DELTA:
                        gz = g[:, None] * read(zs + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32)
                        kE = tl.dot(gz.to(x.dtype), Rt, kE, input_precision=PRECISION)
            bk = read(k + at_key, i, rows, H * K, ik, K, BK)
            fk = bk.to(tl.float32)
            written = L * tl.sum(fk * kd, 1)
            db += tl.where(i == C - 1, tl.sum(written), 0.0) - written
            dx = L[:, None] * kd
            if DELTA:
                db -= E * tl.sum(fk * kE, 1)
                dx -= E[:, None] * kE
            if RESIDUAL:
                db_ -= E_ * tl.sum(fk * kE_, 1)
                dx -= E_[:, None] * kE_
            bq = read(q + at_key, i, rows, H * K, ik, K, BK)
            dx = tl.dot(square_t(dmat, i, C), bq, dx, input_precision=PRECISION)
            if DELTA or RESIDUAL:
                dx = tl.dot(square(dmat + C * C, i, C), bk, dx, input_precision=PRECISION)
                dx = tl.dot(square_t(dmat + C * C, i, C), bk, dx, input_precision=PRECISION)
        write(dxs + at_gate * K, dx, i, rows, HV * K, ik, K, BK)

    if QUERY:
        tl.store(part + 6 * C, db)
        tl.store(part + 7 * C, db_)
        tl.store(part + 8 * C, sum_gamma)
    else:
        if HAS_ALPHA:
            db += tl.load(part) + tl.load(part + 3 * C) + tl.load(part + 6 * C)
            db_ += tl.load(part + C) + tl.load(part + 4 * C) + tl.load(part + 7 * C)
            db = tl.where(i == C - 1, db + E_C * carried, db)
            da = tl.cumsum(db, 0, reverse=True) + tl.cumsum(db_, 0, reverse=True) - db_
            tl.store(dlog_alpha + at_gate + i * HV, da, mask=i < rows)
        if HAS_GAMMA:
            sum_gamma = tl.load(part + 2 * C) + tl.load(part + 5 * C) + tl.load(part + 8 * C)
            tl.store(dgamma + at_gate + i * HV, sum_gamma, mask=i < rows)


@triton.jit
def finish(
    x,  # [B, T, H, K] with strides: q or k
    dxs,  # [B * T, HV, K]: gradients of the normalised, for each value head
    dx,  # [B * T, H, K]
    tokens_total,
    T,
    H: tl.constexpr,
    x_b,
    x_t,
    x_h,
    EPS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
):
    pid = tl.program_id(0)
    h = pid % H
    tokens = (pid // H).to(tl.int64) * BT + tl.arange(0, BT)
    ik = tl.arange(0, BK)
    inside = (tokens < tokens_total)[:, None] & (ik < K)[None, :]
    at = (tokens[:, None] * H + h) * K + ik[None, :]
    total = tl.zeros([BT, BK], tl.float32)
    for s in range(GROUP):
        place = (tokens[:, None] * (H * GROUP) + h * GROUP + s) * K + ik[None, :]
        total += tl.load(dxs + place, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        from_x = (tokens // T * x_b + tokens % T * x_t + h * x_h)[:, None] + ik[None, :]
        y = tl.load(x + from_x, mask=inside, other=0.0).to(tl.float32)
        norm = tl.sqrt(tl.sum(y * y, 1))
        divisor = tl.where(norm < EPS, EPS, norm)[:, None]
        y = y / divisor
        along = tl.where(norm < EPS, 0.0, tl.sum(total * y, 1))
        total = (total - along[:, None] * y) / divisor
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=inside)
