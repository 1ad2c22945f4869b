"""Kernel 3, backward: the scan of the adjoints dS and dR, from the last chunk to the first, kept on chip.

    doc = gamma do
    dw = Q'^T (alpha doc) + diag doc + L k dR          gz = Mw^T (gamma dw)     z = dw - G'^T (alpha gz)
    de = psi'(e) gz                                    psi'(e) as the scan left it
    du = Q'^T (alpha do) - G'^T de + L k dS            by = Mu^T (beta du)      y = du - G'^T (alpha by)
    dv = de + by
    dS <- E_C dS + q^T (E do) - k^T (E' de + E by)     dR <- E_C dR + q^T (E doc) - k^T (E gz)

y and z are the adjoints of u and w with everything counted, so that dbeta = x . y and gz = gamma z, by = beta y. Additive:
y = du and z = dw, and no `E by`, `E gz`. Written for kernel 4: the adjoints of the states after each chunk, y, z and dv.
"""

import triton
import triton.language as tl

from .common import bounds, gate, read, slot_of, square_t, vectors, write
from .states import absorb, load_states, no_states, store_states, views


@triton.jit
def reverse(
    q,  # [B * T, H, K]
    k,
    do,  # [B * T, HV, V]
    beta,  # [B * T, HV]
    gamma,
    mats,
    vecs,
    slopes,  # [B * T, HV, V]
    dS_out,  # [N, HV, K, V] float32
    dR_out,
    cu,
    dS_in,
    dR_in,
    adjoints,  # [slots, HV, 1 or 2, K, V]
    ys,  # [B * T, HV, V]
    zs,
    dv,
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    NM: tl.constexpr,
    DELTA: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FITTED: tl.constexpr,
    GATED: tl.constexpr,
    LOSS: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    NS: tl.constexpr = 2 if FITTED else 1
    h, n = pid // NV % HV, pid // NV // HV
    first, last = bounds(cu, n, T, PACKED)
    slot = slot_of(first, n, T, C, PACKED)
    i, iv = tl.arange(0, C), pid % NV * BV + tl.arange(0, BV)
    own = (n.to(tl.int64) * HV + h) * K * V
    S = load_states(dS_out + own, iv, K, V, BK, BV, GROUPS)
    R = no_states(K, BK, BV, GROUPS)
    if FITTED:
        R = load_states(dR_out + own, iv, K, V, BK, BV, GROUPS)

    H: tl.constexpr = HV // GROUP
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for back in range(chunks):
        c = chunks - 1 - back
        token = first + c * C
        rows = tl.minimum(last - token, C).to(tl.int32)
        at_gate = token * HV + h
        at_key = (token * H + h // GROUP) * K
        at_value = at_gate * V
        chunk = (slot + c) * HV + h
        mat = mats + chunk * (NM * C * C)
        at_state = adjoints + chunk * NS * K * V
        store_states(at_state, S, iv, K, V, BK, BV, GROUPS)
        if FITTED:
            store_states(at_state + K * V, R, iv, K, V, BK, BV, GROUPS)
        kdS, kdR, _, _ = views(
            k + at_key, q + at_key, i, rows, H * K, S, R, C, K, BK, BV, GROUPS,
            True, FITTED, False, False, False, PRECISION,
        )  # fmt: skip
        alpha, E_, L, d, E_C = vectors(vecs, chunk, i, C)
        E = alpha * E_
        b = gate(beta, at_gate, i, rows, HV, HAS_BETA, 1.0)
        bo = read(do + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32)
        Qt = square_t(mat, i, C)
        if RESIDUAL and not GATED:
            y = tl.dot(Qt, bo.to(k.dtype.element_ty), input_precision=PRECISION)
            from_S = (E_[:, None] * bo).to(k.dtype.element_ty)
        else:
            y = tl.dot(Qt, (alpha[:, None] * bo).to(k.dtype.element_ty), input_precision=PRECISION)
            from_S = (E[:, None] * bo).to(k.dtype.element_ty)
        from_R = from_S
        y += L[:, None] * kdS
        if not RESIDUAL:
            y += d[:, None] * bo
        else:
            g = gate(gamma, at_gate, i, rows, HV, HAS_GAMMA, 1.0)
            doc = bo
            if GATED:
                doc = g[:, None] * bo
            gz = d[:, None] * doc
            if FITTED:
                z = tl.dot(Qt, (alpha[:, None] * doc).to(k.dtype.element_ty), input_precision=PRECISION) + gz + L[:, None] * kdR
                from_R = (E[:, None] * doc).to(k.dtype.element_ty)
                gz = g[:, None] * z
        # Registers decide where q^T is added: here for tiles of their own, beside k^T for groups of them.
        q_S = from_S
        q_R = from_R
        if GROUPS == 1:
            S, R = absorb(
                q + at_key, i, rows, H * K, E_C, q_S, q_S, q_R, S, R,
                K, BK, GROUPS, FITTED, False, PRECISION,
            )  # fmt: skip
        if DELTA or RESIDUAL:
            Gt = square_t(mat + C * C, i, C)
            from_S = tl.zeros([C, BV], tl.float32)
            from_R = from_S.to(k.dtype.element_ty)
        if RESIDUAL:
            if FITTED:
                if DELTA:
                    gz = tl.dot(square_t(mat + 3 * C * C, i, C), gz.to(k.dtype.element_ty), input_precision=PRECISION)
                    z -= tl.dot(Gt, (alpha[:, None] * gz).to(k.dtype.element_ty), input_precision=PRECISION)
                    from_R = (-E[:, None] * gz).to(k.dtype.element_ty)
                write(zs + at_value, z, i, rows, HV * V, iv, V, BV)
            de = gz
            if LOSS != 0:
                de *= read(slopes + at_value, i, rows, HV * V, iv, V, BV).to(tl.float32)
            y -= tl.dot(Gt, de.to(k.dtype.element_ty), input_precision=PRECISION)
        by = b[:, None] * y
        if DELTA:
            by = tl.dot(square_t(mat + 2 * C * C, i, C), by.to(k.dtype.element_ty), input_precision=PRECISION)
            y -= tl.dot(Gt, (alpha[:, None] * by).to(k.dtype.element_ty), input_precision=PRECISION)
        write(ys + at_value, y, i, rows, HV * V, iv, V, BV)
        if GROUPS > 1:
            S, R = absorb(
                q + at_key, i, rows, H * K, E_C, q_S, q_S, q_R, S, R,
                K, BK, GROUPS, FITTED, False, PRECISION,
            )  # fmt: skip
        if DELTA or RESIDUAL:
            if RESIDUAL:
                from_S -= E_[:, None] * de
            if DELTA:
                from_S -= E[:, None] * by
            from_S = from_S.to(k.dtype.element_ty)
            S, R = absorb(
                k + at_key, i, rows, H * K, 1.0, from_S, from_S, from_R, S, R,
                K, BK, GROUPS, FITTED and DELTA, False, PRECISION,
            )  # fmt: skip
        if RESIDUAL:
            by += de
        write(dv + at_value, by, i, rows, HV * V, iv, V, BV)

    if HAS_STATE:
        store_states(dS_in + own, S, iv, K, V, BK, BV, GROUPS)
        if FITTED:
            store_states(dR_in + own, R, iv, K, V, BK, BV, GROUPS)
