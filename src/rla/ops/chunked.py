"""The chunked form in plain PyTorch, with its own backward: any device, any dtype, memory linear in T.

Within a chunk of C tokens with incoming states S and R (a = log_alpha, all products with a column by rows):

    D_ij = exp(a_{j+1} + ... + a_i)  (j <= i)      D'_ij = exp(a_{j+1} + ... + a_{i-1})  (j < i), the decay of S_{t-1}
    E_i  = exp(a_1 + ... + a_i)      E'_i = E_{i-1}      L_j = D_Cj
    A = (q k^T) * D      G = (k k^T) * D, strictly lower      G' = (k k^T) * D'
    additive: u = beta v                 delta: (I + beta G) u = beta (v - (E k) S)
    p = (E' k) S + G' u      r = psi(v - p)
    additive: w = gamma r                delta: (I + gamma G) w = gamma (r - (E k) R)
    o = (E q) S + strict(A) u + gamma [(E q) R + A w]
    S <- E_C S + (L k)^T u               R <- E_C R + (L k)^T w

Every D is the exponential of a sum, never of a difference of sums, so that nothing overflows and alpha = 0 is exact.
For vector decay D_ij, E_i and L_j are vectors over key channels and move inside the products; all else is the same.
Saved for backward are the inputs and the states before each chunk; the rest is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..method import Method
from .reference import NORM_EPS, psi

CHUNK = 64
CHUNK_VECTOR = 16  # vector decay forms C x C x K differences


def refuses(device: str, dtype: torch.dtype, K: int, V: int, vector: bool) -> str | None:
    """Why this backend can't serve these tensors."""
    return None


def _chunk_size(method: Method) -> int:
    return CHUNK_VECTOR if method.decay == "vector" else CHUNK


def saved_shapes(q: Tensor, v: Tensor, N: int, method: Method) -> tuple[tuple[int, ...]]:
    """Shape of the states kept for backward: at most one set for each chunk of N sequences."""
    chunks = q.shape[0] * q.shape[1] // _chunk_size(method) + N
    return ((chunks, 2 if method.has_R else 1, v.shape[2], q.shape[3], v.shape[3]),)


def _steps(B: int, T: int, bounds: list[int] | None, C: int) -> Iterator[tuple[slice, slice, slice, slice]]:
    """(rows of the batch, tokens, states, rows of saved) of each chunk, the chunks of a sequence in order."""
    chunk = 0
    if bounds is None:
        for start in range(0, T, C):
            yield slice(0, B), slice(start, min(start + C, T)), slice(0, B), slice(chunk, chunk + B)
            chunk += B
    else:
        for n, (first, last) in enumerate(pairwise(bounds)):
            for start in range(first, last, C):
                yield slice(0, 1), slice(start, min(start + C, last)), slice(n, n + 1), slice(chunk, chunk + 1)
                chunk += 1


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    S0: Tensor | None,
    R0: Tensor | None,
    cu_seqlens: Tensor | None,
    method: Method,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor]]:
    """Output, final S, final R (empty without one) and the states before each chunk (empty unless `save`)."""
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    dtype = torch.promote_types(q.dtype, torch.float32)
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    N = B if bounds is None else len(bounds) - 1
    S, R = (q.new_zeros(N, HV, K, V, dtype=dtype) if M is None else M.clone() for M in (S0, R0))
    saved = q.new_empty(saved_shapes(q, v, N, method)[0] if save else 0, dtype=dtype)
    o = q.new_empty(B, T, HV, V)
    used = 0
    for rows, tokens, states, chunks in _steps(B, T, bounds, _chunk_size(method)):
        c = _Chunk.load(q, k, v, log_alpha, beta, gamma, rows, tokens, method)
        Sn, Rn = S[states], R[states] if method.has_R else None
        if save:
            saved[chunks, 0] = Sn
            if Rn is not None:
                saved[chunks, 1] = Rn
            used = chunks.stop
        o[rows, tokens] = c.scan(Sn, Rn, method).transpose(1, 2).to(o.dtype)
        S[states] = c.decay_C * Sn + c.kL.mT @ c.u
        if Rn is not None:
            R[states] = c.decay_C * Rn + c.kL.mT @ c.w
    if save:
        saved[used:] = 0
    return o, S, R if method.has_R else R.new_empty(0), (saved,)


