// Backward of one chunk in a block of value columns: what depends on v, u, w and the states. Letters as in forward.h;
// dS, dR come in as adjoints of the outgoing states and go out as those of the incoming ones.
//
//     z = (I + gamma G)^-T (Ag^T do + L * (k dR))                 additive: without the solve
//     dr = gamma z      de = psi'(e) dr      dp = -de
//     y = (I + beta G)^-T (G'^T dp + Au^T do + L * (k dS))
//     dv = de + beta y      dkS = E' dp - E beta y      dkR = -E gamma z       (the terms with E for delta only)
//     dS <- exp(b_C) dS + q^T (eu * do) + k^T dkS       dR <- exp(b_C) dR + q^T (E * go * do) + k^T dkR
//
// What sums over value columns is left in a Part, for finish.h: the parts of dq and dk that come through the states,
// do u^T, do w^T, the adjoints of G and G', and sums by rows for the gates.
#pragma once
#include "forward.h"

namespace RLA_ISA {

constexpr int64_t SEGMENT_CHUNKS = SEGMENT / C;

// Sums over a block of value columns, for one chunk.
struct Part {
  float *dqT, *dkT;            // [CP][K][NR]
  float *Pu, *Pw, *dG, *dGp;   // [CP][C][NR], lower triangular: do u^T, do w^T, adjoints of G and G'
  float *beta, *gamma;         // rs(y * x), rs(z * y)
  float *E, *Ep;               // -rs(beta y * kS) - rs(gamma z * kR), rs(dp * kS)
  float *qS, *qR, *kd, *r;     // rs(do * qS), rs(do * qR), rs(k * (u dS^T + w dR^T)), rs(do * r)
  float *state;                // <dS, S> + <dR, R>

  void carve(Arena& m, const Problem& p) {
    dqT = m.floats(C * p.K);
    dkT = m.floats(C * p.K);
    for (float** x : {&Pu, &Pw, &dG, &dGp}) *x = m.floats(C * C);
    for (float** x : {&beta, &gamma, &E, &Ep, &qS, &qR, &kd, &r, &state}) *x = m.floats(C);
  }
};

enum { SUM_BETA, SUM_GAMMA, SUM_E, SUM_EP, SUM_R, SUMS };

// Memory of one worker: panels of the block's columns, [columns / NR][C][NR] each.
struct Sweep {
  float *u[SEGMENT_CHUNKS], *w[SEGMENT_CHUNKS], *x[SEGMENT_CHUNKS], *y[SEGMENT_CHUNKS], *e[SEGMENT_CHUNKS],
      *kS[SEGMENT_CHUNKS], *kR[SEGMENT_CHUNKS];  // the last two are not used where forward has kept them
  float *S[SEGMENT_CHUNKS], *R[SEGMENT_CHUNKS];  // incoming states of the chunks, panels of the block's columns; the first of a
                                                 // later segment are those that forward has saved
  float *uL, *wL;                                // [C][NR]
  float *dout, *dou, *dow;                       // do times 1, eu, E go
  float *nz, *ny, *dp, *dkS, *dkR;               // nz = -gamma z, ny = -beta y
  float *doutT, *uT, *wT, *dkST, *dkRT;          // [CP][columns][NR]
  float* sums;                                   // [SUMS][C][W]
  Fetch* fetch;                                  // inputs of the segment before

