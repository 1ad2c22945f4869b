// One token: states in the caller's layout [B, HV, K, V], updated in place. Bound by memory, so a block of columns
// small enough for the first-level cache is read once, updated from there, and the next block is fetched meanwhile.
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

// kM = k M, qM = q M for NB vectors of columns of M [K, V].
template <int NB> INLINE void read_state(const Problem& p, const Token& t, const float* M, V (&kM)[NB], V (&qM)[NB]) {
  V x[NB] = {}, y[NB] = {};
  for (int64_t d = 0; d < p.K; ++d, M += p.V) {
    V k = splat(t.k[d]), q = splat(t.q[d]);
    unroll<NB>([&](auto j) __attribute__((always_inline)) {
      V m = load(M + j * W);
      x[j] += k * m;
      y[j] += q * m;
    });
  }
  unroll<NB>([&](auto j) __attribute__((always_inline)) { kM[j] = x[j], qM[j] = y[j]; });
}

// M <- alpha M + k^T u; `next` are columns of a state to fetch meanwhile, or null.
template <int NB>
INLINE void write_state(const Problem& p, const Token& t, float* M, const V (&u_)[NB], const float* next) {
  V u[NB], alpha = splat(t.alpha);
  unroll<NB>([&](auto j) __attribute__((always_inline)) { u[j] = u_[j]; });
  for (int64_t d = 0; d < p.K; ++d, M += p.V) {
    V k = splat(t.k[d]);
    if (next) {
      for (int b = 0; b < NB * W; b += 16) __builtin_prefetch(next + b, 1);
      next += p.V;
    }
    unroll<NB>([&](auto j) __attribute__((always_inline)) { store(M + j * W, alpha * load(M + j * W) + k * u[j]); });
  }
}

// NB vectors of columns, from column c; `after`: whether as many columns follow.
template <int NB> INLINE void step_block(const Problem& p, Token& t, float* S, float* R, int64_t c, bool after) {
  const V alpha = splat(t.alpha), base = splat(p.sum ? 1.f : t.alpha), go = splat(p.gated ? t.gamma : 1.f);
  V ks[NB], qs[NB], u[NB], r[NB], o[NB];
  read_state(p, t, S + c, ks, qs);
  unroll<NB>([&](auto j) __attribute__((always_inline)) {
    V v = load(t.v + c + j * W);
    u[j] = splat(t.beta) * (p.delta ? v - alpha * ks[j] : v);
    r[j] = psi(v - ks[j], p);
    o[j] = base * qs[j];
    if (!p.residual) o[j] += splat(t.qk) * u[j];
    else if (!p.fitted) o[j] += go * splat(t.qk) * r[j];
  });
  write_state(p, t, S + c, u, p.fitted ? R + c : after ? S + c + NB * W : nullptr);
  if (p.fitted) {
    read_state(p, t, R + c, ks, qs);
    unroll<NB>([&](auto j) __attribute__((always_inline)) {
      u[j] = splat(t.gamma) * (p.delta ? r[j] - alpha * ks[j] : r[j]);
      o[j] += go * (alpha * qs[j] + splat(t.qk) * u[j]);
    });
    write_state(p, t, R + c, u, after ? S + c + NB * W : nullptr);
  }
  unroll<NB>([&](auto j) __attribute__((always_inline)) { store(t.o + c + j * W, o[j]); });
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
  constexpr int NB = 4;
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
  int64_t c = first;
  for (; c + NB * W <= end; c += NB * W) step_block<NB>(p, t, S, R, c, c + 2 * NB * W <= end);
  for (; c + W <= end; c += W) step_block<1>(p, t, S, R, c, c + 2 * W <= end);
  for (; c < end; ++c) step_column(p, t, S, R, c);
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
