// Backward: segments from the last to the first. Each is recomputed from its saved states, swept (sweep.h), and
// finished here: what sums over value columns and over the value heads of a key head.
//
//     dqk = (do u^T) * Du + go * (do w^T) * D        Du: the decays in Au
//     dkk = dG' * D'
//     dq = (through the states) + dqk k
//     dk = (through the states) + dqk^T q + (dkk + dkk^T) k
//     X = entries of A times their adjoints, Y = those with D', Z = those of G'
//     db' = rows(Y) + dE' + error;   db = rows(X) - cols(X + Y + Z) + dE + delta - dL + db';   db_C += sum(dL) + exp(b_C) <dS, S>
//     error, delta: see Part. Of a prediction, rows(Z) and the part with E' together are the prediction times its adjoint.
//     dlog_alpha = reverse_cumsum(db) - db'
//
// Sums over blocks of value columns run in a fixed order, and the blocks depend on shapes only.
#pragma once
#include "sweep.h"

namespace RLA_ISA {

struct Finish {
  float *dqk, *dkk, *dqkT;  // [CP][C][NR]
  float *columns;           // [C]
  float *rows;              // [W, ldk]

  void carve(Arena& m, const Problem& p) {
    for (float** x : {&dqk, &dkk, &dqkT}) *x = m.floats(C * C);
    columns = m.floats(C);
    rows = m.floats(W * p.ldk);
  }
};

// A part's entry summed over the blocks, in the order of the blocks. `parts` are `step` apart.
INLINE V add_parts(const Part* parts, int64_t step, int64_t blocks, float* Part::*field, int64_t at) {
  V x = load(parts->*field + at);
  for (int64_t b = 1; b < blocks; ++b) x += load(parts[b * step].*field + at);
  return x;
}
INLINE float add_part(const Part* parts, int64_t step, int64_t blocks, float* Part::*field, int64_t at) {
  float x = (parts->*field)[at];
  for (int64_t b = 1; b < blocks; ++b) x += (parts[b * step].*field)[at];
  return x;
}

// dqk and dkk in panels, and the gradients of the gates.
inline void finish_pairs(const Problem& p, const Task& task, const Chunk& ch, const Part* parts, int64_t step,
                         int64_t blocks, const Finish& f) {
  const Args& a = p.a;
  const bool keys = p.delta || p.residual;
  float db[C], dbp[C], dgamma[C];
  VI lane;
  for (int j = 0; j < W; ++j) lane[j] = j;
  memset(f.columns, 0, C * 4);
  for (int64_t i = 0; i < ch.c; ++i) {
    V rows_x = V{}, rows_y = V{}, rows_go = V{}, go = splat(ch.go[i]);
    for (int64_t j = 0; j <= i; j += W) {
      const int64_t panel = j / NR * C * NR + i * NR + j % NR, at = i * C + j;
      const VI lower = lane + (int32_t)j <= (int32_t)i, strict = lane + (int32_t)j < (int32_t)i;
      const V D = load(ch.D + at), Dp = i ? load(ch.D + at - C) : V{};
      V x = V{}, y = V{}, dqk, dkk = V{};
      V pu = add_parts(parts, step, blocks, &Part::Pu, panel);
      dqk = select(p.residual ? strict : lower, pu * (p.sum ? Dp : D), V{});
      (p.sum ? y : x) = select(p.residual ? strict : lower, pu * load(ch.Au + at), V{});
      if (p.fitted) {
        V pw = add_parts(parts, step, blocks, &Part::Pw, panel);
        V A = select(lower, pw * load(ch.A + at), V{});
        rows_go += A;
        x += go * A;
        dqk += select(lower, go * pw * D, V{});
      }
      rows_x += x;
      rows_y += y;
      x += y;
      if (keys) {
        V g = add_parts(parts, step, blocks, &Part::dGp, panel);
        x += select(strict, g * load(ch.Gp + at), V{});
        dkk = select(strict, g * Dp, V{});
      }
      store(f.columns + j, load(f.columns + j) + x);
      store(f.dqk + panel, dqk);
      if (keys) store(f.dkk + panel, dkk);
    }
    for (int64_t j = i / W * W + W; j % NR; j += W) {  // the rest of the panel on the diagonal
      const int64_t panel = j / NR * C * NR + i * NR + j % NR;
      store(f.dqk + panel, V{});
      if (keys) store(f.dkk + panel, V{});
    }
    const float qS = add_part(parts, step, blocks, &Part::qS, i), qR = add_part(parts, step, blocks, &Part::qR, i);
    dbp[i] = sum(rows_y);
    db[i] = sum(rows_x);
    if (p.residual) dbp[i] += add_part(parts, step, blocks, &Part::error, i);
    if (p.sum) dbp[i] += ch.Ep[i] * qS;
    else db[i] += ch.E[i] * qS;
    if (p.fitted) db[i] += ch.E[i] * ch.go[i] * qR;
    if (p.delta) db[i] += add_part(parts, step, blocks, &Part::delta, i);
    dgamma[i] = 0;
    if (p.fitted) dgamma[i] = add_part(parts, step, blocks, &Part::gamma, i);
    if (p.fitted && p.gated) dgamma[i] += ch.E[i] * qR + sum(rows_go);
    if (p.residual && !p.fitted) {
      const float r = add_part(parts, step, blocks, &Part::r, i);
      if (p.gated) dgamma[i] = ch.A[i * (C + 1)] * r;
      f.dqk[i / NR * C * NR + i * NR + i % NR] += ch.go[i] * r;
    }
    const int64_t at = task.gate(p, ch.t + i);
    if (a.dbeta) a.dbeta[at] = add_part(parts, step, blocks, &Part::beta, i);
    if (a.dgamma && p.residual) a.dgamma[at] = dgamma[i];
  }
  if (!a.dlog_alpha) return;
  float end = ch.decay * add_part(parts, step, blocks, &Part::state, 0);
  for (int64_t i = 0; i < ch.c; ++i) {
    float dL = ch.L[i] * add_part(parts, step, blocks, &Part::kd, i);
    db[i] += dbp[i] - f.columns[i] - dL;
    end += dL;
  }
  for (int64_t i = ch.c - 1; i >= 0; --i) {
    end += db[i];
    a.dlog_alpha[task.gate(p, ch.t + i)] = ch.alpha[i] == 0 ? 0 : end - dbp[i];
  }
}

// to[s][j][NR] = the transpose of a lower triangular matrix in panels. With to = x: their sum, in place.
inline void transpose_lower(const Chunk& ch, float* x, float* to) {
  const int64_t n = (ch.c + NR - 1) / NR;
  for (int64_t s = 0; s < n; ++s) {
    if (ch.c < n * NR) memset(x + s * C * NR + ch.c * NR, 0, (n * NR - ch.c) * NR * 4);
    for (int64_t i = s; i < n; ++i) {
      float y[NR * NR], *block = x + s * C * NR + i * NR * NR, *back = to + i * C * NR + s * NR * NR;
      transpose(block, NR, to == x && i == s ? y : back, NR, NR, NR);
      if (to == x && i == s)
        for (int64_t j = 0; j < NR * NR; j += W) store(block + j, load(block + j) + load(y + j));
    }
  }
}

// dq and dk, transposed [CP][K][NR]: written for the first value head of a key head, added to for the others.
inline void finish_keys(const Problem& p, const Chunk& ch, const Part* parts, int64_t step, int64_t blocks,
                        const Finish& f, float* dqT, float* dkT, bool first) {
  const bool keys = p.delta || p.residual;
  transpose_lower(ch, f.dqk, f.dqkT);
  if (keys) transpose_lower(ch, f.dkk, f.dkk);
  for (int64_t s = 0; s * NR < ch.c; ++s) {
    const int64_t start = s * NR, end = least<int64_t>(ch.c, start + NR), panel = s * C * NR;
    const int64_t middle = least<int64_t>(end, start + W);
    tiles(p.K, [&](auto m, int64_t d) {
      constexpr int M = decltype(m)::value;
      const int64_t at = s * p.K * NR + d * NR;
      Tile<M> x;
      EACH(M, x.v[i][j] = add_parts(parts, step, blocks, &Part::dqT, at + i * NR + j * W));
      // dqk is lower triangular: its first W rows in the panel's columns have only the first vector, the transpose's last only the second
      mul_columns(x, ch.k + d, p.ldk, f.dqkT + panel, middle);
      mul<1, 2>(x, ch.k + middle * p.ldk + d, 1, p.ldk, f.dqkT + panel + middle * NR, end - middle);
      if (!first) EACH(M, x.v[i][j] += load(dqT + at + i * NR + j * W));
      put(dqT + at, x);
      EACH(M, x.v[i][j] = add_parts(parts, step, blocks, &Part::dkT, at + i * NR + j * W));
      mul<0, 1>(x, ch.q + start * p.ldk + d, 1, p.ldk, f.dqk + panel + start * NR, middle - start);
      mul_columns(x, ch.q + middle * p.ldk + d, p.ldk, f.dqk + panel + middle * NR, ch.c - middle);
      if (keys) mul_columns(x, ch.k + d, p.ldk, f.dkk + panel, ch.c);
      if (!first) EACH(M, x.v[i][j] += load(dkT + at + i * NR + j * W));
      put(dkT + at, x);
    });
  }
}

// dq or dk through the normalisation, to the caller, W tokens at a time. dT: the gradient, transposed; x: q or k.
inline void finish_rows(const Problem& p, const Task& task, const Chunk& ch, const Finish& f, const float* dT, const float* x,
                        const float* inverse, void* to) {
  const int64_t K = p.K, ldk = p.ldk, stride[3] = {p.a.T * p.a.H * K, p.a.H * K, K};
  for (int64_t t = 0; t < ch.c; t += W) {
    const int64_t n = least<int64_t>(W, ch.c - t), at = task.row(stride, ch.t + t, task.kh);
    transpose(dT + t / NR * K * NR + t % NR, NR, f.rows, ldk, K, n);
    for (int64_t i = 0; i < n; ++i) {
      const float *q = x + (t + i) * ldk, scale = p.a.qk_norm ? fabsf(inverse[t + i]) : 1;
      float* d = f.rows + i * ldk;
      for (int64_t j = K; j % W; ++j) d[j] = 0;
      V along = V{};
      if (p.a.qk_norm && inverse[t + i] > 0)  // below eps the norm was a constant
        for (int64_t j = 0; j < K; j += W) along += load(q + j) * load(d + j);
      along = splat(sum(along));
      auto row = [&](int64_t j) __attribute__((always_inline)) { return splat(scale) * (load(d + j) - along * load(q + j)); };
      if (p.past) {
        for (int64_t j = 0; j < K; j += W) stream((float*)to + at + i * stride[1] + j, row(j));
      } else {
        for (int64_t j = 0; j < K; j += W) store(d + j, row(j));
        store_row(p.dtype, to, at + i * stride[1], d, K);
      }
    }
  }
}

// The memory of a sequence of one key head, or of several that are taken together.
struct Lane {
  Chunk chunks[MOST_CHUNKS];
  Part parts[4][MOST_CHUNKS];
  float *dqT[MOST_CHUNKS], *dkT[MOST_CHUNKS];
  float* adjoint;  // [heads][S and R][state], of value heads

