"""The one-token kernel: one program for each sequence, value head and block of value columns reads its part of S and R once and
writes the new ones in place.

A column of a state needs nothing of the others, so that no program waits for another; the work is a pass over the states.
"""

import triton
import triton.language as tl

from .common import psi


@triton.jit
def decode(
    q,  # [B, H, K] with strides
    k,
    v,  # [B, HV, V]
    log_alpha,  # [B, HV]
    beta,
    gamma,
    S,  # [B, HV, K, V] float32, updated
    R,
    o,  # [B, HV, V]
    HV: tl.constexpr,
    clip,
    q_b,
    q_h,
    k_b,
    k_h,
    EPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    DELTA: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FITTED: tl.constexpr,
    GATED: tl.constexpr,
    LOSS: tl.constexpr,
    NORM: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
):
    pid = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    row = (pid // NV).to(tl.int64)  # of [B * HV]
    batch, h = row // HV, row % HV
    ik, iv = tl.arange(0, BK), pid % NV * BV + tl.arange(0, BV)
    in_k, in_v = ik < K, iv < V
    inside = in_k[:, None] & in_v[None, :]
    at = row * K * V + ik[:, None] * V + iv[None, :]
    old = tl.load(S + at, mask=inside, other=0.0)
    bq = tl.load(q + batch * q_b + (h // GROUP) * q_h + ik, mask=in_k, other=0.0).to(tl.float32)
    bk = tl.load(k + batch * k_b + (h // GROUP) * k_h + ik, mask=in_k, other=0.0).to(tl.float32)
    bv = tl.load(v + row * V + iv, mask=in_v, other=0.0).to(tl.float32)
    a = 1.0
    b = 1.0
    g = 1.0
    if HAS_ALPHA:
        a = tl.exp(tl.load(log_alpha + row).to(tl.float32))
    if HAS_BETA:
        b = tl.load(beta + row).to(tl.float32)
    if HAS_GAMMA:
        g = tl.load(gamma + row).to(tl.float32)
    if NORM:
        norm = tl.sqrt(tl.sum(bq * bq, 0))
        bq = bq / tl.where(norm < EPS, EPS, norm)
        norm = tl.sqrt(tl.sum(bk * bk, 0))
        bk = bk / tl.where(norm < EPS, EPS, norm)
    kS = tl.sum(bk[:, None] * old, 0)  # [BV]
    x = bv
    if DELTA:
        x = bv - a * kS
    new = a * old + bk[:, None] * (b * x)[None, :]
    tl.store(S + at, new, mask=inside)
    if RESIDUAL:
        out = tl.sum(bq[:, None] * old, 0)
        r = psi(bv - kS, clip, LOSS)
        if FITTED:
            M = a * tl.load(R + at, mask=inside, other=0.0)
            if DELTA:
                r = r - tl.sum(bk[:, None] * M, 0)
            M += bk[:, None] * (g * r)[None, :]
            tl.store(R + at, M, mask=inside)
            correction = tl.sum(bq[:, None] * M, 0)
        else:
            correction = tl.sum(bq * bk, 0) * r
        if GATED:
            out = a * out + g * correction
        else:
            out += correction
    else:
        out = tl.sum(bq[:, None] * new, 0)
    tl.store(o + row * V + iv, out.to(o.dtype.element_ty), mask=in_v)
