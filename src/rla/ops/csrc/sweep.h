// Backward of one chunk in a block of value columns: what depends on v, u, w and the states. Letters as in forward.h;
// dS, dR come in as adjoints of the outgoing states and go out as those of the incoming ones.
//
//     z = Ag^T do + L * (k dR) + G'^T dpR                 dpR = -[delta] alpha gamma z      (a solve, from the last token on)
//     dr = gamma z      de = psi'(e) dr
//     y = Au^T do + L * (k dS) + G'^T dpS                 dpS = -de - [delta] alpha beta y
//     dv = de + beta y      dkS = E' dpS      dkR = E' dpR
//     dS <- exp(b_C) dS + q^T (eu * do) + k^T dkS       dR <- exp(b_C) dR + q^T (E * go * do) + k^T dkR
//
// What sums over value columns is left in a Part, for backward.h: the parts of dq and dk that come through the states,
// do u^T, do w^T, the adjoint of G', and sums by rows for the gates.
#pragma once
#include "forward.h"

namespace RLA_ISA {

// Sums over a block of value columns, for one chunk.
struct Part {
  float *dqT, *dkT;            // [CP][K][NR]
  float *Pu, *Pw, *dGp;        // [CP][C][NR], lower triangular: do u^T, do w^T, the adjoint of G'
  float *beta, *gamma;         // rs(y * x), rs(z * y)
  float *delta, *error;        // -alpha (rs(beta y * pS) + rs(gamma z * pR)): predictions that the delta rule takes away; -rs(de * pS)
  float *qS, *qR, *kd, *r;     // rs(do * qS), rs(do * qR), rs(u * k dS) + rs(w * k dR), rs(do * r)
  float *state;                // <dS, S> + <dR, R>

  void carve(Arena& m, const Problem& p) {
    dqT = m.floats(C * p.K);
    dkT = m.floats(C * p.K);
    for (float** x : {&Pu, &Pw, &dGp}) *x = m.floats(C * C);
    for (float** x : {&beta, &gamma, &delta, &error, &qS, &qR, &kd, &r, &state}) *x = m.floats(C);
  }
};

enum { SUM_BETA, SUM_GAMMA, SUM_DELTA, SUM_ERROR, SUM_R, SUM_KD, SUMS };

// Memory of one worker: panels of the block's columns, [columns / NR][C][NR] each.
struct Sweep {
  float *pS[MOST_CHUNKS], *pR[MOST_CHUNKS];  // where forward has kept them one panel, read again for each
  float *S[MOST_CHUNKS], *R[MOST_CHUNKS];  // incoming states of the chunks, panels of the block's columns; the first of a
                                                 // later segment are those that forward has saved
  float *u, *w, *uL, *wL, *x, *y, *e;            // [C][NR]: of one panel of one chunk
  float *dout, *dou, *dow;                       // do times 1, eu, E go
  float *dpS, *dpR, *dkS, *dkR;                  // in dpS at first what comes through e
  float *doutT, *uT, *wT, *dkST, *dkRT;          // [CP][columns][NR]
  float* sums;                                   // [SUMS][C][W]
  Fetch* fetch;                                  // what the next chunk touches

