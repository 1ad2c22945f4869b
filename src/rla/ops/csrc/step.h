// One token: states are updated in place and, lying by columns, [B, HV, V, K], pass through the core once. One loop updates a
// column and takes the products of k and q with the second next one; what the column between them needs is computed meanwhile.
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

struct Products {
  float kS, qS, kR, qR;
};

// What a token adds to a column, times k.
struct Update {
  float u, w;
};

// A column of S and, if FITTED, of R.
template <bool FITTED> struct Column {
  float *S, *R;
  INLINE Column ahead(int64_t by) const { return {S + by, FITTED ? R + by : nullptr}; }
};

// If READ the products of k and q with column x; if WRITE column y <- alpha y + k (u, w). alpha and K are passed by value: a
// store might change what is in memory. WHOLE: K is a multiple of W, and no code for the rest is in the way.
template <bool READ, bool WRITE, bool WHOLE, bool FITTED>
INLINE Products sweep_columns(const Token& t, int64_t K, Column<FITTED> x, Column<FITTED> y, float alpha, Update g) {
  V kS = V{}, qS = V{}, kR = V{}, qR = V{};
  const V as = splat(alpha), us = splat(g.u), ws = splat(g.w);
  int64_t d = 0;
#pragma GCC unroll 4
  for (; d + W <= K; d += W) {
    const V k = load(t.k + d), q = load(t.q + d);
    const auto state = [&](V& kM, V& qM, const float* from, float* to, V add) __attribute__((always_inline)) {
      if constexpr (READ) {
        const V m = load(from + d);
        kM += k * m;
        qM += q * m;
      }
      if constexpr (WRITE) store(to + d, as * load(to + d) + k * add);
    };
    state(kS, qS, x.S, y.S, us);
    if constexpr (FITTED) state(kR, qR, x.R, y.R, ws);
  }
  Products sums;
  sum4(kS, qS, kR, qR, &sums.kS);
  for (; !WHOLE && d < K; ++d) {
    const auto state = [&](float& kM, float& qM, const float* from, float* to, float add) __attribute__((always_inline)) {
      if constexpr (READ) kM += t.k[d] * from[d], qM += t.q[d] * from[d];
      if constexpr (WRITE) to[d] = alpha * to[d] + t.k[d] * add;
    };
    state(sums.kS, sums.qS, x.S, y.S, g.u);
    if constexpr (FITTED) state(sums.kR, sums.qR, x.R, y.R, g.w);
  }
  return sums;
}

// Columns first .. end - 1.
template <bool WHOLE, bool FITTED>
inline void run_columns(const Problem& p, Token& t, Column<FITTED> y, int64_t first, int64_t end) {
  const int64_t K = p.K;
  const bool delta = p.delta, residual = p.residual, logcosh = p.a.loss == LOGCOSH;
  const float alpha = t.alpha, beta = t.beta, gamma = t.gamma, qk = t.qk, base = p.sum ? 1 : alpha, go = p.gated ? gamma : 1;
  const float clip = p.a.loss == HUBER ? (float)p.a.clip : INFINITY;  // psi, of one float
  y = y.ahead(first * K);
  Products x = sweep_columns<true, false, WHOLE>(t, K, y, y, alpha, {}), next = x;
  if (first + 1 < end) next = sweep_columns<true, false, WHOLE>(t, K, y.ahead(K), y, alpha, {});
  for (int64_t c = first; c < end; ++c, y = y.ahead(K)) {
    const float v = t.v[c], e = v - x.kS;
    Update g = {beta * (delta ? v - alpha * x.kS : v), 0};
    float o = base * x.qS;
    if (residual) {
      const float r = logcosh ? tanh(splat(e))[0] : e > clip ? clip : e < -clip ? -clip : e;
      if constexpr (FITTED) {
        g.w = gamma * (delta ? r - alpha * x.kR : r);
        o += go * (alpha * x.qR + qk * g.w);
      } else {
        o += go * qk * r;
      }
    } else {
      o += qk * g.u;
    }
    t.o[c] = o;
    x = next;
    if (c + 2 < end) next = sweep_columns<true, true, WHOLE>(t, K, y.ahead(2 * K), y, alpha, g);
    else sweep_columns<false, true, WHOLE>(t, K, y, y, alpha, g);
  }
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
  const auto run = [&](auto y) {
    if (p.K % W == 0) run_columns<true>(p, t, y, first, end);
    else run_columns<false>(p, t, y, first, end);
  };
  if (p.fitted) run(Column<true>{a.S + at, a.R + at});
  else run(Column<false>{a.S + at, nullptr});
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
