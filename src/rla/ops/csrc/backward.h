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
  float *dqT, *dkT;         // [CP][K][NR]
  float *columns;           // [C]
  float *rows;              // [W, ldk]
  Part sum;                 // of the parts of all blocks

  void carve(Arena& m, const Problem& p) {
    for (float** x : {&dqk, &dkk, &dqkT}) *x = m.floats(C * C);
    for (float** x : {&dqT, &dkT}) *x = m.floats(C * p.K);
    columns = m.floats(C);
    rows = m.floats(W * p.ldk);
    sum.carve(m, p);
  }
};

// to <- the sum of parts, in pairs: (a + b) + (c + d), without those that are null. b and d may be in a and c already.
inline void add_parts(const Problem& p, const Part& to, const Part* a, const Part* b, const Part* c = nullptr, const Part* d = nullptr) {
  auto add = [&](float* Part::*field, int64_t n) {
    for (int64_t i = 0; i < n; i += W) {
      auto pair = [&](const Part* x, const Part* y) __attribute__((always_inline)) {
        return y ? load(x->*field + i) + load(y->*field + i) : load(x->*field + i);
      };
      const V first = pair(a, b);
      store(to.*field + i, c ? first + pair(c, d) : first);
    }
  };
  for (float* Part::*field : {&Part::dqT, &Part::dkT}) add(field, C * p.K);
  add(&Part::Pu, C * C);
  if (p.fitted) add(&Part::Pw, C * C);
  if (p.delta || p.residual) add(&Part::dGp, C * C);
  for (float* Part::*field : {&Part::beta, &Part::gamma, &Part::delta, &Part::error, &Part::qS, &Part::qR, &Part::kd, &Part::r,
                              &Part::state})
    add(field, C);
}

