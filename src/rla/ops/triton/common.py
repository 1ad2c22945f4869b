"""What the kernels share: where a program's chunk lies, decays, the pseudo-residual and the inverse of a unit lower matrix.

Tokens are numbered along the flattened [B * T]. A sequence of l tokens has ceil(l / C) chunks, and chunk c of sequence n owns
slot `n * ceil(T / C) + c` of the buffers that hold something for each chunk; for packed sequences `start // C + n + c`, which
no other chunk can have and which a binary search in cu_seqlens inverts. So no table is built, and nothing is read on the host.
"""

import triton
import triton.language as tl


@triton.jit
def bounds(cu, n, T, PACKED: tl.constexpr):
    """First token of sequence n and the one after its last, int64."""
    if PACKED:
        first = tl.load(cu + n).to(tl.int64)
        last = tl.load(cu + n + 1).to(tl.int64)
    else:
        first = n.to(tl.int64) * T
        last = first + T
    return first, last


@triton.jit
def slot_of(first, n, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Slot of the first chunk of sequence n, which starts at token `first`; int64."""
    if PACKED:
        slot = first // C + n
    else:
        slot = n.to(tl.int64) * tl.cdiv(T, C)
    return slot


@triton.jit
def locate(cu, slot, N, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Sequence and chunk of a slot; a slot that nobody owns comes back as a chunk past the sequence's end."""
    if PACKED:
        n = slot * 0
        above = n + N
        while above - n > 1:
            middle = (n + above) // 2
            here = (tl.load(cu + middle) // C + middle) <= slot
            n = tl.where(here, middle, n)
            above = tl.where(here, above, middle)
        chunk = slot - (tl.load(cu + n) // C + n).to(tl.int32)
    else:
        n = slot // tl.cdiv(T, C)
        chunk = slot % tl.cdiv(T, C)
    return n, chunk


@triton.jit
def read(at, i, rows, stride, j, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows i < rows and columns j < COLUMNS of a tile whose rows are `stride` apart; 0 elsewhere.

    `at` is a scalar, with what may exceed 32 bits in it; offsets within the tile are 32 bits, and the mask on columns is left
    out where blocks fit exactly: both save registers.
    """
    pointers = at + i[:, None] * stride + j[None, :]
    if COLUMNS % BLOCK == 0:
        x = tl.load(pointers, mask=(i < rows)[:, None], other=0.0)
    else:
        x = tl.load(pointers, mask=(i < rows)[:, None] & (j < COLUMNS)[None, :], other=0.0)
    return x


@triton.jit
def write(at, x, i, rows, stride, j, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    pointers = at + i[:, None] * stride + j[None, :]
    x = x.to(at.dtype.element_ty)
    if COLUMNS % BLOCK == 0:
        tl.store(pointers, x, mask=(i < rows)[:, None])
    else:
        tl.store(pointers, x, mask=(i < rows)[:, None] & (j < COLUMNS)[None, :])


@triton.jit
def read_t(at, i, rows, stride, j, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The transpose of `read`, [columns, rows].

    A tile that one dot wants as it is and another transposed is read twice, from cache the second time: else it would stay in
    registers between the two.
    """
    pointers = at + i[None, :] * stride + j[:, None]
    if COLUMNS % BLOCK == 0:
        x = tl.load(pointers, mask=(i < rows)[None, :], other=0.0)
    else:
        x = tl.load(pointers, mask=(i < rows)[None, :] & (j < COLUMNS)[:, None], other=0.0)
    return x


@triton.jit
def square(at, i, C: tl.constexpr):
    """A [C, C] matrix."""
    return tl.load(at + i[:, None] * C + i[None, :])


@triton.jit
def square_t(at, i, C: tl.constexpr):
    """Its transpose."""
    return tl.load(at + i[None, :] * C + i[:, None])


@triton.jit
def gate(x, at, i, rows, HV, HAS: tl.constexpr, DEFAULT: tl.constexpr):
    """A gate at the chunk's tokens, float32, `at` the first; DEFAULT where it is not given, 0 beyond the sequence."""
    if HAS:
        value = tl.load(x + at + i * HV, mask=(i >= 0) & (i < rows), other=0.0).to(tl.float32)
    else:
        value = tl.where(i < rows, DEFAULT, 0.0)
    return value


@triton.jit
def decays(log_alpha, at, i, rows, HV, HAS: tl.constexpr):
    """alpha_i, E'_i and L_i of a chunk from its log_alpha: exponentials of sums alone, so that alpha = 0 is exact."""
    a = gate(log_alpha, at, i, rows, HV, HAS, 0.0)
    before = gate(log_alpha, at, i - 1, rows, HV, HAS, 0.0)
    after = gate(log_alpha, at, i + 1, rows, HV, HAS, 0.0)
    return tl.exp(a), tl.exp(tl.cumsum(before, 0)), tl.exp(tl.cumsum(after, 0, reverse=True))


@triton.jit
def decay_matrix(log_alpha, at, i, rows, HV, HAS: tl.constexpr):
    """D'_ij = exp(a_{j+1} + ... + a_{i-1}) for j < i, else 0: [C, C]."""
    below = i[:, None] > i[None, :]
    if HAS:
        before = gate(log_alpha, at, i - 1, rows, HV, HAS, 0.0)
        sums = tl.cumsum(tl.where(i[:, None] > i[None, :] + 1, before[:, None], 0.0), 0)
        D = tl.where(below, tl.exp(sums), 0.0)
    else:
        D = tl.where(below, 1.0, 0.0)
    return D


@triton.jit
def vectors(vecs, index, i, C: tl.constexpr):
    """alpha_i, E'_i, L_i, diag_i and E_C of a chunk, as `prepare` left them."""
    at = vecs + index * (4 * C)
    E_C = tl.load(at + C - 1) * tl.load(at + 2 * C - 1)
    return tl.load(at + i), tl.load(at + C + i), tl.load(at + 2 * C + i), tl.load(at + 3 * C + i), E_C


@triton.jit
def psi(e, clip, LOSS: tl.constexpr):
    """The pseudo-residual; NaN stays NaN."""
    if LOSS == 1:
        e = tl.where(e > clip, clip, tl.where(e < -clip, -clip, e))
    if LOSS == 2:
        e = 2.0 * tl.sigmoid(2.0 * e) - 1.0
    return e


@triton.jit
def psi_adjoint(dr, e, clip, LOSS: tl.constexpr):
    if LOSS == 1:
        dr = tl.where(tl.abs(e) <= clip, dr, 0.0)
    if LOSS == 2:
        r = psi(e, clip, LOSS)
        dr = dr * (1.0 - r * r)
    return dr


@triton.jit
def inverse(M, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + M)^-1 for a strictly lower M [C, C] float32.

    Diagonal blocks of 16 by substitution, all at once; then pairs of blocks are merged, [[P, 0], [B, Q]]^-1 having -Q' B P' in
    its corner. A power series would need no substitution, but its terms grow like binomials where keys are alike.
    """
    i = tl.arange(0, C)
    same = i[:, None] // 16 == i[None, :] // 16
    X = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for s in range(1, 16):
        rows = same & (i[:, None] % 16 == s)
        row = tl.sum(tl.where(rows, M, 0.0), 0)
        X = tl.where(rows, X - tl.sum(row[:, None] * X, 0)[None, :], X)
    if C >= 32:
        X = _merge(X, M, i, 16, PRECISION)
    if C >= 64:
        X = _merge(X, M, i, 32, PRECISION)
    return X


@triton.jit
def _merge(X, M, i, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    block = i // SIZE
    corner = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
    MX = tl.dot(tl.where(corner, M, 0.0), X, input_precision=PRECISION)
    return X - tl.dot(X, MX, input_precision=PRECISION)
