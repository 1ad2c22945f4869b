// Products on register tiles: M x NR accumulators, a left operand read by broadcasts and a right operand in panels.
// A panel holds NR columns of a matrix, row after row: [rows][NR]. States, u, w and transposed inputs live in panels,
// so that nothing is packed inside a product.
#pragma once
#include "simd.h"

namespace RLA_ISA {

template <int M> struct Tile {
  V v[M][NV];
};

// Rows of the next tile when `rest` rows are left. Small tiles cannot hide the latency of an FMA: 8 = 4 + 4, not 6 + 2.
INLINE int tile_rows(int64_t rest) {
  if (rest >= MR && !(MR == 6 && rest == 8)) return MR;
  return rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
}

// f(Int<M>, i0) for the tiles of `rows` rows, from the first to the last.
template <class F> INLINE void tiles(int64_t rows, F&& f) {
  for (int64_t i = 0; i < rows;) {
    int m = tile_rows(rows - i);
    if (m == MR) f(Int<MR>{}, i);
    else if (m == 4) f(Int<4>{}, i);
    else if (m == 2) f(Int<2>{}, i);
    else f(Int<1>{}, i);
    i += m;
  }
}

// The same from the last tile to the first.
template <class F> INLINE void tiles_back(int64_t rows, F&& f) {
  int64_t i = rows, rest = rows % MR;
  if (MR == 6 && rest == 2 && rows >= 8) {
    f(Int<4>{}, i -= 4);
    f(Int<4>{}, i -= 4);
  } else {
    if (rest & 1) f(Int<1>{}, i -= 1);
    if (rest & 2) f(Int<2>{}, i -= 2);
    if (rest & 4) f(Int<4>{}, i -= 4);
  }
  while (i) f(Int<MR>{}, i -= MR);
}

template <int M, class F> INLINE void each(F&& f) {
  unroll<M>([&](auto i) __attribute__((always_inline)) {
    unroll<NV>([&](auto j) __attribute__((always_inline)) { f(Int<decltype(i)::value>{}, Int<decltype(j)::value>{}); });
  });
}
#define EACH(M, body) each<M>([&](auto i, auto j) __attribute__((always_inline)) { body; })

template <int M> INLINE void clear(Tile<M>& c) { EACH(M, c.v[i][j] = V{}); }
template <int M> INLINE void get(Tile<M>& c, const float* p) { EACH(M, c.v[i][j] = load(p + i * NR + j * W)); }
template <int M> INLINE void put(float* p, const Tile<M>& c, int64_t ld = NR) { EACH(M, store(p + i * ld + j * W, c.v[i][j])); }
template <int M> INLINE void put(float* p, const Tile<M>& c, const float* scale) {
  EACH(M, store(p + i * NR + j * W, c.v[i][j] * splat(scale[i])));
}
template <int M> INLINE void put_past(float* p, const Tile<M>& c, int64_t ld, bool past) {  // past the caches, or not
  if (past) EACH(M, stream(p + i * ld + j * W, c.v[i][j]));
  else put(p, c, ld);
}
template <int M> INLINE void scale_rows(Tile<M>& c, const float* s) { EACH(M, c.v[i][j] *= splat(s[i])); }

// Memory that will be needed: its lines are asked for one by one in the middle of products. Asked for all at once they
// would wait for each other, and the products for them.
struct Fetch {
  struct Piece {  // rows of so many bytes, `step` apart
    const char* begin;
    int64_t bytes, step, rows;
  };
  static constexpr int MOST = 12;  // pieces that fetch_sweep adds
  Piece pieces[MOST], now = {};
  const char *at = nullptr, *end = nullptr;  // of a row
  int64_t count = 0, index = 0, lines = 0, share = 0;  // share: lines to ask for at a time
  // Into the first-level cache: on AMD's Zen 5 what is asked for into the second is often not there when it is read.
#if defined(__AVX512F__)
  const bool nearest = __builtin_cpu_is("amd");
#else
  static constexpr bool nearest = false;
#endif