// dqk and dkk in panels, and the gradients of the gates.
inline void finish_pairs(const Problem& p, const Task& task, const Chunk& ch, const Part& part,
                         const Finish& f) {
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
      V pu = load(part.Pu + panel);
      dqk = select(p.residual ? strict : lower, pu * (p.sum ? Dp : D), V{});
      (p.sum ? y : x) = select(p.residual ? strict : lower, pu * load(ch.Au + at), V{});
      if (p.fitted) {
        V pw = load(part.Pw + panel);
        V A = select(lower, pw * load(ch.A + at), V{});
        rows_go += A;
        x += go * A;
        dqk += select(lower, go * pw * D, V{});
      }
      rows_x += x;
      rows_y += y;
      x += y;
      if (keys) {
        V g = load(part.dGp + panel);
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
    const float qS = part.qS[i], qR = part.qR[i];
    dbp[i] = sum(rows_y);
    db[i] = sum(rows_x);
    if (p.residual) dbp[i] += part.error[i];
    if (p.sum) dbp[i] += ch.Ep[i] * qS;
    else db[i] += ch.E[i] * qS;
    if (p.fitted) db[i] += ch.E[i] * ch.go[i] * qR;
    if (p.delta) db[i] += part.delta[i];
    dgamma[i] = 0;
    if (p.fitted) dgamma[i] = part.gamma[i];
    if (p.fitted && p.gated) dgamma[i] += ch.E[i] * qR + sum(rows_go);
    if (p.residual && !p.fitted) {
      const float r = part.r[i];
      if (p.gated) dgamma[i] = ch.A[i * (C + 1)] * r;
      f.dqk[i / NR * C * NR + i * NR + i % NR] += ch.go[i] * r;
    }
    const int64_t at = task.gate(p, ch.t + i);
    if (a.dbeta) a.dbeta[at] = part.beta[i];
    if (a.dgamma && p.residual) a.dgamma[at] = dgamma[i];
  }
  if (!a.dlog_alpha) return;
  float end = ch.decay * part.state[0];
  for (int64_t i = 0; i < ch.c; ++i) {
    float dL = ch.L[i] * part.kd[i];
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
inline void finish_keys(const Problem& p, const Chunk& ch, const Part& part, const Finish& f, float* dqT,
                        float* dkT, bool first) {
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
      EACH(M, x.v[i][j] = load(part.dqT + at + i * NR + j * W));
      // dqk is lower triangular: its first W rows in the panel's columns have only the first vector, the transpose's last only the second
      mul_columns(x, ch.k + d, p.ldk, f.dqkT + panel, middle);
      mul<1, 2>(x, ch.k + middle * p.ldk + d, 1, p.ldk, f.dqkT + panel + middle * NR, end - middle);
      if (!first) EACH(M, x.v[i][j] += load(dqT + at + i * NR + j * W));
      put(dqT + at, x);
      EACH(M, x.v[i][j] = load(part.dkT + at + i * NR + j * W));
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

// The memory of a sequence of one key head, or of several that are taken together: what threads share.
struct Lane {
  // Chunks of a segment; where threads share the lane, of several segments, and while those are swept the last ones are finished.
  static constexpr int SLOTS = 8;
  Part parts[2][4][SLOTS];
  float *dqT[SLOTS], *dkT[SLOTS];  // sums over the value heads of a key head, if there are several
  float* adjoint;                  // [heads][S and R][state], of value heads

  void carve(Arena& m, const Problem& p, int64_t blocks, int64_t heads, bool split) {
    const int slots = split ? SLOTS : (int)p.segments.most_chunks();
    for (int half = 0; half < (split ? 2 : 1); ++half)
      for (int64_t b = 0; b < blocks; ++b)
        for (int i = 0; i < slots; ++i) {
          if (i == 0 || blocks > 1) parts[half][b][i].carve(m, p);
          else parts[half][b][i] = parts[half][b][0];  // chunks are finished one by one
        }
    for (int i = 0; i < slots && p.a.HV > p.a.H; ++i) dqT[i] = m.floats(C * p.K), dkT[i] = m.floats(C * p.K);
    adjoint = m.floats(heads * 2 * p.state);
  }
};
static_assert(MOST_CHUNKS <= Lane::SLOTS, "a segment fits");

// The memory of a thread.
struct Worker {
  Chunk chunks[Lane::SLOTS];
  Sweep w;
  Finish f;
  Fetch fetch;

  Worker(const Problem& p, int slots, int64_t strips) {
    Arena m;
    for (int pass = 0; pass < 2; ++pass) {
      if (pass) m = Arena{scratch_own.get(m.used), 0};
      for (int i = 0; i < slots; ++i) chunks[i].carve(m, p, true);
      w.carve(m, p, strips);
      f.carve(m, p);
    }
    w.fetch = &fetch;
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
  int64_t most_panels() const { return (p.strips + blocks - 1) / blocks; }

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
  // chunks, parts: of the segment
  template <class F, class G>
  void sweep(Lane& l, const Chunk* chunks, const Part* parts, const Task& t, int64_t segment, int64_t at, int64_t b, const Sweep& w,
             const Task& next, int64_t after, F&& begin, G&& done) const {
    float* d = l.adjoint + at * 2 * p.state;
    int64_t first = first_panel(b);
    sweep_segment(p, t, chunks, count(t, segment), parts, w, d, d + p.state, segment, first, first_panel(b + 1) - first, next, after,
                  begin, done);
  }
  // added(j): whether the sum of the parts of blocks 2 j and 2 j + 1 is in the first of them
  template <class F>
  void finish(Lane& l, const Chunk& ch, int half, int slot, const Task& t, int64_t g, const Finish& f, F&& added) const {
    auto part = [&](int64_t b) { return b < blocks && !(b % 2 && added(b / 2)) ? &l.parts[half][b][slot] : nullptr; };
    if (part(1) || part(2)) add_parts(p, f.sum, part(0), part(1), part(2), part(3));
    const Part& sum = part(1) || part(2) ? f.sum : *part(0);
    float *dqT = G > 1 ? l.dqT[slot] : f.dqT, *dkT = G > 1 ? l.dkT[slot] : f.dkT;
    finish_pairs(p, t, ch, sum, f);
    finish_keys(p, ch, sum, f, dqT, dkT, g == 0);
    if (g + 1 < G) return;
    finish_rows(p, t, ch, f, dqT, ch.q, ch.iq, p.a.dq);
    finish_rows(p, t, ch, f, dkT, ch.k, ch.ik, p.a.dk);
  }
};

// `heads` key heads from `lane` on, a segment of each value head in turn.
inline void backward_task(const Steps& steps, Lane& l, int64_t lane, int64_t heads, Worker& own) {
  const Problem& p = steps.p;
  const int64_t count = heads * steps.G;
  auto task = [&](int64_t at) { return steps.task(lane + at / steps.G, at % steps.G); };
  for (int64_t at = 0; at < count; ++at)
    for (int64_t s = 0; s < p.strips; ++s) steps.states_in(l, task(at), at, s);
  for (int64_t segment = task(0).segments - 1; segment >= 0; --segment) {
    for (int64_t at = 0; at < count; ++at) {
      const Task t = task(at), next = task((at + 1) % count);
      const int64_t after = at + 1 < count ? segment : segment - 1;
      auto begin = [&](int i) { prepare(p, t, own.chunks[i], p.segments.begin(segment) + i * C, true, true); };
      auto done = [&](int i) { steps.finish(l, own.chunks[i], 0, i, t, at % steps.G, own.f, [](int64_t) { return false; }); };
      for (int64_t b = 0; b < steps.blocks; ++b)
        steps.sweep(l, own.chunks, l.parts[0][b], t, segment, at, b, own.w, next, after, [&](int i) { if (b == 0) begin(i); },
                    [&](int i) { if (b + 1 == steps.blocks) done(i); });
    }
  }
  for (int64_t at = 0; at < count; ++at)
    for (int64_t s = 0; s < p.strips; ++s) steps.states_out(l, task(at), at, s);
}

// Few lanes: a thread has some of all lanes' blocks of columns, which it sweeps through several segments of a value head in a turn;
// then the turn's chunks are finished by whoever comes. What a thread leaves for another goes from core to core, which costs more
// than to prepare a chunk in each thread, and to add up a thread's own parts first.
inline void backward_split(const Steps& steps, Lane* lanes, int64_t count, int threads) {
  const Problem& p = steps.p;
  const int64_t G = steps.G, blocks = steps.blocks, panels = count * G * p.strips;
  int64_t longest = 0, together = 1;  // segments of the longest sequence, and of a turn
  for (int64_t n = 0; n < count; ++n) longest = most(longest, steps.task(n, 0).segments);
  while (p.segments.most_tokens(together + 1) <= Lane::SLOTS * C) ++together;
  const int64_t turns = (longest + together - 1) / together * G;
#pragma omp parallel num_threads(threads)
  {
    FlushDenormals flush;
    Worker own(p, Lane::SLOTS, steps.most_panels());
    const int64_t n_threads = omp_get_num_threads(), units = count * blocks;
    auto begin_of = [&](int64_t thread) { return units * thread / n_threads; };
    auto owner = [&](int64_t unit) {
      int64_t thread = 0;
      while (begin_of(thread + 1) <= unit) ++thread;
      return thread;
    };
    const int64_t thread = omp_get_thread_num(), first_unit = begin_of(thread), last_unit = begin_of(thread + 1);
    int64_t holds[Lane::SLOTS];  // whose chunks of this turn the thread has
    auto each_panel = [&](auto&& f) {
#pragma omp for
      for (int64_t i = 0; i < panels; ++i) {
        const int64_t n = i / p.strips / G, g = i / p.strips % G;
        f(lanes[n], steps.task(n, g), g, i % p.strips);
      }
    };
    each_panel([&](Lane& l, const Task& t, int64_t g, int64_t s) { steps.states_in(l, t, g, s); });
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int half = (int)(turn % 2);
      const int64_t g = turn % G, first = (turns - 1 - turn) / G * together, start = p.segments.begin(first);
      const auto added = [&](int64_t n, int64_t j) {
        return 2 * j + 1 < blocks && owner(n * blocks + 2 * j) == owner(n * blocks + 2 * j + 1);
      };
      for (int64_t& n : holds) n = -1;
      const auto chunk = [&](int64_t n, const Task& t, int64_t slot) -> const Chunk& {
        Chunk& ch = own.chunks[slot];
        if (holds[slot] != n) prepare(p, t, ch, start + slot * C, true, true);
        holds[slot] = n;
        return ch;
      };
      for (int64_t unit = first_unit, end; unit < last_unit; unit = end) {
        const int64_t n = unit / blocks;
        end = least(last_unit, (n + 1) * blocks);
        const Task t = steps.task(n, g);
        for (int64_t segment = least(first + together, t.segments) - 1; segment >= first; --segment) {
          const int64_t slot = (p.segments.begin(segment) - start) / C;
          for (int64_t u = unit; u < end; ++u) {
            Part* parts = lanes[n].parts[half][u % blocks] + slot;
            auto begin = [&](int i) { chunk(n, t, slot + i); };
            steps.sweep(lanes[n], own.chunks + slot, parts, t, segment, g, u % blocks, own.w, t, segment - 1, begin, [](int) {});
          }
          for (int64_t j = 0; 2 * j < blocks; ++j)
            if (n * blocks + 2 * j >= unit && n * blocks + 2 * j < end && added(n, j))
              for (int64_t i = slot; i < slot + steps.count(t, segment); ++i) {
                const Part& sum = lanes[n].parts[half][2 * j][i];
                add_parts(p, sum, &sum, &lanes[n].parts[half][2 * j + 1][i]);
              }
        }
      }
#pragma omp barrier
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t i = 0; i < count * Lane::SLOTS; ++i) {
        const int64_t n = i / Lane::SLOTS, slot = i % Lane::SLOTS;
        const Task t = steps.task(n, g);
        if (first < t.segments && start + slot * C < t.end(p, least(first + together, t.segments) - 1))
          steps.finish(lanes[n], chunk(n, t, slot), half, (int)slot, t, g, own.f, [&](int64_t j) { return added(n, j); });
      }
    }
#pragma omp barrier
    each_panel([&](Lane& l, const Task& t, int64_t g, int64_t s) { steps.states_out(l, t, g, s); });
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
    for (int64_t i = 0; i < lanes; ++i) {
      FlushDenormals flush;
      Worker own(p, (int)p.segments.most_chunks(), steps.most_panels());
      int64_t lane;
      while (const int64_t n = queue.take(lane)) backward_task(steps, l[i], lane, n, own);
      end_streams();
    }
  }
  free(l);
}

}  // namespace RLA_ISA
