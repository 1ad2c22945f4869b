// What a chunk of C tokens of one value head needs before its value columns are touched: normalised q and k, decays,
// and the C x C matrices of design notes:
//
//     D_ij = alpha_{j+1} .. alpha_i,   D'_ij = D_{i-1,j}
//     A = (q k^T) * D    G' = (k k^T) * D'    Au: what u meets in the output, A or (q k^T) * D'
//
// Decays are running products, never exponentials of differences, so alpha = 0 is exact.
#pragma once
#include <initializer_list>

#if defined(RLA_AMX)
#include "amx.h"
#else
#include "dots.h"
#endif
#include "scratch.h"
#include "tile.h"

namespace RLA_ISA {

#ifndef RLA_CHUNK
#define RLA_CHUNK 32
#endif
constexpr int C = RLA_CHUNK;
constexpr int64_t MOST_CHUNKS = 128 / C;  // of a segment

// A segment begins at the first token of a sequence and where states are saved for backward: at token m * every, for all m but those
// with m % skip = skip - 1, so that one in skip - 1 segments is twice as long as the others. skip = 0: for all m.
struct Segments {
  int64_t every, skip;
  int64_t count(int64_t length) const {
    const int64_t m = (length - 1) / every;
    return length <= 0 ? 0 : 1 + m - (skip ? (m + 1) / skip : 0);
  }
  int64_t begin(int64_t s) const { return every * (skip ? s / (skip - 1) * skip + s % (skip - 1) : s); }
  // The segment that begins at token t, or -1.
  int64_t at(int64_t t) const {
    const int64_t m = t / every;
    return t % every || (skip && m % skip == skip - 1) ? -1 : m - (skip ? m / skip : 0);
  }
  // Tokens of so many segments in a row, at most.
  int64_t most_tokens(int64_t n) const { return every * (n + (skip ? (n + skip - 2) / (skip - 1) : 0)); }
  int64_t most_chunks() const { return most_tokens(1) / C; }
};
constexpr int CP = C / NR;    // panels of a chunk's tokens
static_assert(C % NR == 0, "a chunk is made of whole panels");
static_assert(!HALVES || C == 32, "products of bfloat16 operands have 32 rows");

constexpr float NORM_EPS = 1e-6f;
constexpr int64_t PAST = 4 << 20;  // bytes of the output, the gradients or what is saved above which they are written past the caches

// Heads that threads take, several together, a part of each in turn: a row of the inputs is on the same page of memory as those of
// the next heads, and to look up a page anew for each row of each head costs up to a sixth of the time. Towards the end they take
// fewer, so that none waits long for another.
struct Queue {
  int64_t heads, count;  // of a sequence, of all
  int64_t most;          // to be taken together
  int threads;
  int64_t next = 0;

