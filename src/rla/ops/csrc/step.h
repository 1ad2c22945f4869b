// One token: states are updated in place and, lying by columns, [B, HV, V, K], pass through the core once. One loop updates a
// pair of columns and takes the products of k and q with the second next pair; what the pair between them needs is computed
// meanwhile. A pair is a column of S and the same of R or, where there is no R, one of each half of S: what is read of k and q
// serves both, and memory is read as two streams, which the hardware foresees.
//
//     u = beta (v - [delta] alpha k S)                  S <- alpha S + k^T u
//     w = gamma (psi(v - k S) - [delta] alpha k R)      R <- alpha R + k^T w
//     q S_t = alpha (q S_{t-1}) + (q.k) u, and the same for R: one pass serves the output too.
#pragma once
#include "forward.h"

namespace RLA_ISA {

struct Token {
  float q[256], k[256], v[256], o[256];
  float spare[256];  // in place of the second column of a pair where there is none
  float alpha, beta, gamma, qk;
};

struct Pair {
  float *first, *second;
};

// k times each column of a pair, and q times each.
struct Products {
  float k_first, q_first, k_second, q_second;
};

// What a token adds to each column, times k.
struct Update {
  float first, second;
};

// How a column of K numbers is gone through: as N vectors, with k and q in registers; as WHOLE vectors, as many as there are; or as
// vectors and a REST.
enum { REST = -1, WHOLE = 0 };
constexpr int REGISTERS = W == 16 ? 8 : 0;  // the largest N: of 32 registers k and q take half

template <int N> struct Keys {
  V k[N > 0 ? N : 1], q[N > 0 ? N : 1];
  explicit Keys(const Token& t) {
    if constexpr (N > 0) {
      unroll<N>([&](auto i) __attribute__((always_inline)) {
        k[i.value] = load(t.k + i.value * W);
        q[i.value] = load(t.q + i.value * W);
      });
    }
  }
};

// If READ the products of k and q with the columns x; if WRITE y <- alpha y + k g. alpha and K are passed by value: a store might
// change what is in memory.
template <bool READ, bool WRITE, int N>
INLINE Products sweep_columns(const Token& t, const Keys<N>& keys, int64_t K, Pair x, Pair y, float alpha, Update g) {
  V k0 = V{}, q0 = V{}, k1 = V{}, q1 = V{};
  const V as = splat(alpha), g0 = splat(g.first), g1 = splat(g.second);
  const auto vector = [&](int64_t d, V k, V q) __attribute__((always_inline)) {
    const auto read = [&](V& kM, V& qM, const float* from) __attribute__((always_inline)) {
      const V m = load(from + d);
      kM += k * m;
      qM += q * m;
    };
    if constexpr (READ) {
      read(k0, q0, x.first);
      read(k1, q1, x.second);
    }
    if constexpr (WRITE) {  // both are read before one is written: their addresses may differ by whole pages, and a load waits
                            // for a store to what looks like its own address
      const V first = as * load(y.first + d) + k * g0, second = as * load(y.second + d) + k * g1;
      store(y.first + d, first);
      store(y.second + d, second);
    }
  };
  int64_t d = 0;
  if constexpr (N > 0) {
    unroll<N>([&](auto i) __attribute__((always_inline)) { vector(i.value * W, keys.k[i.value], keys.q[i.value]); });
  } else {
#pragma GCC unroll 4
    for (; d + W <= K; d += W) vector(d, load(t.k + d), load(t.q + d));
  }
  Products sums;
  sum4(k0, q0, k1, q1, &sums.k_first);
  for (; N == REST && d < K; ++d) {
    const auto column = [&](float& kM, float& qM, const float* from, float* to, float add) __attribute__((always_inline)) {
      if constexpr (READ) kM += t.k[d] * from[d], qM += t.q[d] * from[d];
      if constexpr (WRITE) to[d] = alpha * to[d] + t.k[d] * add;
    };
    column(sums.k_first, sums.q_first, x.first, y.first, g.first);
    column(sums.k_second, sums.q_second, x.second, y.second, g.second);
  }
  return sums;
}

// Columns first .. end - 1 of a head's S and, if FITTED, R.
template <int N, bool FITTED>
inline void run_columns(const Problem& p, Token& t, float* S, float* R, int64_t first, int64_t end) {
  const int64_t K = p.K, half = (end - first + 1) / 2, last = FITTED ? end : first + half;
  const bool delta = p.delta, residual = p.residual, logcosh = p.a.loss == LOGCOSH;
  const float alpha = t.alpha, beta = t.beta, gamma = t.gamma, qk = t.qk, base = p.sum ? 1 : alpha, go = p.gated ? gamma : 1;
  const float clip = p.a.loss == HUBER ? (float)p.a.clip : INFINITY;  // psi, of one float
  const auto pair = [&](int64_t c) __attribute__((always_inline)) {
    return Pair{S + c * K, FITTED ? R + c * K : c + half < end ? S + (c + half) * K : t.spare};
  };
  const Keys<N> keys(t);
  Products x = sweep_columns<true, false>(t, keys, K, pair(first), pair(first), alpha, {}), next = x;
  if (first + 1 < last) next = sweep_columns<true, false>(t, keys, K, pair(first + 1), pair(first), alpha, {});
  for (int64_t c = first; c < last; ++c) {
    // what column i of S absorbs, from its products with k and q; in o its output, without R's part
    const auto absorbed = [&](int64_t i, float kS, float qS, float& r) __attribute__((always_inline)) {
      const float v = t.v[i], e = v - kS, u = beta * (delta ? v - alpha * kS : v);
      float o = base * qS;
      if (residual) r = logcosh ? tanh(splat(e))[0] : e > clip ? clip : e < -clip ? -clip : e;
      if (!residual) o += qk * u;
      else if (!FITTED) o += go * qk * r;
      t.o[i] = o;
      return u;
    };
    float r = 0;
    Update g = {absorbed(c, x.k_first, x.q_first, r), 0};
    if constexpr (FITTED) {
      g.second = gamma * (delta ? r - alpha * x.k_second : r);
      t.o[c] += go * (alpha * x.q_second + qk * g.second);
    } else if (c + half < end) {
      g.second = absorbed(c + half, x.k_second, x.q_second, r);
    }
    x = next;
    if (c + 2 < last) next = sweep_columns<true, true>(t, keys, K, pair(c + 2), pair(c), alpha, g);
    else sweep_columns<false, true>(t, keys, K, pair(c), pair(c), alpha, g);
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
  if (!p.fitted && (end - first) % 2) memset(t.spare, 0, sizeof t.spare);
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
  const auto run = [&](auto fitted) {
    constexpr bool FITTED = decltype(fitted)::value;
    float *const S = a.S + at, *const R = FITTED ? a.R + at : nullptr;
    if (REGISTERS && p.K == REGISTERS * W) run_columns<REGISTERS, FITTED>(p, t, S, R, first, end);
    else if (REGISTERS && p.K == REGISTERS * W / 2) run_columns<REGISTERS / 2, FITTED>(p, t, S, R, first, end);
    else if (p.K % W == 0) run_columns<WHOLE, FITTED>(p, t, S, R, first, end);
    else run_columns<REST, FITTED>(p, t, S, R, first, end);
  };
  if (p.fitted) run(Int<1>{});
  else run(Int<0>{});
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
