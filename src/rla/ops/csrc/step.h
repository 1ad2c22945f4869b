// One token: states are updated in place and, lying by columns, [B, HV, V, K], pass through the core once. One loop updates a
// few columns and takes the products of k and q with those after the next; what those between need is computed meanwhile.
// It goes through four rows of memory side by side, two columns of S and R or four of S: with fewer their sums are too few
// to hide the latency of an FMA, and 4 x 2 sums, 4 updates, alpha, k and q leave one of 16 registers.
//
//     u = beta (v - [delta] alpha k S)                  S <- alpha S + k^T u
//     w = gamma (psi(v - k S) - [delta] alpha k R)      R <- alpha R + k^T w
//     q S_t = alpha (q S_{t-1}) + (q.k) u, and the same for R: one pass serves the output too.
#pragma once
#include "forward.h"

namespace RLA_ISA {

struct Token {
  float q[256], k[256], v[256], o[256];
  float alpha, beta, gamma, qk;
};

// Columns 0 .. N - 1 of S and, if FITTED, of R.
template <int N, bool FITTED> struct Columns {
  static constexpr int ROWS = FITTED ? 2 * N : N;  // of floats: the columns of S, then those of R
  float *S, *R;
  INLINE Columns ahead(int64_t by) const { return {S + by, FITTED ? R + by : nullptr}; }
  INLINE float* row(int i, int64_t K) const { return i < N ? S + i * K : R + (i - N) * K; }
};

// Of each row: its products with k and q, and what a token adds to it, times k.
template <int ROWS> struct Products {
  float k[ROWS], q[ROWS];
};
template <int ROWS> struct Update {
  float x[ROWS];
};

// If READ the products of k and q with columns x; if WRITE columns y <- alpha y + k add. alpha and K are passed by value: a
// store might change what is in memory. WHOLE: K is a multiple of W, and no code for the rest is in the way.
template <bool READ, bool WRITE, bool WHOLE, int N, bool FITTED, int ROWS = Columns<N, FITTED>::ROWS>
INLINE Products<ROWS> sweep_columns(const Token& t, int64_t K, Columns<N, FITTED> x, Columns<N, FITTED> y, float alpha,
                                    const Update<ROWS>& add) {
  V kM[ROWS], qM[ROWS], adds[ROWS];
  const V as = splat(alpha);
  unroll<ROWS>([&](auto i) __attribute__((always_inline)) { kM[i] = qM[i] = V{}, adds[i] = splat(add.x[i]); });
  // Floats d .. d + W - 1 of the rows; PART: up to K, then zeros. A loop over single floats might be rounded in one way if READ
  // alone and in another if WRITE, too.
  const auto part = [&](auto PART, int64_t d) __attribute__((always_inline)) {
    const V k = load(t.k + d), q = load(t.q + d);
    const auto get = [&](const float* p) __attribute__((always_inline)) {
      if constexpr (!PART.value) return load(p);
      V m = V{};
      memcpy(&m, p, (K - d) * 4);
      return m;
    };
    unroll<ROWS>([&](auto i) __attribute__((always_inline)) {
      if constexpr (READ) {
        const V m = get(x.row(i, K) + d);
        kM[i] += k * m;
        qM[i] += q * m;
      }
      if constexpr (WRITE) {
        const V m = as * get(y.row(i, K) + d) + k * adds[i];
        if constexpr (PART.value) memcpy(y.row(i, K) + d, &m, (K - d) * 4);
        else store(y.row(i, K) + d, m);
      }
    });
  };
  int64_t d = 0;
#pragma GCC unroll 2
  for (; d + W <= K; d += W) {
    for (int l = 0; READ && l < N * W; l += 16) {  // the next columns: a core cannot guess where such short rows go on
      __builtin_prefetch(x.S + N * (K + d) + l);
      if constexpr (FITTED) __builtin_prefetch(x.R + N * (K + d) + l);
    }
    part(Int<0>{}, d);
  }
  if (!WHOLE && d < K) part(Int<1>{}, d);
  Products<ROWS> sums;
  if constexpr (ROWS == 4) {
    sum4(kM[0], kM[1], kM[2], kM[3], sums.k);
    sum4(qM[0], qM[1], qM[2], qM[3], sums.q);
  } else {
    unroll<ROWS>([&](auto i) __attribute__((always_inline)) { sums.k[i] = sum(kM[i]), sums.q[i] = sum(qM[i]); });
  }
  return sums;
}

// Columns first .. end - 1, N at a time; returns the first of those that are left.
template <int N, bool WHOLE, bool FITTED>
inline int64_t run_columns(const Problem& p, Token& t, float* S, float* R, int64_t first, int64_t end) {
  constexpr int ROWS = Columns<N, FITTED>::ROWS;
  const int64_t K = p.K;
  const bool delta = p.delta, residual = p.residual, logcosh = p.a.loss == LOGCOSH;
  const float alpha = t.alpha, beta = t.beta, gamma = t.gamma, qk = t.qk, base = p.sum ? 1 : alpha, go = p.gated ? gamma : 1;
  const float clip = p.a.loss == HUBER ? (float)p.a.clip : INFINITY;  // psi, of one float
  if (first + N > end) return first;
  Columns<N, FITTED> y = Columns<N, FITTED>{S, R}.ahead(first * K);
  Products<ROWS> x = sweep_columns<true, false, WHOLE>(t, K, y, y, alpha, {}), next = x;
  if (first + 2 * N <= end) next = sweep_columns<true, false, WHOLE>(t, K, y.ahead(N * K), y, alpha, {});
  int64_t c = first;
  for (; c + N <= end; c += N, y = y.ahead(N * K)) {
    Update<ROWS> add;
    for (int i = 0; i < N; ++i) {
      const float v = t.v[c + i], e = v - x.k[i], u = beta * (delta ? v - alpha * x.k[i] : v);
      float o = base * x.q[i];
      add.x[i] = u;
      if (residual) {
        const float r = logcosh ? tanh(splat(e))[0] : e > clip ? clip : e < -clip ? -clip : e;
        if constexpr (FITTED) {
          const float w = gamma * (delta ? r - alpha * x.k[N + i] : r);
          add.x[N + i] = w;
          o += go * (alpha * x.q[N + i] + qk * w);
        } else {
          o += go * qk * r;
        }
      } else {
        o += qk * u;
      }
      t.o[c + i] = o;
    }
    x = next;
    if (c + 3 * N <= end) next = sweep_columns<true, true, WHOLE>(t, K, y.ahead(2 * N * K), y, alpha, add);
    else sweep_columns<false, true, WHOLE>(t, K, y, y, alpha, add);
  }
  return c;
}

// q or k of one token, normalised; zero up to a whole vector.
inline void load_key(const Problem& p, const void* source, int64_t at, float* x) {
  const int64_t K = p.K, end = (K + W - 1) / W * W;
  load_row(p.dtype, source, at, x, K);
  for (int64_t d = K; d < end; ++d) x[d] = 0;
  if (!p.a.qk_norm) return;
  V s = V{};
  for (int64_t d = 0; d < end; d += W) s += load(x + d) * load(x + d);
  float norm = sqrtf(sum(s)), scale = 1 / (norm < NORM_EPS ? NORM_EPS : norm);
  for (int64_t d = 0; d < end; d += W) store(x + d, load(x + d) * splat(scale));
}

// Asks for n elements of an input, which will be wanted soon.
INLINE void fetch(const Problem& p, const void* x, int64_t at, int64_t n) {
  const int64_t size = p.bytes();
  for (int64_t i = 0; i < n * size; i += 64) __builtin_prefetch((const char*)x + at * size + i);
}

// Columns first .. end - 1 of value head h of batch row b.
inline void step_columns(const Problem& p, int64_t b, int64_t h, int64_t first, int64_t end) {
  const Args& a = p.a;
  const Task task(p, b, h);
  Token t;
  load_key(p, a.q, task.row(a.q_stride, 0, task.kh), t.q);
  load_key(p, a.k, task.row(a.k_stride, 0, task.kh), t.k);
  load_row(p.dtype, a.v, task.row(a.v_stride, 0, h), t.v, p.V);
  if (h + 1 < a.HV) {
    const Task next(p, b, h + 1);
    fetch(p, a.q, next.row(a.q_stride, 0, next.kh), p.K);
    fetch(p, a.k, next.row(a.k_stride, 0, next.kh), p.K);
    fetch(p, a.v, next.row(a.v_stride, 0, h + 1), p.V);
  }
  V qk = V{};
  for (int64_t d = 0; d < p.K; d += W) qk += load(t.q + d) * load(t.k + d);
  t.qk = sum(qk);
  const int64_t gate = b * a.HV + h;
  t.alpha = a.log_alpha ? expf(a.log_alpha[gate]) : 1;
  t.beta = a.beta ? a.beta[gate] : 1;
  t.gamma = a.gamma ? a.gamma[gate] : 1;
  const int64_t at = gate * p.K * p.V;
  float *S = a.S + at, *R = p.fitted ? a.R + at : nullptr;
  const auto run = [&](auto whole, auto fitted) {
    constexpr bool WHOLE = whole.value, FITTED = fitted.value;
    const int64_t rest = run_columns<FITTED ? 2 : 4, WHOLE, FITTED>(p, t, S, R, first, end);
    run_columns<1, WHOLE, FITTED>(p, t, S, R, rest, end);
  };
  if (p.K % W == 0) p.fitted ? run(Int<1>{}, Int<1>{}) : run(Int<1>{}, Int<0>{});
  else p.fitted ? run(Int<0>{}, Int<1>{}) : run(Int<0>{}, Int<0>{});
  store_row(p.dtype, a.o, gate * p.V + first, t.o + first, end - first);
}

// Returns 1, with nothing done, if a log_alpha is positive: a step is too short to look at it from Python.
inline int64_t step(const Args& a) {
  Problem p(a);
  for (int64_t i = 0; a.log_alpha && i < a.B * a.HV; ++i)
    if (a.log_alpha[i] > 0) return 1;
  const int64_t heads = a.B * a.HV, width = (p.V + 63) / 64;  // columns are independent: any split gives the same bits
  int threads = (int)a.threads;
  if (heads * p.K * p.V * p.states() < 65536) threads = 1;
  const int64_t parts = heads < threads ? width : 1, units = heads * parts;
  threads = (int)least<int64_t>(threads, units);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < units; ++i) {
    FlushDenormals flush;
    const int64_t part = i % parts, first = part * 64;
    step_columns(p, i / parts / a.HV, i / parts % a.HV, first, part + 1 == parts ? p.V : first + 64);
  }
  return 0;
}

}  // namespace RLA_ISA