  // size: floats of a head's states. Those of the heads taken together have to stay in a cache.
  Queue(int64_t heads_, int64_t count_, int64_t size, int threads_) : heads(heads_), count(count_), threads(threads_) {
    constexpr int64_t MOST = 4, CACHE = (W == 16 ? 512 : 256) << 8;  // floats
    most = size * MOST <= CACHE ? MOST : size * 2 <= CACHE ? 2 : 1;
  }
  // How many heads, and the first of them; 0 when there are none left.
  int64_t take(int64_t& first) {
    first = __atomic_load_n(&next, __ATOMIC_RELAXED);
    while (first < count) {
      int64_t n = least(least(most, heads - first % heads), 2 * (count - first) / (3 * threads));
      if (n < 1) n = 1;
      if (__atomic_compare_exchange_n(&next, &first, first + n, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return n;
    }
    return 0;
  }
};

// Shapes and switches of a call.
struct Problem {
  const Args& a;
  int64_t K, V, strips, ldk;  // strips: panels of value columns
  bool delta, residual, fitted, gated, sum;
  int dtype;
  int64_t state;  // floats of one state in panels
  bool kept;      // predictions are kept by forward for backward: not of half precision, where they would be larger than q
  int64_t pairs;  // matrices of pairs that it keeps
  int64_t blocks;  // of K, in bfloat16 operands
  Segments segments;
  int64_t panel;   // floats of a panel of a running state; its right operand may follow it
  bool past;       // o, or dq, dk and dv, are too large to stay in the caches and are written past them: nothing is read to be overwritten
  bool past_saved;  // and so is what forward saves

  explicit Problem(const Args& a_) : a(a_), K(a_.K), V(a_.V) {
    strips = (V + NR - 1) / NR;
    ldk = (K + NR - 1) / NR * NR;
    if (ldk % 32 == 0) ldk += NR < 32 ? NR : 32;  // rows a power of two apart would share cache sets
    delta = a.delta;
    residual = a.correction != NONE;
    fitted = a.correction == FITTED;
    gated = residual && a.gate_output;
    sum = residual && !a.gate_output;
    dtype = (int)a.dtype;
    state = strips * K * NR;
    segments = {a.every, a.skip};
    kept = dtype == F32 && (delta || residual);
    pairs = dtype != F32 ? 0 : 1 + sum + (delta || residual);
    blocks = (K + DEPTH - 1) / DEPTH;
    panel = K * NR + (HALVES ? blocks * RIGHT / 2 : 0);
    const bool aligned = ((size_t)a.o | (size_t)a.dq | (size_t)a.dk | (size_t)a.dv) % (4 * W) == 0;
    const bool whole = dtype == F32 ? K % W == 0 && V % W == 0 : HALVES && V % NR == 0;  // of half precision the output alone
    past = whole && aligned && tokens() * ((a.dq ? 2 * a.H * K : 0) + a.HV * V) * bytes() > PAST;
    past_saved = ((size_t)a.saved | (size_t)a.pS | (size_t)a.pR) % (4 * W) == 0 && V % W == 0 && saved() * 4 > PAST;
  }
  int64_t states() const { return fitted ? 2 : 1; }
  int64_t tokens() const { return a.B * a.T; }
  int64_t pair_floats() const { return a.HV * tokens() * pairs * C; }
  int64_t saved() const {  // floats
    const int64_t slots = a.N != a.B ? a.T / a.every : a.B * (segments.count(a.T) - 1);
    return pair_floats() + slots * a.HV * states() * state;
  }
  int64_t columns(int64_t first, int64_t count) const { return least(V, (first + count) * NR) - first * NR; }  // of panels
  int64_t bytes() const { return dtype == F32 ? 4 : 2; }
};

// A sequence of one value head.
struct Task {
  int64_t n, b, h, kh, start, length, segments;  // sequence, batch row, value head, key head, first token, tokens, segments
  Task(const Problem& p, int64_t n_, int64_t h_) : n(n_), h(h_) {
    const Args& a = p.a;
    kh = h / (a.HV / a.H);
    b = a.cu_seqlens ? 0 : n;
    start = a.cu_seqlens ? a.cu_seqlens[n] : 0;
    length = a.cu_seqlens ? a.cu_seqlens[n + 1] - start : a.T;
    segments = p.segments.count(length);
  }
  int64_t end(const Problem& p, int64_t s) const { return s + 1 < segments ? p.segments.begin(s + 1) : length; }  // of segment s
  int64_t chunks() const { return (length + C - 1) / C; }
  int group(int64_t t) const { return t + C < length ? GROUP : 1; }  // chunks of the group that begins at t
  int64_t row(const int64_t* stride, int64_t t, int64_t head) const {
    return b * stride[0] + (start + t) * stride[1] + head * stride[2];
  }
  int64_t gate(const Problem& p, int64_t t) const { return (b * p.a.T + start + t) * p.a.HV + h; }
  // What forward saves: matrices of pairs, and states.
  // Rows of matrix n of pairs, from token t on.
  float* pairs(const Problem& p, int64_t n, int64_t t) const {
    return p.a.saved + ((h * p.pairs + n) * p.tokens() + b * p.a.T + start + t) * C;
  }
  // Where forward saves the states of segment s >= 1. Packed sequences, of which none skips, cannot collide: one with l tokens has
  // (l - 1) / every of them.
  float* saved(const Problem& p, int64_t s) const {
    const int64_t base = p.a.N != p.a.B ? start / p.a.every : b * (segments - 1);
    return p.a.saved + p.pair_floats() + ((base + s - 1) * p.a.HV + h) * p.states() * p.state;
  }
};

struct Chunk {
  int64_t t, c;  // first token, tokens
  float *q, *k, *qT, *kT;               // [C, ldk], transposed panels [CP][K][NR]
  bool turned;                          // kT serves absorb, as it is there for all of C tokens: one stream, where rows of k are many
  uint16_t *q16, *k16, *k16T, *k16L;    // of bfloat16 instead, before the norm: left operands, k^T as a right and a left one,
                                        // whose blocks are GROUP * LEFT apart, between those of the group's other chunks
  const Chunk* before;                  // in the group, if there is one
  float fade;                           // what it leaves of the state at the beginning of the group; 1 if there is none, or nothing is left
  uint16_t *qx, *kx;                    // left operands: the products of q and k with its keys
  float *sq, *sk;                       // iq and ik times fade
  float *qk, *kk;                       // and their products q k^T, k k^T [C, C]
  float *D, *A, *Ag, *Au, *Gp;          // [C, C]; Ag = go * A. A, Au, Gp may be those that forward keeps (Task::pairs)
  float *E, *Ep, *L;                    // exp(b), exp(b'), exp(b_C - b), zero beyond c
  float *alpha, *beta, *gamma, *go, *eu;  // go: gamma or 1 in the output; eu: E or E'
  float *ab, *ag;                       // alpha beta, alpha gamma
  float *iq, *ik;                       // 1 / norms
  float decay;                          // exp(b_C)

  void carve(Arena& m, const Problem& p, bool backward, const Chunk* before_ = nullptr) {
    carve_own(m, p, backward, before_);
    carve_common(m, p);
  }
  // What each thread that reads the chunk has for itself, and what only serves to prepare it.
  void carve_own(Arena& m, const Problem& p, bool backward, const Chunk* before_ = nullptr) {
    before = before_;
    kT = HALVES ? nullptr : m.floats(C * p.K);
    qT = backward ? m.floats(C * p.K) : nullptr;
    D = m.floats(C * C);
    for (float** x : {&qk, &kk}) *x = m.floats(HALVES ? C * C : 0);
    if (HALVES) {
      for (uint16_t** x : {&q16, &k16, &k16T}) *x = m.halves(p.blocks * LEFT);
      k16L = before ? before->k16L + LEFT : m.halves(p.blocks * GROUP * LEFT);
    } else {
      q = m.floats(C * p.ldk);
      k = m.floats(C * p.ldk);
    }
    Ag = p.fitted ? m.floats(C * C) : nullptr;
  }
  // What threads that split the value columns of a head may have in common.
  void carve_common(Arena& m, const Problem& p) {
    if (HALVES)
      for (uint16_t** x : {&qx, &kx}) *x = m.halves(before ? LEFT : 0);
    A = m.floats(C * C);
    Au = p.sum ? m.floats(C * C) : A;
    Gp = p.delta || p.residual ? m.floats(C * C) : nullptr;
    for (float** x : {&E, &Ep, &L, &alpha, &beta, &gamma, &go, &eu, &ab, &ag, &iq, &ik, &sq, &sk}) *x = m.floats(C);
  }
};

// Rows of `tokens` tokens from t on, far apart in memory, which the hardware does not foresee.
inline void fetch_rows(Fetch& f, const Problem& p, const Task& task, const void* x, const int64_t* stride, int64_t head,
                       int64_t width, int64_t t, int64_t tokens) {
  f.add((const char*)x + task.row(stride, t, head) * p.bytes(), width * p.bytes(), least(tokens, task.length - t),
        stride[1] * p.bytes());
}
inline void fetch_keys(Fetch& f, const Problem& p, const Task& task, int64_t t, int64_t tokens) {
  fetch_rows(f, p, task, p.a.q, p.a.q_stride, task.kh, p.K, t, tokens);
  fetch_rows(f, p, task, p.a.k, p.a.k_stride, task.kh, p.K, t, tokens);
}
// Rows of a tensor of value columns, in `count` panels from `first` on.
inline void fetch_columns(Fetch& f, const Problem& p, const Task& task, const void* x, const int64_t* stride, int64_t t, int64_t first,
                          int64_t count, int64_t tokens) {
  fetch_rows(f, p, task, (const char*)x + first * NR * p.bytes(), stride, task.h, p.columns(first, count), t, tokens);
}

// Gates of `heads` heads from task.h on, which lie side by side.
inline void fetch_gates(Fetch& f, const Problem& p, const Task& task, int64_t t, int64_t heads, int64_t tokens) {
  constexpr int64_t LINE = 64;
  const int64_t row = p.a.HV * 4;
  tokens = least(tokens, task.length - t);
  for (const float* x : {p.a.log_alpha, p.a.beta, p.a.gamma}) {
    if (!x || tokens <= 0) continue;
    if (row < LINE) f.add(x + task.gate(p, t), tokens * row);
    else f.add(x + task.gate(p, t), heads * 4, tokens, row);
  }
}

// x[i] = row i of q or k, normalised; inverse[i] = 1 / max(norm, eps), with a minus sign where eps was larger. KNOWN: it is there.
template <bool KNOWN>
inline void load_keys(const Problem& p, const Task& task, const Chunk& ch, const void* source, const int64_t* stride,
                      float* x, float* inverse) {
  const bool whole = p.dtype == F32 && p.K % W == 0;  // rows that can be read where they are
  constexpr int N = 4;  // rows at a time: one would wait for its own sums, and of many the first are out of the cache again
  for (int64_t i0 = 0; i0 < ch.c; i0 += N) {
    float squares[N], scale[N], *row[N];
    const float* from[N];
    for (int64_t i = 0; i < N; ++i) {
      const int64_t n = least(i0 + i, ch.c - 1), at = task.row(stride, ch.t + n, task.kh);  // the last row again where there is none
      row[i] = x + n * p.ldk;
      from[i] = whole ? (const float*)source + at : row[i];
      if (whole) continue;
      load_row(p.dtype, source, at, row[i], p.K);
      for (int64_t d = p.K; d < p.ldk; ++d) row[i][d] = 0;
    }
    if constexpr (!KNOWN) {
      V s[N] = {};
      for (int64_t d = 0; d < p.K; d += W)
        unroll<N>([&](auto i) __attribute__((always_inline)) { s[i.value] += load(from[i.value] + d) * load(from[i.value] + d); });
      sum4(s[0], s[1], s[2], s[3], squares);
    }
    for (int64_t i = 0; i < N; ++i) {
      float inv = inverse[i0 + i];
      if constexpr (!KNOWN) {
        const float norm = sqrtf(squares[i]);
        inverse[i0 + i] = inv = norm < NORM_EPS ? -1 / NORM_EPS : 1 / norm;
      }
      scale[i] = p.a.qk_norm ? fabsf(inv) : 1;
    }
    for (int64_t i = 0; i < least<int64_t>(N, ch.c - i0); ++i) {
      for (int64_t d = 0; d < p.K; d += W) store(row[i] + d, load(from[i] + d) * splat(scale[i]));
      // exact, so that its gradient is exactly zero
      if (p.K == 1 && p.a.qk_norm && inverse[i0 + i] > 0) row[i][0] = row[i][0] < 0 ? -1 : 1;
    }
  }
}

// The left operand of q or k and 1 / max(norm, eps); tokens beyond c are zero.
inline void load_operand(const Problem& p, const Task& task, const Chunk& ch, const void* source, const int64_t* stride,
                         uint16_t* x, float* inverse) {
  float squares[C];
  for (int64_t i0 = 0; i0 < C; i0 += 4) {
    V s[4];
    unroll<4>([&](auto n) __attribute__((always_inline)) {
      const int64_t i = i0 + n.value;
      const uint16_t* row = (const uint16_t*)source + task.row(stride, ch.t + least(i, ch.c - 1), task.kh);
      s[n.value] = put_row(x, i, row, i < ch.c ? p.K : 0, p.blocks);
    });
    sum4(s[0], s[1], s[2], s[3], squares + i0);
  }
  for (int64_t i = 0; i < C; ++i) {
    const float norm = sqrtf(squares[i]);
    inverse[i] = i >= ch.c ? 0 : !p.a.qk_norm ? 1 : 1 / (norm < NORM_EPS ? NORM_EPS : norm);
  }
}

// What q and k give with the keys of the chunk.
inline void multiply_operands(const Problem& p, const Chunk& ch) {
  transpose_right(ch.k16, ch.k16T, p.blocks);
  for (int64_t s = 0; s < CP; ++s) {
    const uint16_t* b = ch.k16T + s * p.blocks * RIGHT;
    multiply(ch.qk + s * NR, C, {ch.q16, b, p.blocks});
    if (p.delta || p.residual) multiply(ch.kk + s * NR, C, {ch.k16, b, p.blocks});
  }
}

// Below this share a state counts as gone after a chunk. Its reciprocal leaves room for large inputs.
constexpr float GONE = 1e-15f;

// What q and k give with the keys of the chunk before, as left operands.
inline void load_products(const Problem& p, const Chunk& ch) {
  alignas(64) float x[C * C];
  auto times_keys = [&](const uint16_t* rows, uint16_t* to) {
    for (int64_t s = 0; s < CP; ++s) multiply(x + s * NR, C, {rows, ch.before->k16T + s * p.blocks * RIGHT, p.blocks});
    for (int64_t i = 0; i < C * C; i += W) store_bf16(to + i, load(x + i));
  };
  times_keys(ch.q16, ch.qx);
  if (p.delta || p.residual) times_keys(ch.k16, ch.kx);
}

// to[CP][K][NR] = the transpose of x, tokens beyond c zero.
inline void transpose_keys(const Problem& p, const Chunk& ch, const float* x, float* to) {
  for (int64_t s = 0; s * NR < ch.c; ++s) {
    int64_t n = least<int64_t>(NR, ch.c - s * NR);
    if (n < NR) memset(to + s * p.K * NR, 0, p.K * NR * 4);
    transpose(x + s * NR * p.ldk, p.ldk, to + s * p.K * NR, NR, n, p.K);
  }
}

inline void load_gates(const Problem& p, const Task& task, const Chunk& ch) {
  const int64_t at = task.gate(p, ch.t), HV = p.a.HV;
  auto gather = [&](const float* x, float absent, float beyond, float* to) {
    for (int64_t i = 0; i < C; ++i) to[i] = i >= ch.c ? beyond : x ? x[at + i * HV] : absent;
  };
  gather(p.a.log_alpha, 0, -INFINITY, ch.alpha);
  gather(p.a.beta, 1, 0, ch.beta);
  gather(p.a.gamma, 1, 0, ch.gamma);
  for (int64_t i = 0; i < C; i += W) {
    const V x = load(ch.alpha + i), alpha = select(x < -87.f, V{}, exp(select(x < -87.f, V{}, x)));  // a NaN passes
    store(ch.alpha + i, alpha);
    store(ch.ab + i, alpha * load(ch.beta + i));
    store(ch.ag + i, alpha * load(ch.gamma + i));
  }
  V row[C / W] = {}, lane[C / W];  // a row of D, and the numbers of its columns
  for (int64_t j = 0; j < C; ++j) lane[j / W][j % W] = (float)j;
  float e = 1;
  for (int64_t i = 0; i < C; ++i) {
    const float last = e, alpha = ch.alpha[i];
    e *= alpha;
    ch.E[i] = e;
    ch.Ep[i] = i < ch.c ? last : 0;
    ch.go[i] = p.gated ? ch.gamma[i] : i < ch.c;
    ch.eu[i] = p.sum ? ch.Ep[i] : e;
    unroll<C / W>([&](auto j) __attribute__((always_inline)) {
      V& x = row[j.value];
      x = select(lane[j.value] == splat((float)i), splat(1), splat(alpha) * x);
      store(ch.D + i * C + j.value * W, x);
      if (i + 1 == ch.c) store(ch.L + j.value * W, x);
    });
  }
}

// Whether the second half of panel s is above the diagonal in rows i0 .. i0 + M - 1 of a matrix of the chunk's tokens.
template <int M> INLINE bool above_diagonal(int64_t i0, int64_t s) { return i0 + M <= s * NR + W; }

// x = rows i0 .. of q or k times the keys of panel s, as far as they are not above the diagonal. With bfloat16 operands `ready`
// holds the product without the norms.
template <int M>
INLINE void times_keys(Tile<M>& x, const Problem& p, const Chunk& ch, const float* rows, const float* ready,
                       const float* inverse, int64_t i0, int64_t s) {
  if constexpr (HALVES) {
    ready += i0 * C + s * NR;
    EACH(M, x.v[i][j] = load(ready + i * C + j * W) * splat(inverse[i0 + i]) * load(ch.ik + s * NR + j * W));
  } else {
    clear(x);
    const float *a = rows + i0 * p.ldk, *b = ch.kT + s * p.K * NR;
    if (above_diagonal<M>(i0, s)) mul<0, 1>(x, a, p.ldk, 1, b, p.K);
    else mul(x, a, p.ldk, 1, b, p.K);
  }
}

// The matrices of pairs, and the same where forward keeps them. What is above the diagonal is zero, though nobody reads it: what
// forward keeps is an output of the operator, the same in every call.
inline void make_pairs(const Problem& p, const Task& task, const Chunk& ch, bool keep) {
  const bool keys = p.delta || p.residual;
  tiles(ch.c, [&](auto m, int64_t i0) {
    constexpr int M = decltype(m)::value;
    for (int64_t s = 0; s < CP; ++s) {
      const bool above = s * NR >= i0 + M;
      const int64_t at = i0 * C + s * NR;
      const float *D = ch.D + at, *Dp = D - C;  // D' is D one row up, its row 0 is zero
      Tile<M> x;
      auto put_pairs = [&](int64_t n, float* to, const float* decays, bool first) __attribute__((always_inline)) {
        Tile<M> y;
        EACH(M, y.v[i][j] = first || i0 + i ? x.v[i][j] * load(decays + i * C + j * W) : V{});
        put(to + at, y, C);
        if (keep) put_past(task.pairs(p, n, ch.t) + at, y, C, p.past_saved);
      };
      clear(x);
      if (!above) times_keys(x, p, ch, ch.q, ch.qk, ch.iq, i0, s);
      put_pairs(0, ch.A, D, true);
      if (p.sum) put_pairs(1, ch.Au, Dp, false);
      if (!keys) continue;
      if (!above) times_keys(x, p, ch, ch.k, ch.kk, ch.ik, i0, s);
      put_pairs(p.pairs - 1, ch.Gp, Dp, false);
    }
  });
}

// What each thread that reads a chunk has for itself. KNOWN: the chunk is prepared, and with it what threads have in common.
template <bool KNOWN> inline void load_rows(const Problem& p, const Task& task, const Chunk& ch) {
  if constexpr (HALVES) {
    float inverse[C];
    load_operand(p, task, ch, p.a.q, p.a.q_stride, ch.q16, KNOWN ? inverse : ch.iq);
    load_operand(p, task, ch, p.a.k, p.a.k_stride, ch.k16, KNOWN ? inverse : ch.ik);
    transpose_left(ch.k16, ch.k16L, p.blocks, GROUP * LEFT);
  } else {
    load_keys<KNOWN>(p, task, ch, p.a.q, p.a.q_stride, ch.q, ch.iq);
    load_keys<KNOWN>(p, task, ch, p.a.k, p.a.k_stride, ch.k, ch.ik);
  }
}
inline void gate_pairs(const Problem& p, const Chunk& ch) {
  for (int64_t i = 0; p.fitted && i < ch.c; ++i)
    for (int64_t j = 0; j <= i; j += W) store(ch.Ag + i * C + j, load(ch.A + i * C + j) * splat(ch.go[i]));
}
inline void set_tokens(const Task& task, Chunk& ch, int64_t t) {
  ch.t = t;
  ch.c = least<int64_t>(C, task.length - t);
}
inline void set_decay(Chunk& ch) {
  ch.decay = ch.E[ch.c - 1];
  ch.fade = ch.before && ch.before->decay >= GONE ? ch.before->decay : 1;
}

// keep: forward keeps the matrices of pairs; in backward it has.
inline void prepare(const Problem& p, const Task& task, Chunk& ch, int64_t t, bool backward, bool keep) {
  set_tokens(task, ch, t);
  load_gates(p, task, ch);
  set_decay(ch);
  load_rows<false>(p, task, ch);
  if constexpr (HALVES) {
    multiply_operands(p, ch);
    if (ch.before) load_products(p, ch);
    for (int64_t i = 0; i < C; ++i) ch.sq[i] = ch.iq[i] * ch.fade, ch.sk[i] = ch.ik[i] * ch.fade;
  } else if (!backward || !p.pairs) {
    transpose_keys(p, ch, ch.k, ch.kT);
  }
  ch.turned = !HALVES && (!backward || !p.pairs) && ch.c == C;
  if (backward) transpose_keys(p, ch, ch.q, ch.qT);
  if (backward && p.pairs) {
    ch.A = task.pairs(p, 0, t);
    ch.Au = task.pairs(p, p.sum, t);
    ch.Gp = task.pairs(p, p.pairs - 1, t);
  } else {
    make_pairs(p, task, ch, keep && p.pairs);
  }
  gate_pairs(p, ch);
}

// The chunks of a group that begins at t, in forward.
inline void prepare_group(const Problem& p, const Task& task, Chunk* group, int64_t t, bool keep) {
  for (int i = 0; i < task.group(t); ++i) prepare(p, task, group[i], t + i * C, false, keep);
}
// The same where another thread may have prepared what is common.
inline void join_group(const Problem& p, const Task& task, Chunk* group, int64_t t) {
  for (int i = 0; i < task.group(t); ++i) {
    Chunk& ch = group[i];
    set_tokens(task, ch, t + i * C);
    set_decay(ch);
    load_rows<true>(p, task, ch);
    gate_pairs(p, ch);
    ch.turned = false;
  }
}

// A state of the caller, by columns [V, K], to and from one panel of columns.
inline void pack_state(const Problem& p, const float* x, float* panel, int64_t s) {
  int64_t n = x ? least<int64_t>(NR, p.V - s * NR) : 0;
  if (n < NR) memset(panel, 0, p.K * NR * 4);
  if (n) transpose(x + s * NR * p.K, p.K, panel, NR, n, p.K);
}
inline void unpack_state(const Problem& p, const float* panel, float* x, int64_t s) {
  transpose(panel, NR, x + s * NR * p.K, p.K, p.K, least<int64_t>(NR, p.V - s * NR));
}

}  // namespace RLA_ISA