  void carve(Arena& m, const Problem& p, int64_t strips) {
    int64_t n = strips * C * NR;
    for (int i = 0; i < p.segments.most_chunks(); ++i) {
      for (float** a : {&pS[i], &pR[i]}) *a = m.floats(p.kept ? C * NR : n);
      S[i] = m.floats(strips * p.K * NR);
      R[i] = m.floats(p.fitted ? strips * p.K * NR : 0);
    }
    for (float** a : {&u, &w, &uL, &wL, &x, &y, &e}) *a = m.floats(C * NR);
    for (float** a : {&dout, &dou, &dow, &dpS, &dpR, &dkS, &dkR, &doutT, &uT, &wT, &dkST, &dkRT})
      *a = m.floats(n);
    sums = m.floats(SUMS * C * W);
  }
  // Panel s of the block, of chunk i of the segment.
  Strip strip(const Problem& p, int i, int64_t s) const {
    const int64_t at = p.kept ? 0 : s * C * NR;
    Strip st = {};
    st.u = u, st.w = w, st.uL = uL, st.wL = wL, st.x = x, st.y = y, st.e = e, st.pS = pS[i] + at, st.pR = pR[i] + at;
    st.fetch = fetch;
    return st;
  }
};

// dr * psi'(e)
INLINE V psi_backward(V e, V dr, const Problem& p) {
  if (p.a.loss == HUBER) return select(abs(e) <= (float)p.a.clip, dr, V{});
  if (p.a.loss == LOGCOSH) {
    V t = tanh(e);
    return dr - dr * t * t;
  }
  return dr;
}

// sums[i] += rs(x * panel) over the tile's rows, lane by lane; times scale[i] if there is one.
template <int M> INLINE void add_rows(float* sums, const Tile<M>& x, const float* panel, const float* scale = nullptr) {
  unroll<M>([&](auto i) __attribute__((always_inline)) {
    V s = x.v[i][0] * load(panel + i * NR) + x.v[i][1] * load(panel + i * NR + W);
    if (scale) s *= splat(scale[i]);
    store(sums + i * W, load(sums + i * W) + s);
  });
}

// x = L * (k d) + the rows of a^T do, a triangular: what a state's update of these tokens is the adjoint of, so far.
// STRICT: a has no diagonal. error, rate: u / beta or w / gamma of the panel, and beta or gamma.
template <int STRICT, int M>
INLINE void adjoint_tile(Tile<M>& x, const Problem& p, const Chunk& ch, const Sweep& w, const float* d, const float* a,
                         const float* dout, const float* error, const float* rate, int64_t j0) {
  const int64_t end = j0 + M;
  clear(x);
  mul_rows(x, ch.k + j0 * p.ldk, p.ldk, d, p.K, *w.fetch);
  add_rows(w.sums + (SUM_KD * C + j0) * W, x, error + j0 * NR, rate + j0);
  scale_rows(x, ch.L + j0);
  mul_lower_transposed<STRICT>(x, a + j0 * C + j0, C, dout + j0 * NR);
  mul_columns(x, a + end * C + j0, C, dout + end * NR, ch.c - end);
}

// dr of a tile, and from it dpR, dkR and the part of dpS that comes through e. panel: the panel's place in the block's arrays.
template <int M>
INLINE void sweep_residual(const Problem& p, const Chunk& ch, const Sweep& w, const Strip& st, const float* dR, int64_t panel,
                           int64_t j0) {
  const int64_t at = j0 * NR, end = j0 + M;
  const float* dout = w.dout + panel;
  float* sums = w.sums + j0 * W;
  Tile<M> x;
  if (p.fitted) {
    adjoint_tile<0>(x, p, ch, w, dR, ch.Ag, dout, st.y, ch.gamma, j0);
    if (p.delta) {
      mul_columns(x, ch.Gp + end * C + j0, C, w.dpR + panel + end * NR, ch.c - end);
      solve_lower_transposed(x, ch.Gp + j0 * C + j0, C, ch.ag + j0);
    }
    add_rows(sums + SUM_GAMMA * C * W, x, st.y + at);
    EACH(M, x.v[i][j] *= splat(-ch.gamma[j0 + i]));
    if (p.delta) {
      Tile<M> y;
      EACH(M, y.v[i][j] = splat(ch.alpha[j0 + i]) * x.v[i][j]);
      put(w.dpR + panel + at, y);
      add_rows(sums + SUM_DELTA * C * W, y, st.pR + at);
      put(w.dkR + panel + at, y, ch.Ep + j0);
    }
  } else {
    EACH(M, x.v[i][j] = psi(load(st.e + at + i * NR + j * W), p));
    add_rows(sums + SUM_R * C * W, x, dout + at);
    EACH(M, x.v[i][j] = splat(-ch.go[j0 + i] * ch.A[(j0 + i) * (C + 1)]) * load(dout + at + i * NR + j * W));
  }
  EACH(M, x.v[i][j] = psi_backward(load(st.e + at + i * NR + j * W), x.v[i][j], p));
  put(w.dpS + panel + at, x);
  add_rows(sums + SUM_ERROR * C * W, x, st.pS + at);
}

// dv of a tile, dpS and dkS. s: the panel's number.
template <int M>
INLINE void sweep_memory(const Problem& p, const Task& task, const Chunk& ch, const Sweep& w, const Strip& st, const float* dS,
                         int64_t panel, int64_t s, int64_t j0) {
  const Args& a = p.a;
  const int64_t at = j0 * NR, end = j0 + M, below = end * C + j0, diagonal = j0 * C + j0, later = panel + end * NR;
  float* dpS = w.dpS + panel + at;
  float* sums = w.sums + j0 * W;
  Tile<M> x, y;
  if (p.residual) {
    adjoint_tile<1>(x, p, ch, w, dS, ch.Au, w.dout + panel, st.x, ch.beta, j0);
    mul_lower_transposed<1>(x, ch.Gp + diagonal, C, dpS);
  } else {
    adjoint_tile<0>(x, p, ch, w, dS, ch.Au, w.dout + panel, st.x, ch.beta, j0);
  }
  if (p.delta || p.residual) mul_columns(x, ch.Gp + below, C, w.dpS + later, ch.c - end);
  if (p.delta) solve_lower_transposed(x, ch.Gp + diagonal, C, ch.ab + j0);
  add_rows(sums + SUM_BETA * C * W, x, st.x + at);
  scale_rows(x, ch.beta + j0);
  y = x;
  if (p.residual) EACH(M, y.v[i][j] -= load(dpS + i * NR + j * W));
  const int64_t stride[3] = {a.T * a.HV * a.V, a.HV * a.V, a.V};
  put_output(y, p.dtype, a.dv, task.row(stride, ch.t + j0, task.h) + s * NR, stride[1], p.V - s * NR, p.past);
  if (p.delta) {
    EACH(M, x.v[i][j] *= splat(-ch.alpha[j0 + i]));
    add_rows(sums + SUM_DELTA * C * W, x, st.pS + at);
    if (p.residual) EACH(M, x.v[i][j] += load(dpS + i * NR + j * W));
    put(dpS, x);
  } else if (p.residual) {
    get(x, dpS);
  }
  if (p.delta || p.residual) put(w.dkS + panel + at, x, ch.Ep + j0);
}

// The transpose of panel b of a block of `strips`, with its rows scaled if there is a scale, to its place in to[CP][columns][NR].
inline void transpose_panel(const Chunk& ch, const float* x, float* to, int64_t b, int64_t strips, const float* scale = nullptr) {
  for (int64_t s = 0; s * NR < ch.c; ++s)
    transpose(x + s * NR * NR, NR, to + (s * strips + b) * NR * NR, NR, least<int64_t>(NR, ch.c - s * NR), NR,
              scale ? scale + s * NR : nullptr);
}

// Panel b of a block of `strips`, from the last token to the first. s: the panel's number.
inline void sweep_strip(const Problem& p, const Task& task, const Chunk& ch, const Sweep& w, Strip st, const float* dS,
                        const float* dR, int64_t b, int64_t strips, int64_t s) {
  const Args& a = p.a;
  const int64_t panel = b * C * NR;
  strip_tiles<ERRORS>(p, task, ch, st, nullptr, nullptr, s);
  transpose_panel(ch, w.x, w.uT, b, strips, ch.beta);
  if (p.fitted) transpose_panel(ch, w.y, w.wT, b, strips, ch.gamma);
  tiles(ch.c, [&](auto m, int64_t i0) {
    constexpr int M = decltype(m)::value;
    Tile<M> x;
    int64_t at = panel + i0 * NR;
    get_input(x, p.dtype, a.dout, task.row(a.dout_stride, ch.t + i0, task.h) + s * NR, a.dout_stride[1], p.V - s * NR);
    put(w.dout + at, x);
    put(w.dou + at, x, ch.eu + i0);
    if (p.fitted) {
      scale_rows(x, ch.go + i0);
      put(w.dow + at, x, ch.E + i0);
    }
  });
  transpose_panel(ch, w.dout + panel, w.doutT, b, strips);
  if (p.residual)
    tiles_back(ch.c, [&](auto m, int64_t j0) { sweep_residual<decltype(m)::value>(p, ch, w, st, dR, panel, j0); });
  tiles_back(ch.c, [&](auto m, int64_t j0) { sweep_memory<decltype(m)::value>(p, task, ch, w, st, dS, panel, s, j0); });
  if (p.delta || p.residual) transpose_panel(ch, w.dkS + panel, w.dkST, b, strips);
  if (p.delta && p.fitted) transpose_panel(ch, w.dkR + panel, w.dkRT, b, strips);
}

// sums += cs(x * panel)
template <int M> INLINE void add_lanes(V (&sums)[NV], const Tile<M>& x, const float* panel) {
  EACH(M, sums[j] += x.v[i][j] * load(panel + i * NR + j * W));
}

// Through the states to q and k, transposed:  S do^T, R do^T, dS u^T + dR w^T, S dkS^T + R dkR^T.
inline void sweep_keys(const Problem& p, const Chunk& ch, const Sweep& w, const Part& part, const float* S,
                       const float* R, const float* dS, const float* dR, int64_t strips) {
  const int64_t step = p.K * NR, columns = strips * NR;
  V qS[CP][NV] = {}, qR[CP][NV] = {};
  tiles(p.K, [&](auto m, int64_t d) {
    constexpr int M = decltype(m)::value;
    for (int64_t s = 0; s * NR < ch.c; ++s) {  // inside: a tile's rows of four states are in the first-level cache
      const int64_t at = s * NR, b = s * columns * NR, t = s * p.K * NR;
      Tile<M> x, y;
      clear(x);
      mul_panels(x, S + d * NR, step, w.doutT + b, strips, *w.fetch);
      add_lanes(qS[s], x, ch.qT + t + d * NR);
      EACH(M, x.v[i][j] *= load(ch.eu + at + j * W));
      if (p.fitted) {
        clear(y);
        mul_panels(y, R + d * NR, step, w.doutT + b, strips, *w.fetch);
        add_lanes(qR[s], y, ch.qT + t + d * NR);
        EACH(M, x.v[i][j] += y.v[i][j] * (load(ch.E + at + j * W) * load(ch.go + at + j * W)));
      }
      put(part.dqT + t + d * NR, x);
      clear(x);
      mul_panels(x, dS + d * NR, step, w.uT + b, strips, *w.fetch);
      if (p.fitted) mul_panels(x, dR + d * NR, step, w.wT + b, strips, *w.fetch);
      EACH(M, x.v[i][j] *= load(ch.L + at + j * W));
      if (p.delta || p.residual) mul_panels(x, S + d * NR, step, w.dkST + b, strips, *w.fetch);
      if (p.delta && p.fitted) mul_panels(x, R + d * NR, step, w.dkRT + b, strips, *w.fetch);
      put(part.dkT + t + d * NR, x);
    }
  });
  for (int s = 0; s < CP; ++s) {
    for (int j = 0; j < NV; ++j) {
      store(part.qS + s * NR + j * W, qS[s][j]);
      store(part.qR + s * NR + j * W, qR[s][j]);
    }
  }
}

// The adjoints of A, Au and G' before their decays, lower triangle.
inline void sweep_pairs(const Problem& p, const Chunk& ch, const Sweep& w, const Part& part, int64_t strips) {
  const int64_t step = C * NR, columns = strips * NR;
  tiles(ch.c, [&](auto m, int64_t i0) {
    constexpr int M = decltype(m)::value;
    const int64_t at = i0 * NR;
    for (int64_t s = 0; s * NR < i0 + M; ++s) {
      const float *uT = w.uT + s * columns * NR, *wT = w.wT + s * columns * NR;
      const int64_t to = s * C * NR + at;
      const bool half = above_diagonal<M>(i0, s);
      auto times = [&](Tile<M>& x, const float* rows, const float* b) __attribute__((always_inline)) {
        if (half) mul_panels<0, 1>(x, rows + at, step, b, strips);
        else mul_panels(x, rows + at, step, b, strips);
      };
      Tile<M> x;
      clear(x);
      times(x, w.dout, uT);
      put(part.Pu + to, x);
      if (p.fitted) {
        clear(x);
        times(x, w.dout, wT);
        put(part.Pw + to, x);
      }
      if (p.delta || p.residual) {
        clear(x);
        times(x, w.dpS, uT);
        if (p.delta && p.fitted) times(x, w.dpR, wT);
        put(part.dGp + to, x);
      }
    }
  });
}

// d <- decay * d + q^T do + k^T dk, one panel [K][NR]; returns <d, S> of what came in.
inline float absorb_adjoint(const Problem& p, const Chunk& ch, const float* S, float* d, const float* dout,
                            const float* dk) {
  V dot[NV] = {};
  tiles(p.K, [&](auto m, int64_t n) {
    constexpr int M = decltype(m)::value;
    Tile<M> x;
    get(x, d + n * NR);
    EACH(M, dot[j] += x.v[i][j] * load(S + (n + i) * NR + j * W));
    EACH(M, x.v[i][j] *= splat(ch.decay));
    mul_columns(x, ch.q + n, p.ldk, dout, ch.c);
    if (dk) mul_columns(x, ch.k + n, p.ldk, dk, ch.c);
    put(d + n * NR, x);
  });
  return sum(dot[0] + dot[1]);
}

// What backward asks for while it sweeps chunk i of `count`, in the columns of panels first .. first + strips - 1: the rows of dq and
// dk that it is about to write, unless past the caches; a segment ahead, what chunk i of the next segment, segment s of `next`, reads,
// and a part of the states saved for it; and what the chunk that is swept next reads and writes. While it computes states it
// asks for nothing: so many lines in so little time would wait for each other, and the products for them.
inline void fetch_sweep(Fetch& f, const Problem& p, const Task& task, const Chunk& ch, int i, int count, int64_t first, int64_t strips,
                        const Task& next, int64_t s) {
  const int64_t stride[3] = {p.a.T * p.a.H * p.K, p.a.H * p.K, p.K};
  const int64_t v_stride[3] = {p.a.T * p.a.HV * p.V, p.a.HV * p.V, p.V};
  f.clear();
  if (!p.past) fetch_rows(f, p, task, p.a.dq, stride, task.kh, p.K, ch.t, C);
  if (!p.past) fetch_rows(f, p, task, p.a.dk, stride, task.kh, p.K, ch.t, C);
  auto fetch_gradients = [&](const Task& of, int64_t t) {
    fetch_columns(f, p, of, p.a.dout, p.a.dout_stride, t, first, strips, C);
    if (!p.past) fetch_columns(f, p, of, p.a.dv, v_stride, t, first, strips, C);
  };
  if (i) fetch_gradients(task, ch.t - C);
  if (s >= 0) {
    const int64_t begin = p.segments.begin(s), from = begin + i * C, last = next.end(p, s);
    const int64_t end = i + 1 == count ? last : least(last, from + C), part = strips * p.K / count * NR;
    for (int64_t state = 0; s && state < p.states(); ++state)
      f.add(next.saved(p, s) + state * p.state + first * p.K * NR + i * part, part * 4);
    if (!i) fetch_gradients(next, begin + (last - 1 - begin) / C * C);
    if (from < end) {
      if (p.pairs) f.add(next.pairs(p, 0, from), (end - from) * C * 4, p.pairs, p.tokens() * C * 4);
      for (const float* x : {p.a.pS, p.a.pR})
        if (x) fetch_columns(f, p, next, x, v_stride, from, first, strips, end - from);
      fetch_columns(f, p, next, p.a.v, p.a.v_stride, from, first, strips, end - from);
      fetch_keys(f, p, next, from, end - from);
    }
  }
  // with each state k dS, S do^T, dS u^T; S dkS^T
  const int64_t products = 3 * p.states() + (p.delta || p.residual) + (p.delta && p.fitted);
  f.spread(products * strips * calls_of(C, p.K));
}

// A segment of chunks in the columns of panels first .. first + strips - 1. dS, dR: the task's adjoints, all panels.
// begin(i) is called before chunks[i] is used, done(i) when parts[i] is complete, from the last chunk to the first. next, after:
// the segment that follows is segment `after` of `next`.
template <class F, class G>
inline void sweep_segment(const Problem& p, const Task& task, const Chunk* chunks, int count, const Part* parts,
                          const Sweep& w, float* dS, float* dR, int64_t segment, int64_t first, int64_t strips,
                          const Task& next, int64_t after, F&& begin, G&& done) {
  const int64_t size = p.K * NR;
  const bool predicts = p.delta || p.residual;
  dS += first * size;
  dR += first * size;
  const float *S[MOST_CHUNKS], *R[MOST_CHUNKS];
  for (int i = 0; i < count; ++i) S[i] = w.S[i], R[i] = w.R[i];
  if (segment == 0) {
    for (int64_t s = 0; s < strips; ++s) {
      pack_state(p, state_of(p, p.a.S0, task), w.S[0] + s * size, first + s);
      if (p.fitted) pack_state(p, state_of(p, p.a.R0, task), w.R[0] + s * size, first + s);
    }
  } else {
    S[0] = task.saved(p, segment) + first * size;
    R[0] = S[0] + p.state;
  }
  w.fetch->clear();
  for (int i = 0; i < count; ++i) {
    begin(i);
    if (i + 1 == count && (p.kept || !predicts)) break;  // nothing is absorbed or predicted
    for (int64_t s = 0; s < strips; ++s) {
      Strip st = w.strip(p, i, s);
      strip_tiles<STATES>(p, task, chunks[i], st, S[i] + s * size, R[i] + s * size, first + s);
      if (i + 1 == count) continue;
      absorb(p, chunks[i], S[i] + s * size, w.S[i + 1] + s * size, st.uL, nullptr, *w.fetch);
      if (p.fitted) absorb(p, chunks[i], R[i] + s * size, w.R[i + 1] + s * size, st.wL, nullptr, *w.fetch);
    }
  }
  for (int i = count - 1; i >= 0; --i) {
    const Chunk& ch = chunks[i];
    const Part& part = parts[i];
    memset(w.sums, 0, SUMS * C * W * 4);
    fetch_sweep(*w.fetch, p, task, ch, i, count, first, strips, next, after);
    for (int64_t s = 0; s < strips; ++s)
      sweep_strip(p, task, ch, w, w.strip(p, i, s), dS + s * size, dR + s * size, s, strips, first + s);
    float* const sums[SUMS] = {part.beta, part.gamma, part.delta, part.error, part.r, part.kd};
    for (int n = 0; n < SUMS; ++n)
      for (int64_t t = 0; t < C; t += 4) {
        const float* x = w.sums + (n * C + t) * W;
        sum4(load(x), load(x + W), load(x + 2 * W), load(x + 3 * W), sums[n] + t);
      }
    sweep_keys(p, ch, w, part, S[i], R[i], dS, dR, strips);
    sweep_pairs(p, ch, w, part, strips);
    float state = 0;
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t at = s * C * NR;
      state += absorb_adjoint(p, ch, S[i] + s * size, dS + s * size, w.dou + at,
                              p.delta || p.residual ? w.dkS + at : nullptr);
      if (p.fitted)
        state += absorb_adjoint(p, ch, R[i] + s * size, dR + s * size, w.dow + at, p.delta ? w.dkR + at : nullptr);
    }
    part.state[0] = state;
    done(i);
  }
}

}  // namespace RLA_ISA