  void clear() { now.rows = count = index = lines = share = 0, at = end = nullptr; }
  void add(const void* p, int64_t bytes, int64_t rows = 1, int64_t step = 0) {
    if (rows > 0) pieces[count++] = {(const char*)p, bytes, step, rows}, lines += (bytes + 63) / 64 * rows;
  }
  // Spread the lines over so many calls of next.
  void spread(int64_t calls) { share = (lines + calls - 1) / calls; }
  // The next row, if there is one.
  INLINE bool row() {
    if (!now.rows) {
      if (index == count) return false;
      now = pieces[index++];
    }
    at = now.begin, end = at + now.bytes;
    now.begin += now.step, --now.rows;
    return true;
  }
  INLINE void next() {
    for (int64_t n = share; n; --n, at += 64) {
      if (at >= end && !row()) return;
      if (nearest) __builtin_prefetch(at, 0, 3);
      else __builtin_prefetch(at, 0, 2);
    }
  }
};
struct NoFetch {
  INLINE void next() {}
};
constexpr int64_t FETCH = 8;  // steps of a product between two calls of next
constexpr int UNROLL = W == 16 ? 2 : FETCH;  // steps in a turn of the loop of a product
// Calls of next in a product of so many rows and steps.
inline int64_t calls_of(int64_t rows, int64_t depth) { return (rows + MR - 1) / MR * ((depth + FETCH - 1) / FETCH); }

// One step of a product: row i of c += a[i * si] * b, in the vectors J0 .. J1 - 1 of the tile.
template <int J0 = 0, int J1 = NV, int M> INLINE void mul_step(Tile<M>& c, const float* a, int64_t si, const float* b) {
  V y[NV];
  unroll<J1 - J0>([&](auto j) __attribute__((always_inline)) { y[J0 + j.value] = load(b + (J0 + j.value) * W); });
  unroll<M>([&](auto i) __attribute__((always_inline)) {
    V x = splat(a[i * si]);
    unroll<J1 - J0>([&](auto j) __attribute__((always_inline)) { c.v[i.value][J0 + j.value] += x * y[J0 + j.value]; });
  });
}

// c += a b:  a[i * si + n * sn] is the left operand, b the panel [depth][NR].
template <int J0 = 0, int J1 = NV, int M, class F = NoFetch>
INLINE void mul(Tile<M>& c, const float* a, int64_t si, int64_t sn, const float* b, int64_t depth, F&& fetch = {}) {
  Tile<M> t = c;
  const auto step = [&]() __attribute__((always_inline)) {
    mul_step<J0, J1>(t, a, si, b);
    a += sn;
    b += NR;
  };
  int64_t m = 0;
  for (; m + FETCH <= depth; m += FETCH) {
    fetch.next();
#pragma GCC unroll UNROLL
    for (int n = 0; n < FETCH; ++n) step();
  }
  if (m < depth) fetch.next();
  for (; m < depth; ++m) step();
  c = t;
}
template <int M, class F = NoFetch>
INLINE void mul_rows(Tile<M>& c, const float* a, int64_t ld, const float* b, int64_t depth, F&& fetch = {}) {
  mul(c, a, ld, 1, b, depth, fetch);
}
template <int M, class F = NoFetch>
INLINE void mul_columns(Tile<M>& c, const float* a, int64_t ld, const float* b, int64_t depth, F&& fetch = {}) {
  mul(c, a, 1, ld, b, depth, fetch);
}

// c += a[0] b[0] + a[1] b[1] + ...: one loop for products of the same depth, each too short for a loop of its own.
template <int N, int M>
INLINE void mul_sum(Tile<M>& c, const float* const (&a)[N], int64_t si, int64_t sn, const float* const (&b)[N],
                    int64_t depth) {
  Tile<M> t = c;
  for (int64_t n = 0; n < depth; ++n) {
    unroll<N>([&](auto l) __attribute__((always_inline)) {
      mul_step(t, a[l.value] + n * sn, si, b[l.value] + n * NR);
    });
  }
  c = t;
}

// c += a b where a is given by panels [rows][NR], `a_step` apart, and b has NR rows for each of them.
template <int J0 = 0, int J1 = NV, int M, class F = NoFetch>
INLINE void mul_panels(Tile<M>& c, const float* a, int64_t a_step, const float* b, int64_t count, F&& fetch = {}) {
  Tile<M> t = c;
  for (int64_t s = 0; s < count; ++s) {
    for (int64_t m = 0; m < NR; m += FETCH) {
      fetch.next();
#pragma GCC unroll UNROLL
      for (int64_t n = m; n < m + FETCH; ++n) {
        mul_step<J0, J1>(t, a + n, NR, b);
        b += NR;
      }
    }
    a += a_step;
  }
  c = t;
}

// The block of a triangular product on the diagonal. Entries above the diagonal are not read, so that a NaN of a
// later token cannot reach an earlier one.  STRICT: without the diagonal itself.
template <int STRICT, int M> INLINE void mul_lower(Tile<M>& c, const float* a, int64_t ld, const float* b) {
  unroll<M>([&](auto n) __attribute__((always_inline)) {
    V b0 = load(b + n * NR), b1 = load(b + n * NR + W);
    unroll<M - n.value - STRICT>([&](auto d) __attribute__((always_inline)) {
      constexpr int i = n.value + STRICT + d.value;
      V x = splat(a[i * ld + n.value]);
      c.v[i][0] += x * b0;
      c.v[i][1] += x * b1;
    });
  });
}
template <int STRICT, int M> INLINE void mul_lower_transposed(Tile<M>& c, const float* a, int64_t ld, const float* b) {
  unroll<M>([&](auto n) __attribute__((always_inline)) {
    V b0 = load(b + n * NR), b1 = load(b + n * NR + W);
    unroll<n.value + 1 - STRICT>([&](auto i) __attribute__((always_inline)) {
      V x = splat(a[n.value * ld + i.value]);
      c.v[i.value][0] += x * b0;
      c.v[i.value][1] += x * b1;
    });
  });
}

// Substitution inside a tile: x_i += sum over n < i of g[i, n] (a_n v_n - b_n x_n), without b_n x_n if not SOLVE.
template <bool SOLVE, int M>
INLINE void solve_lower(Tile<M>& x, const Tile<M>& v, const float* g, int64_t ld, const float* a, const float* b) {
  unroll<M>([&](auto n) __attribute__((always_inline)) {
    V u[NV];
    unroll<NV>([&](auto j) __attribute__((always_inline)) {
      u[j.value] = splat(a[n.value]) * v.v[n.value][j.value];
      if (SOLVE) u[j.value] -= splat(b[n.value]) * x.v[n.value][j.value];
    });
    unroll<M - n.value - 1>([&](auto d) __attribute__((always_inline)) {
      constexpr int i = n.value + 1 + d.value;
      V y = splat(g[i * ld + n.value]);
      x.v[i][0] += y * u[0];
      x.v[i][1] += y * u[1];
    });
  });
}
// The transposed system, from the last row to the first: x_i -= sum over n > i of g[n, i] rate_n x_n.
template <int M> INLINE void solve_lower_transposed(Tile<M>& x, const float* g, int64_t ld, const float* rate) {
  unroll<M>([&](auto m) __attribute__((always_inline)) {
    constexpr int n = M - 1 - m.value;
    V u0 = x.v[n][0] * splat(rate[n]), u1 = x.v[n][1] * splat(rate[n]);
    unroll<n>([&](auto i) __attribute__((always_inline)) {
      V y = splat(g[n * ld + i.value]);
      x.v[i.value][0] -= y * u0;
      x.v[i.value][1] -= y * u1;
    });
  });
}

// A tile of an input or output of type dtype, row stride `stride`, `columns` <= NR of them present; the rest is zero.
template <int M>
INLINE void get_input(Tile<M>& c, int dtype, const void* p, int64_t at, int64_t stride, int64_t columns) {
  if (dtype == F32 && columns >= NR) {
    const float* x = (const float*)p + at;
    EACH(M, c.v[i][j] = load(x + i * stride + j * W));
  } else if (dtype == BF16 && columns >= NR) {
    const uint16_t* x = (const uint16_t*)p + at;
    EACH(M, c.v[i][j] = load_bf16(x + i * stride + j * W));
  } else {
    float row[M][NR] = {};
    for (int i = 0; i < M; ++i) load_row(dtype, p, at + i * stride, row[i], least<int64_t>(columns, NR));
    EACH(M, c.v[i][j] = load(row[i] + j * W));
  }
}
template <int M>
INLINE void put_output(const Tile<M>& c, int dtype, void* p, int64_t at, int64_t stride, int64_t columns, bool past = false) {
  if (dtype == F32 && columns >= NR) {
    float* x = (float*)p + at;
    if (past) EACH(M, stream(x + i * stride + j * W, c.v[i][j]));
    else EACH(M, store(x + i * stride + j * W, c.v[i][j]));
  } else if (dtype == BF16 && columns >= NR) {
    uint16_t* x = (uint16_t*)p + at;
    if (past) unroll<M>([&](auto i) __attribute__((always_inline)) { stream_bf16(x + i * stride, c.v[i][0], c.v[i][1]); });
    else EACH(M, store_bf16(x + i * stride + j * W, c.v[i][j]));
  } else {
    float row[M][NR];
    EACH(M, store(row[i] + j * W, c.v[i][j]));
    for (int i = 0; i < M; ++i) store_row(dtype, p, at + i * stride, row[i], least<int64_t>(columns, NR));
  }
}

}  // namespace RLA_ISA