  void carve(Arena& m, const Problem& p, int64_t strips) {
    int64_t n = strips * C * NR;
    for (int i = 0; i < SEGMENT_CHUNKS; ++i) {
      for (float** a : {&u[i], &w[i], &x[i], &y[i], &e[i]}) *a = m.floats(n);
      for (float** a : {&kS[i], &kR[i]}) *a = m.floats(p.kept ? 0 : n);
      S[i] = m.floats(strips * p.K * NR);
      R[i] = m.floats(p.fitted ? strips * p.K * NR : 0);
    }
    uL = m.floats(C * NR);
    wL = m.floats(C * NR);
    for (float** a : {&dout, &dou, &dow, &nz, &ny, &dp, &dkS, &dkR, &doutT, &uT, &wT, &dkST, &dkRT})
      *a = m.floats(n);
    sums = m.floats(SUMS * C * W);
  }
  // Panel s of the block, which is panel first + s of all.
  Strip strip(const Problem& p, const Task& task, const Chunk& ch, int i, int64_t first, int64_t s) const {
    int64_t at = s * C * NR;
    Strip st = {};
    st.u = u[i] + at, st.w = w[i] + at, st.uL = uL, st.wL = wL;
    st.x = x[i] + at, st.y = y[i] + at, st.e = e[i] + at, st.kS = kS[i] + at, st.kR = kR[i] + at;
    st.keep(p, task, ch, first + s);
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

// sums[i] += rs(x * panel) over the tile's rows, lane by lane.
template <int M> INLINE void add_rows(float* sums, const Tile<M>& x, const float* panel) {
  unroll<M>([&](auto i) __attribute__((always_inline)) {
    V s = x.v[i][0] * load(panel + i * NR) + x.v[i][1] * load(panel + i * NR + W);
    store(sums + i * W, load(sums + i * W) + s);
  });
}

template <int M>
INLINE void sweep_tile(const Problem& p, const Task& task, const Chunk& ch, const Sweep& w, const Strip& st,
                       const float* dS, const float* dR, int64_t panel, int64_t s, int64_t j0) {
  const Args& a = p.a;
  const int64_t ldk = p.ldk, K = p.K, at = j0 * NR, end = j0 + M, rest = ch.c - end;
  const int64_t diagonal = j0 * C + j0, below = end * C + j0, later = panel + end * NR;
  const float *k = ch.k + j0 * ldk, *E = ch.E + j0, *dout = w.dout + panel + at;
  float* sums = w.sums + j0 * W;
  Tile<M> x, de, dkS;
  if (p.fitted) {
    clear(x);
    mul_rows(x, k, ldk, dR, K, *w.fetch);
    scale_rows(x, ch.L + j0);
    mul_lower_transposed<0>(x, ch.Ag + diagonal, C, dout);
    if (!p.delta) {
      mul_columns(x, ch.Ag + below, C, w.dout + later, rest);
    } else {
      mul_sum<2>(x, {ch.Ag + below, ch.G + below}, 1, C, {w.dout + later, w.nz + later}, rest);
      solve_lower_transposed(x, ch.G + diagonal, C, ch.gamma + j0);
    }
    add_rows(sums + SUM_GAMMA * C * W, x, st.y + at);
    scale_rows(x, ch.gamma + j0);
    EACH(M, de.v[i][j] = psi_backward(load(st.e + at + i * NR + j * W), x.v[i][j], p));
    if (p.delta) {
      EACH(M, x.v[i][j] = -x.v[i][j]);
      put(w.nz + panel + at, x);
      add_rows(sums + SUM_E * C * W, x, st.kR + at);
      put(w.dkR + panel + at, x, E);
    }
  } else if (p.residual) {
    EACH(M, x.v[i][j] = psi(load(st.e + at + i * NR + j * W), p));
    add_rows(sums + SUM_R * C * W, x, dout);
    EACH(M, de.v[i][j] = psi_backward(load(st.e + at + i * NR + j * W),
                                      splat(ch.go[j0 + i] * ch.diag[j0 + i]) * load(dout + i * NR + j * W), p));
  } else {
    clear(de);
  }
  if (p.residual) {
    EACH(M, x.v[i][j] = -de.v[i][j]);
    put(w.dp + panel + at, x);
    add_rows(sums + SUM_EP * C * W, x, st.kS + at);
    scale_rows(x, ch.Ep + j0);
    dkS = x;
  } else {
    clear(dkS);
  }
  clear(x);
  mul_rows(x, k, ldk, dS, K, *w.fetch);
  scale_rows(x, ch.L + j0);
  if (p.residual) {
    mul_lower_transposed<1>(x, ch.Au + diagonal, C, dout);
    mul_lower_transposed<1>(x, ch.Gp + diagonal, C, w.dp + panel + at);
    const float *au = ch.Au + below, *gp = ch.Gp + below, *o = w.dout + later, *dp = w.dp + later;
    if (p.delta) mul_sum<3>(x, {au, gp, ch.G + below}, 1, C, {o, dp, w.ny + later}, rest);
    else mul_sum<2>(x, {au, gp}, 1, C, {o, dp}, rest);
  } else {
    mul_lower_transposed<0>(x, ch.Au + diagonal, C, dout);
    mul_columns(x, ch.Au + below, C, w.dout + later, rest);
    if (p.delta) mul_columns(x, ch.G + below, C, w.ny + later, rest);
  }
  if (p.delta) solve_lower_transposed(x, ch.G + diagonal, C, ch.beta + j0);
  add_rows(sums + SUM_BETA * C * W, x, st.x + at);
  scale_rows(x, ch.beta + j0);
  EACH(M, de.v[i][j] += x.v[i][j]);
  const int64_t stride[3] = {a.T * a.HV * a.V, a.HV * a.V, a.V};
  put_output(de, p.dtype, a.dv, task.row(stride, ch.t + j0, task.h) + s * NR, stride[1], p.V - s * NR);
  if (p.delta) {
    EACH(M, x.v[i][j] = -x.v[i][j]);
    put(w.ny + panel + at, x);
    add_rows(sums + SUM_E * C * W, x, st.kS + at);
    EACH(M, dkS.v[i][j] += splat(E[i]) * x.v[i][j]);
  }
  put(w.dkS + panel + at, dkS);
}

// One panel of columns, from the last token to the first. s: the panel's number, panel: its place in the block's arrays.
inline void sweep_strip(const Problem& p, const Task& task, const Chunk& ch, const Sweep& w, const Strip& st,
                        const float* dS, const float* dR, int64_t panel, int64_t s) {
  const Args& a = p.a;
  int starts[C], count = 0;
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
    starts[count++] = (int)i0;
  });
  for (int64_t end = ch.c; count--; end = starts[count]) {
    int64_t j0 = starts[count], m = end - j0;
    if (m == MR) sweep_tile<MR>(p, task, ch, w, st, dS, dR, panel, s, j0);
    else if (m == 4) sweep_tile<4>(p, task, ch, w, st, dS, dR, panel, s, j0);
    else if (m == 2) sweep_tile<2>(p, task, ch, w, st, dS, dR, panel, s, j0);
    else sweep_tile<1>(p, task, ch, w, st, dS, dR, panel, s, j0);
  }
}

INLINE void add_lanes(V (&sums)[NV], int M, const V (*x)[NV], const float* panel) {
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < NV; ++j) sums[j] += x[i][j] * load(panel + i * NR + j * W);
}