  void carve(Arena& m, const Problem& p, int64_t blocks, int64_t heads, bool split) {
    // of chunks that are finished one by one, parts and gradients share their memory
    const bool parts_last = split || blocks > 1, keys_last = split || p.a.HV > p.a.H;
    for (int i = 0; i < p.segments.most_chunks(); ++i) {
      chunks[i].carve(m, p, true);
      for (int64_t b = 0; b < blocks; ++b) {
        if (i == 0 || parts_last) parts[b][i].carve(m, p);
        else parts[b][i] = parts[b][0];
      }
      dqT[i] = i == 0 || keys_last ? m.floats(C * p.K) : dqT[0];
      dkT[i] = i == 0 || keys_last ? m.floats(C * p.K) : dkT[0];
    }
    adjoint = m.floats(heads * 2 * p.state);
  }
};

// The steps of backward for a lane: sequence `n` of key head `kh`. They run one after the other (backward_task) or
// over several lanes in parallel (backward_split).
struct Steps {
  const Problem& p;
  int64_t G, blocks;

  Task task(int64_t lane, int64_t g) const { return Task(p, lane / p.a.H, lane % p.a.H * G + g); }
  int count(const Task& t, int64_t segment) const {
    return segment >= t.segments ? 0 : (int)((t.end(p, segment) - p.segments.begin(segment) + C - 1) / C);
  }
  int64_t first_panel(int64_t b) const { return p.strips * b / blocks; }

