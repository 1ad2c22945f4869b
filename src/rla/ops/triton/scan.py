"""Kernel 2, one program for each sequence, value head and block of BV value columns: S and R stay on chip over all chunks.

    x = Mu (v - E k S)        additive: v           u = beta x
    e = v - E' k S - G' u                           r = psi(e)
    xw = Mw (r - E k R)       additive: r           w = gamma xw
    o = E q S + alpha Q' u + gamma [E q R + alpha Q' w + diag w]
    S <- E_C S + k^T (L u)    R <- E_C R + k^T (L w)

Forward writes o, the last states, and for backward the states at every segment's start. Backward runs it again with TRACE,
from those states, one program for each segment, and writes the states before each chunk, x, xw and psi'(e) instead.

With FINE, what leads to e has twice the digits of half precision: the slope of a clip jumps from 1 to 0, so that an error of
bfloat16's size in e would turn a share of the gradients off or on. k is the one that was given, which is exact, and products
are divided by its norm; the other operands are sums of two halves.
"""

import triton
import triton.language as tl

from .common import bounds, fine_dot, gate, halves, locate, psi, psi_slope, read, slot_of, square, vectors, write
from .states import absorb, load_states, no_states, store_states, views


@triton.jit
def scan(
    q,  # [B * T, H, K]
    k,  # normalised, but not with FINE
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
    slopes,
    states,  # [slots, HV, 1 or 2, K, V]
    N,
    T,
    HV: tl.constexpr,
    clip,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
    NM: tl.constexpr,
    DELTA: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FITTED: tl.constexpr,
    GATED: tl.constexpr,
    LOSS: tl.constexpr,
    FINE: tl.constexpr,
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
    S = no_states(K, BK, BV, GROUPS)
    R = no_states(K, BK, BV, GROUPS)
    if HAS_STATE:
        if segment == 0:
            S = load_states(S_in + own, iv, K, V, BK, BV, GROUPS)
            if FITTED:
                R = load_states(R_in + own, iv, K, V, BK, BV, GROUPS)
    if TRACE:
        if (segment > 0) & (begin < last):
            kept = saved + ((place + segment - 1) * HV + h) * NS * K * V
            S = load_states(kept, iv, K, V, BK, BV, GROUPS)
            if FITTED:
                R = load_states(kept + K * V, iv, K, V, BK, BV, GROUPS)

    H: tl.constexpr = HV // GROUP
    chunks = tl.maximum(tl.cdiv(last - begin, C), 0).to(tl.int32)
    for c in range(chunks):
        if SAVE:
            if (c > 0) & (c % (SEGMENT // C) == 0):
                keep = saved + ((place + c // (SEGMENT // C) - 1) * HV + h) * NS * K * V
                store_states(keep, S, iv, K, V, BK, BV, GROUPS)
                if FITTED:
                    store_states(keep + K * V, R, iv, K, V, BK, BV, GROUPS)
        token = begin + c * C
        rows = tl.minimum(last - token, C).to(tl.int32)
        at_gate = token * HV + h
        at_key = (token * H + h // GROUP) * K
        at_value = at_gate * V
        chunk = (slot + c) * HV + h
        mat = mats + chunk * (NM * C * C)
        if TRACE:
            at_state = states + chunk * NS * K * V
            store_states(at_state, S, iv, K, V, BK, BV, GROUPS)
            if FITTED:
                store_states(at_state + K * V, R, iv, K, V, BK, BV, GROUPS)
        kS, kR, qS, qR = views(
            k + at_key, q + at_key, i, rows, H * K, S, R, C, K, BK, BV, GROUPS,
            DELTA or RESIDUAL, DELTA and FITTED, not TRACE, FITTED and not TRACE, FINE, PRECISION,
        )  # fmt: skip
        alpha, E_, L, d, E_C = vectors(vecs, chunk, i, C)
        E = alpha * E_
        if FINE:
            k_scale = tl.load(vecs + chunk * (5 * C) + 4 * C + i)
            L *= k_scale
            kS *= k_scale[:, None]
            kR *= k_scale[:, None]
        b = gate(beta, at_gate, i, rows, HV, HAS_BETA, 1.0)
        bv = read(v + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32)
        x = bv
        if DELTA:
            x = bv - E[:, None] * kS
            if FINE:
                x = fine_dot(mat + 2 * C * C, mat + (NM - 1) * C * C, x, k, i, C)
            else:
                x = tl.dot(square(mat + 2 * C * C, i, C), x.to(k.dtype.element_ty), input_precision=PRECISION)
            if TRACE:
                write(xs + at_value, x, i, rows, HV * V, iv, V, BV)
        u = b[:, None] * x
        ud = u.to(k.dtype.element_ty)
        into_S, into_S_low = halves(L[:, None] * u, k)
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
            e = bv - E_[:, None] * kS
            if FINE:
                e -= fine_dot(mat + C * C, mat + (NM - 1 - DELTA) * C * C, u, k, i, C)
            else:
                e -= tl.dot(square(mat + C * C, i, C), ud, input_precision=PRECISION)
            if TRACE and LOSS != 0:
                write(slopes + at_value, psi_slope(e, clip, LOSS), i, rows, HV * V, iv, V, BV)
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
        S, R = absorb(
            k + at_key, i, rows, H * K, E_C, into_S, into_S_low, into_R, S, R,
            K, BK, GROUPS, FITTED, FINE, PRECISION,
        )  # fmt: skip

    if not TRACE:
        store_states(S_out + own, S, iv, K, V, BK, BV, GROUPS)
        if FITTED:
            store_states(R_out + own, R, iv, K, V, BK, BV, GROUPS)