def backward(
    do: Tensor,
    dS: Tensor | None,  # of the final states; None: 0
    dR: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    S0: Tensor | None,
    R0: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: Sequence[Tensor],
    method: Method,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_alpha, beta, gamma, S0 and R0 (None for those not given)."""
    saved = kept[0]
    B, T = q.shape[:2]
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    inputs = (q, k, v, log_alpha, beta, gamma)
    grads = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    N, HV = B if bounds is None else len(bounds) - 1, v.shape[2]
    dS, dR = (
        q.new_zeros(N if exists else 0, HV, q.shape[3], v.shape[3], dtype=saved.dtype) if x is None else x.clone()
        for x, exists in ((dS, True), (dR, method.has_R))
    )
    steps = list(_steps(B, T, bounds, _chunk_size(method)))
    for rows, tokens, states, chunks in reversed(steps):
        c = _Chunk.load(*inputs, rows, tokens, method)
        Sn, Rn = saved[chunks, 0], saved[chunks, 1] if method.has_R else None
        c.scan(Sn, Rn, method)
        do_c = do[rows, tokens].transpose(1, 2).to(saved.dtype)
        dS_c, dR_c, *grads_c = c.adjoint(do_c, dS[states], dR[states], Sn, Rn, method)
        dS[states] = dS_c
        if dR_c is not None:
            dR[states] = dR_c
        for x, dx in zip(grads, grads_c, strict=True):
            if x is not None:
                x[rows, tokens] = dx.transpose(1, 2).reshape(x[rows, tokens].shape)
    return (*grads, dS if S0 is not None else None, dR if R0 is not None else None)


def _segment_sums(a: Tensor) -> Tensor:
    """x_ij = a_{j+1} + ... + a_i for j <= i, as [..., C, C, X] from a: [..., C, X]."""
    C = a.shape[-2]
    below = torch.ones(C, C, dtype=torch.bool, device=a.device).tril(-1)[..., None]
    return torch.where(below, a[..., :, None, :], 0).cumsum(-3)


def _shift(x: Tensor, dim: int) -> Tensor:
    """X moved one place along `dim`, zero first."""
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, 1)), x.narrow(dim, 0, x.shape[dim] - 1)), dim)


def _product(x: Tensor, y: Tensor, D: Tensor) -> Tensor:
    """Sum over channels of x_i y_j D_ij: [..., C, C]."""
    if D.shape[-1] == 1:
        return (x @ y.mT) * D[..., 0]
    return torch.einsum("...ik,...jk,...ijk->...ij", x, y, D)


def _product_adjoint(dP: Tensor, x: Tensor, y: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    if D.shape[-1] == 1:
        dP = dP * D[..., 0]
        return dP @ y, dP.mT @ x
    return torch.einsum("...ij,...jk,...ijk->...ik", dP, y, D), torch.einsum("...ij,...ik,...ijk->...jk", dP, x, D)


@dataclass
class _Chunk:
    """One chunk, head-first: what it reads, then what `scan` computes and `adjoint` needs again."""

    group: int  # value heads per key head
    q: Tensor  # [n, HV, C, K], normalised
    k: Tensor
    v: Tensor  # [n, HV, C, V]
    q_norm: Tensor | None  # [n, HV, C, 1]
    k_norm: Tensor | None
    alpha: Tensor  # [n, HV, C, X], X = 1 or K
    beta: Tensor  # [n, HV, C, 1]
    gamma: Tensor
    D: Tensor  # [n, HV, C, C, X]
    D_: Tensor  # D'
    E: Tensor  # [n, HV, C, X]
    E_: Tensor  # E'

    @classmethod
    def load(cls, q, k, v, log_alpha, beta, gamma, rows: slice, tokens: slice, method: Method) -> _Chunk:
        dtype = torch.promote_types(q.dtype, torch.float32)
        group = v.shape[2] // q.shape[2]

        def take(x: Tensor) -> Tensor:
            return x[rows, tokens].transpose(1, 2).to(dtype)

        def heads(x: Tensor) -> tuple[Tensor, Tensor | None]:
            x, norm = take(x).contiguous(), None
            if method.qk_norm:
                norm = x.norm(dim=-1, keepdim=True)
                x = x / norm.clamp_min(NORM_EPS)
            if group > 1:
                x, norm = x.repeat_interleave(group, 1), None if norm is None else norm.repeat_interleave(group, 1)
            return x, norm

        (q, q_norm), (k, k_norm), v = heads(q), heads(k), take(v).contiguous()
        one = v.new_ones(*v.shape[:3], 1)
        beta, gamma = (one if x is None else take(x)[..., None] for x in (beta, gamma))
        a = torch.zeros_like(one) if log_alpha is None else take(log_alpha)
        a = a[..., None] if a.dim() == 3 else a
        lower = torch.ones(a.shape[2], a.shape[2], dtype=torch.bool, device=a.device).tril()
        D = _segment_sums(a).exp_().masked_fill_(~lower[..., None], 0)
        E = a.cumsum(-2).exp_()
        E_ = torch.cat((one[:, :, :1].expand_as(E[:, :, :1]), E[:, :, :-1]), 2)
        return cls(group, q, k, v, q_norm, k_norm, a.exp(), beta, gamma, D, _shift(D, -3), E, E_)

    @property
    def kL(self) -> Tensor:
        return self.D[..., -1, :, :] * self.k

    @property
    def decay_C(self) -> Tensor:
        return self.E[..., -1, :, None]  # scales the rows of a state

    def scan(self, S: Tensor, R: Tensor | None, method: Method) -> Tensor:
        """The chunk's output [n, HV, C, V]; sets u, w and the other parts that `adjoint` uses."""
        q, k, v, beta, gamma = self.q, self.k, self.v, self.beta, self.gamma
        delta, residual = method.rule == "delta", method.has_residual
        self.A = _product(q, k, self.D)
        self.qE = self.E * q
        self.base_decay = self.E_ if residual and not method.gate_output else self.E
        self.qB = self.base_decay * q
        if residual and not method.gate_output:
            self.AB = _product(q, k, self.D_)
        else:
            self.AB = self.A.tril(-1) if residual else self.A
        if delta:
            self.G = _product(k, k, self.D).tril(-1)
            self.kE = self.E * k
        if residual:
            self.G_ = _product(k, k, self.D_)
            self.kE_ = self.E_ * k
            kS_ = self.kE_ @ S
        if delta:
            kS = self.alpha * kS_ if residual and self.alpha.shape[-1] == 1 else self.kE @ S
            self.u_rhs = v - kS
            self.u = _solve(beta * self.G, beta * self.u_rhs)
        else:
            self.u = beta * v
        o = self.qB @ S + self.AB @ self.u
        if residual:
            self.e = v - kS_ - self.G_ @ self.u
            self.r = psi(self.e, method)
            if R is None:
                self.oc = self.r * self.A.diagonal(dim1=-2, dim2=-1)[..., None]
            else:
                if delta:
                    self.w_rhs = self.r - self.kE @ R
                    self.w = _solve(gamma * self.G, gamma * self.w_rhs)
                else:
                    self.w = gamma * self.r
                self.oc = self.qE @ R + self.A @ self.w
            o += gamma * self.oc if method.gate_output else self.oc
        return o

    def adjoint(
        self, do: Tensor, dS: Tensor, dR: Tensor, S: Tensor, R: Tensor | None, method: Method
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Adjoints of the states before the chunk, then of q, k, v, log_alpha, beta, gamma in the chunk."""
        q, k, v, beta, gamma, u, kL = self.q, self.k, self.v, self.beta, self.gamma, self.u, self.kL
        delta, residual = method.rule == "delta", method.has_residual
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dgamma, dR_in = torch.zeros_like(gamma), None
        db, db_ = torch.zeros_like(self.E), torch.zeros_like(self.E)  # adjoints of the exponents of E and E'

        def reduce(x: Tensor) -> Tensor:
            return x if db.shape[-1] > 1 else x.sum(-1, keepdim=True)

        def decayed(dxE: Tensor, xE: Tensor, E: Tensor, dx: Tensor, db: Tensor) -> None:
            """Carry the adjoint of xE = E * x on to x and to E's exponent."""
            dx += E * dxE
            db += reduce(dxE * xE)

        def product(dP: Tensor, x: Tensor, y: Tensor, D: Tensor, dx: Tensor, dy: Tensor, db_row: Tensor) -> None:
            dx_, dy_ = _product_adjoint(dP, x, y, D)
            db_row.add_(reduce(x * dx_))
            db.sub_(reduce(y * dy_))
            dx.add_(dx_)
            dy.add_(dy_)

        dS_in = self.decay_C * dS + self.qB.mT @ do
        dkL = u @ dS.mT
        decay_sum = (dS * S).sum(-1)  # [n, HV, K]
        du = self.AB.mT @ do + kL @ dS
        dA = torch.zeros_like(self.A)
        dkE = torch.zeros_like(k)
        if delta:
            dG = torch.zeros_like(self.G)
        if residual:
            doc = gamma * do if method.gate_output else do
            if method.gate_output:
                dgamma = (do * self.oc).sum(-1, keepdim=True)
            if R is None:
                diagonal = self.A.diagonal(dim1=-2, dim2=-1)[..., None]
                dr = doc * diagonal
                ddiagonal = (doc * self.r).sum(-1, keepdim=True)
                dq += ddiagonal * k
                dk += ddiagonal * q
            else:
                dA = (doc @ self.w.mT).tril()
                dw = self.A.mT @ doc + kL @ dR
                dkL += self.w @ dR.mT
                decay_sum += (dR * R).sum(-1)
                decayed(doc @ R.mT, self.qE, self.E, dq, db)
                dR_in = self.decay_C * dR + self.qE.mT @ doc
                if delta:
                    z = _solve_transposed(gamma * self.G, dw)
                    zw = z @ self.w.mT
                    dgamma += (z * self.w_rhs).sum(-1, keepdim=True) - (zw * self.G).sum(-1, keepdim=True)
                    dr = gamma * z
                    dkE -= dr @ R.mT
                    dR_in -= self.kE.mT @ dr
                    dG -= gamma * zw
                else:
                    dgamma += (dw * self.r).sum(-1, keepdim=True)
                    dr = gamma * dw
            de = dr * _psi_slope(self.e, self.r, method)
            dv += de
            du -= self.G_.mT @ de
            dS_in -= self.kE_.mT @ de
            decayed(-de @ S.mT, self.kE_, self.E_, dk, db_)
            product(-(de @ u.mT), k, k, self.D_, dk, dk, db_)
        if delta:
            y = _solve_transposed(beta * self.G, du)
            yu = y @ u.mT
            dbeta = (y * self.u_rhs).sum(-1, keepdim=True) - (yu * self.G).sum(-1, keepdim=True)
            by = beta * y
            dv += by
            dkE -= by @ S.mT
            dS_in -= self.kE.mT @ by
            dG -= beta * yu
            product(dG.tril(-1), k, k, self.D, dk, dk, db)
            decayed(dkE, self.kE, self.E, dk, db)
        else:
            dbeta = (du * v).sum(-1, keepdim=True)
            dv += beta * du
        du_base = do @ u.mT
        base_db = db_ if self.base_decay is self.E_ else db
        decayed(do @ S.mT, self.qB, self.base_decay, dq, base_db)
        if base_db is db_:
            product(du_base, q, k, self.D_, dq, dk, db_)
        else:
            dA = dA + du_base.tril(-1 if residual else 0)
        product(dA, q, k, self.D, dq, dk, db)
        through = dkL * kL
        dk += self.D[..., -1, :, :] * dkL
        db -= reduce(through)
        last = self.E[..., -1, :] * (decay_sum if db.shape[-1] > 1 else decay_sum.sum(-1, keepdim=True))
        db[..., -1, :] += reduce(through.sum(-2)) + last
        db[..., :-1, :] += db_[..., 1:, :]
        da = db.flip(-2).cumsum(-2).flip(-2)
        dq, dk = self._to_inputs(dq, q, self.q_norm), self._to_inputs(dk, k, self.k_norm)
        return dS_in, dR_in, dq, dk, dv, da, dbeta, dgamma

    def _to_inputs(self, dx: Tensor, x: Tensor, norm: Tensor | None) -> Tensor:
        """From normalised, repeated heads back to those of the input."""
        if norm is not None:
            along = torch.where(norm >= NORM_EPS, (dx * x).sum(-1, keepdim=True), 0)
            dx = (dx - along * x) / norm.clamp_min(NORM_EPS)
        return dx.unflatten(1, (-1, self.group)).sum(2) if self.group > 1 else dx


def _psi_slope(e: Tensor, r: Tensor, method: Method) -> Tensor:
    if method.loss == "huber":
        return (e.abs() <= method.clip).to(e.dtype)
    return 1 - r * r if method.loss == "logcosh" else torch.ones_like(e)


def _solve(G: Tensor, x: Tensor) -> Tensor:
    """(I + G)^-1 x for a strictly lower G."""
    return torch.linalg.solve_triangular(G, x, upper=False, unitriangular=True)


def _solve_transposed(G: Tensor, x: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(G.mT, x, upper=True, unitriangular=True)