  // at: the place of the value head in the lane
  void states_in(Lane& l, const Task& t, int64_t at, int64_t s) const {
    float* d = l.adjoint + at * 2 * p.state + s * p.K * NR;
    pack_state(p, state_of(p, p.a.dS, t), d, s);
    if (p.fitted) pack_state(p, state_of(p, p.a.dR, t), d + p.state, s);
  }
  void states_out(Lane& l, const Task& t, int64_t at, int64_t s) const {
    float* d = l.adjoint + at * 2 * p.state + s * p.K * NR;
    if (p.a.dS0) unpack_state(p, d, state_of(p, p.a.dS0, t), s);
    if (p.a.dR0 && p.fitted) unpack_state(p, d + p.state, state_of(p, p.a.dR0, t), s);
  }
  void prepare(Lane& l, const Task& t, int64_t segment, int i) const {
    RLA_ISA::prepare(p, t, l.chunks[i], p.segments.begin(segment) + i * C, true, true);
  }
  template <class F, class G>
  void sweep(Lane& l, const Task& t, int64_t segment, int64_t at, int64_t b, const Sweep& w, const Task& next, int64_t after,
             F&& begin, G&& done) const {
    float* d = l.adjoint + at * 2 * p.state;
    int64_t first = first_panel(b);
    sweep_segment(p, t, l.chunks, count(t, segment), l.parts[b], w, d, d + p.state, segment, first,
                  first_panel(b + 1) - first, next, after, begin, done);
  }
  void finish(Lane& l, const Task& t, int64_t g, int i, const Finish& f) const {
    const Chunk& ch = l.chunks[i];
    const Part* parts = &l.parts[0][i];
    finish_pairs(p, t, ch, parts, MOST_CHUNKS, blocks, f);
    finish_keys(p, ch, parts, MOST_CHUNKS, blocks, f, l.dqT[i], l.dkT[i], g == 0);
    if (g + 1 < G) return;
    finish_rows(p, t, ch, f, l.dqT[i], ch.q, ch.iq, p.a.dq);
    finish_rows(p, t, ch, f, l.dkT[i], ch.k, ch.ik, p.a.dk);
  }
};

inline void worker_scratch(const Problem& p, Sweep& w, Finish& f, Fetch& fetch, int64_t strips) {
  Arena m;
  for (int pass = 0; pass < 2; ++pass) {
    if (pass) m = Arena{scratch_own.get(m.used), 0};
    w.carve(m, p, strips);
    f.carve(m, p);
  }
  w.fetch = &fetch;
}

// `heads` key heads from `lane` on, a segment of each value head in turn.
inline void backward_task(const Steps& steps, Lane& l, int64_t lane, int64_t heads, const Sweep& w, const Finish& f) {
  const Problem& p = steps.p;
  const int64_t count = heads * steps.G;
  auto task = [&](int64_t at) { return steps.task(lane + at / steps.G, at % steps.G); };
  for (int64_t at = 0; at < count; ++at)
    for (int64_t s = 0; s < p.strips; ++s) steps.states_in(l, task(at), at, s);
  for (int64_t segment = task(0).segments - 1; segment >= 0; --segment) {
    for (int64_t at = 0; at < count; ++at) {
      const Task t = task(at), next = task((at + 1) % count);
      const int64_t after = at + 1 < count ? segment : segment - 1;
      for (int64_t b = 0; b < steps.blocks; ++b)
        steps.sweep(l, t, segment, at, b, w, next, after, [&](int i) { if (b == 0) steps.prepare(l, t, segment, i); },
                    [&](int i) { if (b + 1 == steps.blocks) steps.finish(l, t, at % steps.G, i, f); });
    }
  }
  for (int64_t at = 0; at < count; ++at)
    for (int64_t s = 0; s < p.strips; ++s) steps.states_out(l, task(at), at, s);
}

// Few lanes: chunks in parallel, then blocks of columns, then chunks again.
inline void backward_split(const Steps& steps, Lane* lanes, int64_t count, int threads) {
  const Problem& p = steps.p;
  int64_t longest = 0;
  for (int64_t n = 0; n < count; ++n) longest = most(longest, steps.task(n, 0).segments);
#pragma omp parallel num_threads(threads)
  {
    FlushDenormals flush;
    Sweep w;
    Finish f;
    Fetch fetch;
    worker_scratch(p, w, f, fetch, (p.strips + steps.blocks - 1) / steps.blocks);
    const int64_t panels = count * steps.G * p.strips, blocks = count * steps.blocks;
    const int64_t most_chunks = p.segments.most_chunks(), chunks = count * most_chunks;
#pragma omp for
    for (int64_t i = 0; i < panels; ++i) {
      const int64_t n = i / p.strips / steps.G, g = i / p.strips % steps.G;
      steps.states_in(lanes[n], steps.task(n, g), g, i % p.strips);
    }
    for (int64_t segment = longest - 1; segment >= 0; --segment) {
      for (int64_t g = 0; g < steps.G; ++g) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < chunks; ++i) {
          const int64_t n = i / most_chunks, at = i % most_chunks;
          const Task t = steps.task(n, g);
          if (at < steps.count(t, segment)) steps.prepare(lanes[n], t, segment, (int)at);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t n = i / steps.blocks;
          const Task t = steps.task(n, g);
          if (steps.count(t, segment))
            steps.sweep(lanes[n], t, segment, g, i % steps.blocks, w, t, segment - 1, [](int) {}, [](int) {});
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < chunks; ++i) {
          const int64_t n = i / most_chunks, at = i % most_chunks;
          const Task t = steps.task(n, g);
          if (at < steps.count(t, segment)) steps.finish(lanes[n], t, g, (int)at, f);
        }
      }
    }
#pragma omp for
    for (int64_t i = 0; i < panels; ++i) {
      const int64_t n = i / p.strips / steps.G, g = i / p.strips % steps.G;
      steps.states_out(lanes[n], steps.task(n, g), g, i % p.strips);
    }
    end_streams();
  }
}

