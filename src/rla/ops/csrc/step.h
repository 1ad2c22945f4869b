// One token: states in the caller's layout [B, HV, K, V], updated in place. Bound by memory: a state is read row by
// row, then updated from the second-level cache while the next one is fetched. (Blocks of columns that would stay in
// the first level do not: rows a power of two apart share its sets.)
//
//     u = beta (v - [delta] alpha k S)                  S <- alpha S + k^T u
//     w = gamma (psi(v - k S) - [delta] alpha k R)      R <- alpha R + k^T w
//     q S_t = alpha (q S_{t-1}) + (q.k) u, and the same for R: one pass serves the output too.
#pragma once
#include "forward.h"

namespace RLA_ISA {

struct Token {
  float q[256], k[256], v[256], o[256];
  float kM[256], qM[256], u[256], r[256];  // of the state in hand
  float alpha, beta, gamma, qk;
};

// kM = k M, qM = q M for the columns from..end, whole vectors of them. ROWS rows share a pass over the sums.
template <int ROWS> INLINE void read_rows(const Problem& p, Token& t, const float* M, int64_t d, int64_t from, int64_t end) {
  V k[ROWS], q[ROWS];
  unroll<ROWS>([&](auto i) __attribute__((always_inline)) { k[i] = splat(t.k[d + i]), q[i] = splat(t.q[d + i]); });
  for (int64_t c = from; c < end; c += W) {
    V x = load(t.kM + c), y = load(t.qM + c);
    unroll<ROWS>([&](auto i) __attribute__((always_inline)) {
      V m = load(M + (d + i) * p.V + c);
      x += k[i] * m;
      y += q[i] * m;
    });
    store(t.kM + c, x);
    store(t.qM + c, y);
  }
}
inline void read_state(const Problem& p, Token& t, const float* M, int64_t from, int64_t end) {
  memset(t.kM + from, 0, (end - from) * 4);
  memset(t.qM + from, 0, (end - from) * 4);
  int64_t d = 0;
  for (; d + 4 <= p.K; d += 4) {
    for (int64_t i = d + 8; i < least<int64_t>(d + 12, p.K); ++i)
      for (int64_t c = from; c < end; c += 16) __builtin_prefetch(M + i * p.V + c);
    read_rows<4>(p, t, M, d, from, end);
  }
  for (; d < p.K; ++d) read_rows<1>(p, t, M, d, from, end);
}

// M <- alpha M + k^T u, from the last row, which is still in the first-level cache, to the first; `next` is a state to
// fetch meanwhile, or null.
inline void write_state(const Problem& p, const Token& t, float* M, int64_t from, int64_t end, const float* next) {
  const V alpha = splat(t.alpha);
  for (int64_t d = p.K - 1; d >= 0; --d) {
    const V k = splat(t.k[d]);
    float* row = M + d * p.V;
    if (next)
      for (int64_t c = from; c < end; c += 16) __builtin_prefetch(next + (p.K - 1 - d) * p.V + c, 1, 2);
    for (int64_t c = from; c < end; c += W) store(row + c, alpha * load(row + c) + k * load(t.u + c));
  }
}

// Columns from..end, whole vectors of them; `next`: the state to be read after these.
inline void step_vectors(const Problem& p, Token& t, float* S, float* R, int64_t from, int64_t end, const float* next) {
  const V alpha = splat(t.alpha), base = splat(p.sum ? 1.f : t.alpha), go = splat(p.gated ? t.gamma : 1.f);
  const V qk = splat(t.qk), beta = splat(t.beta), gamma = splat(t.gamma);
  read_state(p, t, S, from, end);
  for (int64_t c = from; c < end; c += W) {
    V v = load(t.v + c), ks = load(t.kM + c), u = beta * (p.delta ? v - alpha * ks : v), r = psi(v - ks, p);
    V o = base * load(t.qM + c);
    if (!p.residual) o += qk * u;
    else if (!p.fitted) o += go * qk * r;
    store(t.u + c, u);
    store(t.r + c, r);
    store(t.o + c, o);
  }
  write_state(p, t, S, from, end, p.fitted ? R : next);
  if (!p.fitted) return;
  read_state(p, t, R, from, end);
  for (int64_t c = from; c < end; c += W) {
    V r = load(t.r + c), u = gamma * (p.delta ? r - alpha * load(t.kM + c) : r);
    store(t.u + c, u);
    store(t.o + c, load(t.o + c) + go * (alpha * load(t.qM + c) + qk * u));
  }
  write_state(p, t, R, from, end, next);
}

// The columns that do not fill a vector.
inline void step_column(const Problem& p, Token& t, float* S, float* R, int64_t c) {
  auto read = [&](const float* M, float& kM, float& qM) {
    kM = qM = 0;
    for (int64_t d = 0; d < p.K; ++d) kM += t.k[d] * M[d * p.V], qM += t.q[d] * M[d * p.V];
  };
  auto write = [&](float* M, float u) {
    for (int64_t d = 0; d < p.K; ++d) M[d * p.V] = t.alpha * M[d * p.V] + t.k[d] * u;
  };
  float ks, qs, v = t.v[c], go = p.gated ? t.gamma : 1;
  read(S + c, ks, qs);
  float u = t.beta * (p.delta ? v - t.alpha * ks : v), r = psi(splat(v - ks), p)[0];
  float o = p.sum ? qs : t.alpha * qs;
  if (!p.residual) o += t.qk * u;
  else if (!p.fitted) o += go * t.qk * r;
  write(S + c, u);
  if (p.fitted) {
    read(R + c, ks, qs);
    u = t.gamma * (p.delta ? r - t.alpha * ks : r);
    o += go * (t.alpha * qs + t.qk * u);
    write(R + c, u);
  }
  t.o[c] = o;
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
  float *S = a.S + gate * p.K * p.V, *R = p.fitted ? a.R + gate * p.K * p.V : nullptr;
  const int64_t whole = first + (end - first) / W * W;
  const float* next = gate + 1 < a.B * a.HV && first == 0 ? S + p.K * p.V : nullptr;
  if (first < whole) step_vectors(p, t, S, R, first, whole, next);
  for (int64_t c = whole; c < end; ++c) step_column(p, t, S, R, c);
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
