// One token: states are updated in place and, lying by columns, [B, HV, V, K], pass through the core once: the products of
// the next column with k and q are taken while this one is updated.
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

// Of one column of S and, if FITTED, of R. K and the gates are passed by value: a store might change what is in memory.
template <bool FITTED> INLINE Products read_column(const Token& t, const float* S, const float* R, int64_t K) {
  V kS = V{}, qS = V{}, kR = V{}, qR = V{};
  int64_t d = 0;
#pragma GCC unroll 4
  for (; d + W <= K; d += W) {
    V k = load(t.k + d), q = load(t.q + d), s = load(S + d);
    kS += k * s;
    qS += q * s;
    if constexpr (FITTED) {
      V r = load(R + d);
      kR += k * r;
      qR += q * r;
    }
  }
  Products x;
  sum4(kS, qS, kR, qR, &x.kS);
  for (; d < K; ++d) {
    x.kS += t.k[d] * S[d], x.qS += t.q[d] * S[d];
    if constexpr (FITTED) x.kR += t.k[d] * R[d], x.qR += t.q[d] * R[d];
  }
  return x;
}

// S <- alpha S + k u, R <- alpha R + k w.
template <bool FITTED>
INLINE void write_column(const Token& t, float* S, float* R, float alpha, float u, float w, int64_t K) {
  const V as = splat(alpha), us = splat(u), ws = splat(w);
  int64_t d = 0;
#pragma GCC unroll 4
  for (; d + W <= K; d += W) {
    V k = load(t.k + d);
    store(S + d, as * load(S + d) + k * us);
    if constexpr (FITTED) store(R + d, as * load(R + d) + k * ws);
  }
  for (; d < K; ++d) {
    S[d] = alpha * S[d] + t.k[d] * u;
    if constexpr (FITTED) R[d] = alpha * R[d] + t.k[d] * w;
  }
}

// Columns first .. end - 1.
template <bool FITTED> inline void run_columns(const Problem& p, Token& t, float* S, float* R, int64_t first, int64_t end) {
  const int64_t K = p.K;
  const bool delta = p.delta, residual = p.residual;
  const float alpha = t.alpha, beta = t.beta, gamma = t.gamma, qk = t.qk;
  const float base = p.sum ? 1 : alpha, go = p.gated ? gamma : 1;
  S += first * K;
  if constexpr (FITTED) R += first * K;
  Products x = read_column<FITTED>(t, S, R, K), next = x;
  for (int64_t c = first; c < end; ++c, x = next, S += K, R += FITTED ? K : 0) {
    if (c + 1 < end) next = read_column<FITTED>(t, S + K, FITTED ? R + K : nullptr, K);
    const float v = t.v[c], u = beta * (delta ? v - alpha * x.kS : v);
    float r = 0, w = 0, o = base * x.qS;
    if (residual) r = psi(splat(v - x.kS), p)[0];
    else o += qk * u;
    if constexpr (FITTED) {
      w = gamma * (delta ? r - alpha * x.kR : r);
      o += go * (alpha * x.qR + qk * w);
    } else if (residual) {
      o += go * qk * r;
    }
    t.o[c] = o;
    write_column<FITTED>(t, S, R, alpha, u, w, K);
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

// Columns first .. end - 1 of value head h of batch row b.
inline void step_columns(const Problem& p, int64_t b, int64_t h, int64_t first, int64_t end) {
  const Args& a = p.a;
  const Task task(p, b, h);
  Token t;
  load_key(p, a.q, task.row(a.q_stride, 0, task.kh), t.q);
  load_key(p, a.k, task.row(a.k_stride, 0, task.kh), t.k);
  load_row(p.dtype, a.v, task.row(a.v_stride, 0, h), t.v, p.V);
  V qk = V{};
  for (int64_t d = 0; d < p.K; d += W) qk += load(t.q + d) * load(t.k + d);
  t.qk = sum(qk);
  const int64_t gate = b * a.HV + h;
  t.alpha = a.log_alpha ? expf(a.log_alpha[gate]) : 1;
  t.beta = a.beta ? a.beta[gate] : 1;
  t.gamma = a.gamma ? a.gamma[gate] : 1;
  float* S = a.S + gate * p.K * p.V;
  if (p.fitted) run_columns<true>(p, t, S, a.R + gate * p.K * p.V, first, end);
  else run_columns<false>(p, t, S, nullptr, first, end);
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