inline void backward(const Args& a) {
  Problem p(a);
  const int64_t count = a.N * a.H;
  if (!count) return;
  // blocks of value columns, so that about eight units of work can run at once: a function of shapes only, because
  // dq, dk and the gates' gradients are sums over the blocks
  Steps steps{p, a.HV / a.H, most<int64_t>(1, least<int64_t>(least<int64_t>(4, p.strips), 8 / count))};
  int threads = (int)a.threads;
  for (void* x : {a.dq, a.dk}) advise(x, p.tokens() * a.H * a.K * p.bytes());
  advise(a.dv, p.tokens() * a.HV * a.V * p.bytes());
  if ((double)p.tokens() * a.HV * p.K * p.strips * NR < SMALL / 4) threads = 1;
  const bool split = steps.blocks > 1 && count % threads;  // where lanes leave a thread without work
  Queue queue(a.H, count, steps.G * p.states() * p.state, threads);
  const int64_t lanes = split ? count : least<int64_t>(threads, count), heads = split ? 1 : queue.most;
  Lane* l = (Lane*)malloc(sizeof(Lane) * lanes);
  if (!l) abort();
  Arena m;
  for (int pass = 0; pass < 2; ++pass) {
    if (pass) m = Arena{scratch_shared.get(m.used), 0};
    for (int64_t i = 0; i < lanes; ++i) l[i].carve(m, p, steps.blocks, heads * steps.G, split);
  }
  if (split) {
    backward_split(steps, l, count, threads);
  } else {
#pragma omp parallel for schedule(static, 1) num_threads((int)lanes) if (lanes > 1)
    for (int64_t own = 0; own < lanes; ++own) {
      FlushDenormals flush;
      Sweep w;
      Finish f;
      Fetch fetch;
      worker_scratch(p, w, f, fetch, (p.strips + steps.blocks - 1) / steps.blocks);
      int64_t i;
      while (const int64_t n = queue.take(i)) backward_task(steps, l[own], i, n, w, f);
      end_streams();
    }
  }
  free(l);
}

}  // namespace RLA_ISA
