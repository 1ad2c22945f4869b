"""What the kernels share: where a program's chunk lies, decays, products with more digits and the pseudo-residual.

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
    """Rows i < rows and columns j < COLUMNS of a tile whose rows are `stride` apart; 0 elsewhere. Columns [G, n]: G tiles.

    `at` is a scalar, with what may exceed 32 bits in it; offsets within the tile are 32 bits, and the mask on columns is left
    out where blocks fit exactly: both save registers.
    """
    pointers = at + i[:, None] * stride + tl.expand_dims(j, -2)
    if COLUMNS % BLOCK == 0:
        x = tl.load(pointers, mask=(i < rows)[:, None], other=0.0)
    else:
        x = tl.load(pointers, mask=(i < rows)[:, None] & tl.expand_dims(j < COLUMNS, -2), other=0.0)
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
    pointers = at + i[None, :] * stride + tl.expand_dims(j, -1)
    if COLUMNS % BLOCK == 0:
        x = tl.load(pointers, mask=(i < rows)[None, :], other=0.0)
    else:
        x = tl.load(pointers, mask=(i < rows)[None, :] & tl.expand_dims(j < COLUMNS, -1), other=0.0)
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
    at = vecs + index * (5 * C)
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
def psi_slope(e, clip, LOSS: tl.constexpr):
    """psi'(e), kept for backward instead of e: rounded to half precision, e could fall on the other side of the clip."""
    if LOSS == 1:
        slope = tl.where(tl.abs(e) <= clip, 1.0, 0.0)
    else:
        r = psi(e, clip, LOSS)
        slope = 1.0 - r * r
    return slope


@triton.jit
def halves(x, like):
    """Float32 numbers as sums of two of `like`'s dtype, which together have twice its digits."""
    high = x.to(like.dtype.element_ty)
    return high, (x - high.to(tl.float32)).to(like.dtype.element_ty)


@triton.jit
def fine_dot(at, low, x, like, i, C: tl.constexpr):
    """M x of a float32 x with twice the digits of half precision. M [C, C] is kept as two halves, at `at` and at `low`."""
    x, x_low = halves(x, like)
    M = square(at, i, C)
    return tl.dot(M, x, tl.dot(M, x_low, tl.dot(square(low, i, C), x)))
