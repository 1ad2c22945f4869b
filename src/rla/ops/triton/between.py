"""Kernel 4, backward, one program for each chunk and value head: the adjoints of the products between tokens, as sums over
value columns. With QUERY those of Q' = (q k^T) D', without those of G' = (k k^T) D'. With what the two scans left (u = beta x,
w = gamma xw, by = beta y, gz = gamma z, de = dv - by):

    dA = lower(gamma do w^T) + strict(do u^T)      dG = -(gz w^T + by u^T)      dG' = -de u^T
    dbeta = x . y        dgamma = xw . z + do . (A w) + ...

Written for kernel 5: dA D, or dG D + dG' D', and what these products give to the gradients of gamma and of log_alpha. A
product's share in the latter is its adjoint times itself, added for the token that reads and taken away for the one that
wrote: rounding errors of the product then cancel. The two halves are launches of their own because together they need more
registers than there are.
"""

import triton
import triton.language as tl

from .common import bounds, decay_matrix, gate, locate, read, square, vectors


@triton.jit
def between(
    do,  # [B * T, HV, V]
    log_alpha,  # [B * T, HV]
    beta,
    gamma,
    mats,
    vecs,
    xs,  # [B * T, HV, V]
    xws,
    ys,
    zs,
    dv,
    cu,
    dmats,  # [slots, HV, 2, C, C]
    parts,  # [slots, HV, 3, 3, C] float32: shares in dlog_alpha (of this token, of the one before) and in dgamma
    dbeta,  # [B * T, HV]
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
    NM: tl.constexpr,
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
    TOKEN: tl.constexpr = RESIDUAL and not FITTED
    h, slot = pid % HV, pid // HV
    n, chunk = locate(cu, slot, N, T, C, PACKED)
    first, last = bounds(cu, n, T, PACKED)
    i = tl.arange(0, C)
    begin = first + chunk * C
    rows = tl.minimum(last - begin, C).to(tl.int32)  # <= 0 in a slot that nobody owns
    at_gate = begin * HV + h
    at_value = at_gate * V
    b = gate(beta, at_gate, i, rows, HV, HAS_BETA, 1.0)
    g = gate(gamma, at_gate, i, rows, HV, HAS_GAMMA, 1.0)
    go = g if GATED else tl.where(i < rows, 1.0, 0.0)  # what scales the correction in the output

    index = slot.to(tl.int64) * HV + h
    mat = mats + index * (NM * C * C)
    out = dmats + index * (2 * C * C) + i[:, None] * C + i[None, :]
    part = parts + index * (9 * C) + i
    alpha, _, _, d, _ = vectors(vecs, index, i, C)
    sum_gamma = tl.zeros([C], tl.float32)
    if QUERY:
        PW = tl.zeros([C, C], tl.float32)  # do w^T
        PU = tl.zeros([C, C], tl.float32)  # do u^T
        read_r = tl.zeros([C], tl.float32)  # do . r
        for j in range(0, V, BV):
            iv = j + tl.arange(0, BV)
            bo = read(do + at_value, i, rows, HV * V, iv, V, BV)
            x = read(xs + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32)
            PU = tl.dot(bo, tl.trans((b[:, None] * x).to(bo.dtype)), PU, input_precision=PRECISION)
            if RESIDUAL:
                xw = read(xws + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32)
            if TOKEN:
                read_r += tl.sum(bo.to(tl.float32) * xw, 1)
            if FITTED:
                PW = tl.dot(bo, tl.trans((g[:, None] * xw).to(bo.dtype)), PW, input_precision=PRECISION)
        Q = square(mat, i, C).to(tl.float32)
        on_diagonal = i[:, None] == i[None, :]
        if RESIDUAL:
            diagonal = tl.sum(tl.where(on_diagonal, PW, 0.0), 1) + read_r
            if GATED:
                sum_gamma = alpha * tl.sum(Q * PW, 1) + d * diagonal
            diagonal = go * diagonal
            PW = go[:, None] * PW
        else:
            diagonal = tl.sum(tl.where(on_diagonal, PU, 0.0), 1)
        # X: what decays by D = alpha D', up to this token; Y: by D', up to the one before.
        X = PW
        Y = tl.zeros([C, C], tl.float32)
        if RESIDUAL and not GATED:
            Y = PU
        else:
            X += PU
        X = alpha[:, None] * X
        D = decay_matrix(log_alpha, at_gate, i, rows, HV, HAS_ALPHA)
        tl.store(out, tl.where(on_diagonal, diagonal[:, None], D * (X + Y)).to(dmats.dtype.element_ty))
        X = X * Q
        Y = Y * Q
    else:
        PG = tl.zeros([C, C], tl.float32)  # gz w^T + by u^T
        PE = tl.zeros([C, C], tl.float32)  # de u^T
        sum_beta = tl.zeros([C], tl.float32)
        for j in range(0, V, BV):
            iv = j + tl.arange(0, BV)
            x = read(xs + at_value, i, rows, HV * V, iv, V, BV)
            y = read(ys + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32)
            sum_beta += tl.sum(x.to(tl.float32) * y, 1)
            by = b[:, None] * y
            if DELTA or RESIDUAL:
                ut = tl.trans((b[:, None] * x.to(tl.float32)).to(x.dtype))
            if DELTA:
                PG = tl.dot(by.to(x.dtype), ut, PG, input_precision=PRECISION)
            if RESIDUAL:
                de = read(dv + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32) - by
                PE = tl.dot(de.to(x.dtype), ut, PE, input_precision=PRECISION)
            if FITTED:
                xw = read(xws + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32)
                z = read(zs + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32)
                sum_gamma += tl.sum(xw * z, 1)
                if DELTA:
                    wt = tl.trans((g[:, None] * xw).to(x.dtype))
                    PG = tl.dot((g[:, None] * z).to(x.dtype), wt, PG, input_precision=PRECISION)
        if HAS_BETA:
            tl.store(dbeta + at_gate + i * HV, sum_beta, mask=i < rows)
        X = -alpha[:, None] * PG
        Y = -PE
        if DELTA or RESIDUAL:
            D = decay_matrix(log_alpha, at_gate, i, rows, HV, HAS_ALPHA)
            tl.store(out + C * C, (D * (X + Y)).to(dmats.dtype.element_ty))
            G = square(mat + C * C, i, C).to(tl.float32)
            X = X * G
            Y = Y * G
        part += 3 * C
    tl.store(part, tl.sum(X, 1) - tl.sum(X + Y, 0))
    tl.store(part + C, tl.sum(Y, 1))
    tl.store(part + 2 * C, sum_gamma)
