"""Kernel 2, one program for each sequence, value head and block of BV value columns: S and R stay on chip over all chunks.

    x = Mu (v - E k S)        additive: v           u = beta x
    e = v - E' k S - G' u                           r = psi(e)
    xw = Mw (r - E k R)       additive: r           w = gamma xw
    o = E q S + alpha Q' u + gamma [E q R + alpha Q' w + diag w]
    S <- E_C S + k^T (L u)    R <- E_C R + k^T (L w)

Forward writes o, the last states, and for backward the states at every segment's start. Backward runs it again with TRACE,
from those states and one program for each segment: then it writes the states before each chunk, x, xw and e instead.
"""

import triton
import triton.language as tl

from .common import bounds, gate, locate, psi, read, slot_of, square, vectors, write
from .states import absorb, load_states, no_states, store_states, views


@triton.jit
def scan(
    q,  # [B * T, H, K]
    k,
    v,  # [B * T, HV, V]
    beta,  # [B * T, HV]
    gamma,
    mats,
    vecs,
    S_in,  # [N, HV, K, V] float32
    R_in,
    saved,  # [segments, HV, 1 or 2, K, V] float32
    cu,
    o,  # [B * T, HV, V]
    S_out,  # [N, HV, K, V] float32
    R_out,
    xs,  # [B * T, HV, V]
    xws,
    es,
    states,  # [slots, HV, 1 or 2, K, V]
    N,
    T,
    HV: tl.constexpr,
    clip,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
    NM: tl.constexpr,
    DELTA: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FITTED: tl.constexpr,
    GATED: tl.constexpr,
    LOSS: tl.constexpr,
    TRACE: tl.constexpr,
    SAVE: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    NS: tl.constexpr = 2 if FITTED else 1
    h = pid // NV % HV
    if TRACE:
        n, segment = locate(cu, pid // NV // HV, N, T, SEGMENT, PACKED)
    else:
        n = pid // NV // HV
        segment = n * 0
    first, last = bounds(cu, n, T, PACKED)
    slot = slot_of(first, n, T, C, PACKED) + segment * (SEGMENT // C)
    # Segments after the first have a place among the saved states: place 0 is that of segment 1.
    place = first // SEGMENT if PACKED else n.to(tl.int64) * (tl.maximum(T - 1, 0) // SEGMENT)
    begin = first + segment * SEGMENT
    if TRACE:
        last = tl.minimum(last, begin + SEGMENT)

    i, iv = tl.arange(0, C), pid % NV * BV + tl.arange(0, BV)
    own = (n.to(tl.int64) * HV + h) * K * V
    S0, S1, S2, S3 = no_states(K, BK, BV)
    R0, R1, R2, R3 = no_states(K, BK, BV)
    if HAS_STATE:
        if segment == 0:
            S0, S1, S2, S3 = load_states(S_in + own, iv, K, V, BK, BV)
            if FITTED:
                R0, R1, R2, R3 = load_states(R_in + own, iv, K, V, BK, BV)
    if TRACE:
        if (segment > 0) & (begin < last):
            kept = saved + ((place + segment - 1) * HV + h) * NS * K * V
            S0, S1, S2, S3 = load_states(kept, iv, K, V, BK, BV)
            if FITTED:
                R0, R1, R2, R3 = load_states(kept + K * V, iv, K, V, BK, BV)

    H: tl.constexpr = HV // GROUP
    chunks = tl.maximum(tl.cdiv(last - begin, C), 0).to(tl.int32)
    for c in range(chunks):
        if SAVE:
            if (c > 0) & (c % (SEGMENT // C) == 0):
                keep = saved + ((place + c // (SEGMENT // C) - 1) * HV + h) * NS * K * V
                store_states(keep, S0, S1, S2, S3, iv, K, V, BK, BV)
                if FITTED:
                    store_states(keep + K * V, R0, R1, R2, R3, iv, K, V, BK, BV)
        token = begin + c * C
        rows = tl.minimum(last - token, C).to(tl.int32)
        at_gate = token * HV + h
        at_key = (token * H + h // GROUP) * K
        at_value = at_gate * V
        chunk = (slot + c) * HV + h
        mat = mats + chunk * (NM * C * C)
        if TRACE:
            at_state = states + chunk * NS * K * V
            store_states(at_state, S0, S1, S2, S3, iv, K, V, BK, BV)
            if FITTED:
                store_states(at_state + K * V, R0, R1, R2, R3, iv, K, V, BK, BV)
        kS, kR, qS, qR = views(
            k + at_key, q + at_key, i, rows, H * K, S0, S1, S2, S3, R0, R1, R2, R3, C, K, BK, BV,
            DELTA or RESIDUAL, DELTA and FITTED, not TRACE, FITTED and not TRACE, PRECISION,
        )  # fmt: skip
        alpha, E_, L, d, E_C = vectors(vecs, chunk, i, C)
        E = alpha * E_
        b = gate(beta, at_gate, i, rows, HV, HAS_BETA, 1.0)
        bv = read(v + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32)
        x = bv
        if DELTA:
            x = tl.dot(square(mat + 2 * C * C, i, C), (bv - E[:, None] * kS).to(k.dtype.element_ty), input_precision=PRECISION)
            if TRACE:
                write(xs + at_value, x, i, rows, HV * V, iv, V, BV)
        u = b[:, None] * x
        ud = u.to(k.dtype.element_ty)
        into_S = (L[:, None] * u).to(k.dtype.element_ty)
        into_R = into_S
        if not TRACE:
            Q = square(mat, i, C)
            o_ = tl.dot(Q, ud, input_precision=PRECISION)
            if not RESIDUAL:
                o_ = E[:, None] * qS + alpha[:, None] * o_ + d[:, None] * u
            elif GATED:
                o_ = E[:, None] * qS + alpha[:, None] * o_
            else:
                o_ = E_[:, None] * qS + o_
        if RESIDUAL:
            g = gate(gamma, at_gate, i, rows, HV, HAS_GAMMA, 1.0)
            e = bv - E_[:, None] * kS - tl.dot(square(mat + C * C, i, C), ud, input_precision=PRECISION)
            if TRACE and LOSS != 0:
                write(es + at_value, e, i, rows, HV * V, iv, V, BV)
            xw = psi(e, clip, LOSS)
            if FITTED and DELTA:
                xw = (xw - E[:, None] * kR).to(k.dtype.element_ty)
                xw = tl.dot(square(mat + 3 * C * C, i, C), xw, input_precision=PRECISION)
            if TRACE:
                write(xws + at_value, xw, i, rows, HV * V, iv, V, BV)
            w = g[:, None] * xw
            into_R = (L[:, None] * w).to(k.dtype.element_ty)
            if not TRACE:
                if FITTED:
                    Qw = tl.dot(Q, w.to(k.dtype.element_ty), input_precision=PRECISION)
                    oc = E[:, None] * qR + d[:, None] * w + alpha[:, None] * Qw
                else:
                    oc = d[:, None] * xw
                if GATED:
                    oc = g[:, None] * oc
                o_ += oc
        if not TRACE:
            write(o + at_value, o_, i, rows, HV * V, iv, V, BV)
        S0, S1, S2, S3, R0, R1, R2, R3 = absorb(
            k + at_key, i, rows, H * K, E_C, into_S, into_R, S0, S1, S2, S3, R0, R1, R2, R3, K, BK, FITTED, PRECISION
        )

    if not TRACE:
        store_states(S_out + own, S0, S1, S2, S3, iv, K, V, BK, BV)
        if FITTED:
            store_states(R_out + own, R0, R1, R2, R3, iv, K, V, BK, BV)