// Through the states to q and k, transposed:  S do^T, R do^T, dS u^T + dR w^T, S dkS^T + R dkR^T.
inline void sweep_keys(const Problem& p, const Chunk& ch, const Sweep& w, const Part& part, const float* S,
                       const float* R, const float* dS, const float* dR, int64_t strips) {
  const int64_t step = p.K * NR, columns = strips * NR;
  V qS[CP][NV] = {}, qR[CP][NV] = {}, kd[CP][NV] = {};
  tiles(p.K, [&](auto m, int64_t d) {
    constexpr int M = decltype(m)::value;
    for (int64_t s = 0; s * NR < ch.c; ++s) {  // inside: a tile's rows of four states are in the first-level cache
      const int64_t at = s * NR, b = s * columns * NR, t = s * p.K * NR;
      Tile<M> x, y;
      clear(x);
      mul_panels(x, S + d * NR, step, w.doutT + b, strips, *w.fetch);
      add_lanes(qS[s], M, x.v, ch.qT + t + d * NR);
      EACH(M, x.v[i][j] *= load(ch.eu + at + j * W));
      if (p.fitted) {
        clear(y);
        mul_panels(y, R + d * NR, step, w.doutT + b, strips, *w.fetch);
        add_lanes(qR[s], M, y.v, ch.qT + t + d * NR);
        EACH(M, x.v[i][j] += y.v[i][j] * (load(ch.E + at + j * W) * load(ch.go + at + j * W)));
      }
      put(part.dqT + t + d * NR, x);
      clear(x);
      mul_panels(x, dS + d * NR, step, w.uT + b, strips, *w.fetch);
      if (p.fitted) mul_panels(x, dR + d * NR, step, w.wT + b, strips, *w.fetch);
      add_lanes(kd[s], M, x.v, ch.kT + t + d * NR);
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
      store(part.kd + s * NR + j * W, kd[s][j]);
    }
  }
}

// The adjoints of A, Au, G and G' before their decays, lower triangle.
inline void sweep_pairs(const Problem& p, const Chunk& ch, const Sweep& w, const Part& part, int64_t strips) {
  const int64_t step = C * NR, columns = strips * NR;
  tiles(ch.c, [&](auto m, int64_t i0) {
    constexpr int M = decltype(m)::value;
    const int64_t at = i0 * NR;
    for (int64_t s = 0; s * NR < i0 + M; ++s) {
      const float *uT = w.uT + s * columns * NR, *wT = w.wT + s * columns * NR;
      const int64_t to = s * C * NR + at;
      Tile<M> x;
      clear(x);
      mul_panels(x, w.dout + at, step, uT, strips);
      put(part.Pu + to, x);
      if (p.fitted) {
        clear(x);
        mul_panels(x, w.dout + at, step, wT, strips);
        put(part.Pw + to, x);
      }
      if (p.delta) {
        clear(x);
        mul_panels(x, w.ny + at, step, uT, strips);
        if (p.fitted) mul_panels(x, w.nz + at, step, wT, strips);
        put(part.dG + to, x);
      }
      if (p.residual) {
        clear(x);
        mul_panels(x, w.dp + at, step, uT, strips);
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

// to[CP][columns][NR] = the transpose of the block's panels x.
inline void transpose_panels(const Chunk& ch, const float* x, float* to, int64_t strips) {
  for (int64_t s = 0; s * NR < ch.c; ++s) {
    int64_t n = least<int64_t>(NR, ch.c - s * NR);
    for (int64_t b = 0; b < strips; ++b)
      transpose(x + b * C * NR + s * NR * NR, NR, to + (s * strips + b) * NR * NR, NR, n, NR);
  }
}

// A segment of chunks in the columns of panels first .. first + strips - 1. dS, dR: the task's adjoints, all panels.
// done(i) is called when parts[i] is complete, from the last chunk to the first.
template <class F>
inline void sweep_segment(const Problem& p, const Task& task, const Chunk* chunks, int count, const Part* parts,
                          const Sweep& w, float* dS, float* dR, int64_t first, int64_t strips, F&& done) {
  const int64_t size = p.K * NR, segment = chunks[0].t / SEGMENT;
  dS += first * size;
  dR += first * size;
  const float *S[SEGMENT_CHUNKS], *R[SEGMENT_CHUNKS];
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
  for (int i = 0; i < count; ++i) {
    for (int64_t s = 0; s < strips; ++s) {
      Strip st = w.strip(p, task, chunks[i], i, first, s);
      strip_tiles<true>(p, task, chunks[i], st, S[i] + s * size, R[i] + s * size, first + s);
      if (i + 1 == count) continue;
      absorb(p, chunks[i], S[i] + s * size, w.S[i + 1] + s * size, st.uL, st.fetch);
      if (p.fitted) absorb(p, chunks[i], R[i] + s * size, w.R[i + 1] + s * size, st.wL, st.fetch);
    }
  }
  for (int i = count - 1; i >= 0; --i) {
    const Chunk& ch = chunks[i];
    const Part& part = parts[i];
    memset(w.sums, 0, SUMS * C * W * 4);
    fetch_backward(*w.fetch, p, task, ch.t - SEGMENT);
    for (int64_t s = 0; s < strips; ++s)
      sweep_strip(p, task, ch, w, w.strip(p, task, ch, i, first, s), dS + s * size, dR + s * size, s * C * NR, first + s);
    float* const sums[SUMS] = {part.beta, part.gamma, part.E, part.Ep, part.r};
    for (int n = 0; n < SUMS; ++n)
      for (int64_t t = 0; t < C; t += 4) {
        const float* x = w.sums + (n * C + t) * W;
        sum4(load(x), load(x + W), load(x + 2 * W), load(x + 3 * W), sums[n] + t);
      }
    transpose_panels(ch, w.dout, w.doutT, strips);
    transpose_panels(ch, w.u[i], w.uT, strips);
    if (p.fitted) transpose_panels(ch, w.w[i], w.wT, strips);
    if (p.delta || p.residual) transpose_panels(ch, w.dkS, w.dkST, strips);
    if (p.delta && p.fitted) transpose_panels(ch, w.dkR, w.dkRT, strips);
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
