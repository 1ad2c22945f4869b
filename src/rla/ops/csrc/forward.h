// Forward: one pass over the chunks of a sequence for S and R together, a panel of value columns at a time.
//
//     pS = E' * (k S) + G' u                 what S, before a token, predicts for it
//     x = v - [delta] alpha pS               u = beta * x
//     e = v - pS                             r = psi(e)
//     pR = E' * (k R) + G' w
//     y = r - [delta] alpha pR               w = gamma * y
//     o = eu * (q S) + Au u + go * E * (q R) + Ag w
//     S <- exp(b_C) S + k^T (L * u)          R <- exp(b_C) R + k^T (L * w)
//
// With bfloat16 operands (halves.h) the products with a state and those of the last line have S, R, L u and L w rounded to
// bfloat16; q and k are exact, since their norms are applied afterwards. The triangular products stay in float32. On AMX two
// chunks share a state: where the second asks for q S it gets
//
//     fade * (q S + (q k'^T) (L' u' / fade))     k', L', u' and fade, the decay, of the first chunk
//
// and the last line absorbs both at once.
#pragma once
#include "ring.h"

namespace RLA_ISA {

INLINE V psi(V e, const Problem& p) {
  if (p.a.loss == HUBER) {
    V c = splat((float)p.a.clip);
    return select(e > c, c, select(e < -c, -c, e));  // a NaN compares false and passes
  }
  return p.a.loss == LOGCOSH ? tanh(e) : e;
}

// What is made of a panel of columns of one chunk: the output; in backward at first what the states absorb and what they predict,
// unless forward has kept it; and at last, from the predictions, x, y and e.
enum Pass { OUTPUT, STATES, ERRORS };

// What a panel of columns of one chunk leaves behind, each [C][NR].
struct Strip {
  float *u, *w, *uL, *wL;  // uL = L * u; in forward for each chunk of a group
  float *x, *y, *e;        // of ERRORS
  float *pS, *pR;          // predictions, in backward
  // of bfloat16 operands: k S ... q R without the factors sk and sq, and right operands: what the chunk before in the group
  // leaves behind
  float *rkS = nullptr, *rkR = nullptr, *qS = nullptr, *qR = nullptr;
  uint16_t *u16 = nullptr, *w16 = nullptr;
  Fetch* fetch;  // what the next chunk touches
};

// The right operand behind a panel of a running state.
inline uint16_t* operand_of(const Problem& p, float* S) { return (uint16_t*)(S + p.K * NR); }

// x = rows of q or k times a panel of a state. With bfloat16 operands `ready` holds the product up to the factors `scale`.
template <int M>
INLINE void times_state(Tile<M>& x, const Problem& p, const float* rows, const float* S, const float* ready,
                        const float* scale, Fetch& fetch) {
  if constexpr (HALVES) {
    fetch.next();
    get(x, ready);
    scale_rows(x, scale);
  } else {
    clear(x);
    mul_rows(x, rows, p.ldk, S, p.K, fetch);
  }
}

// What a state predicts for the tokens of a tile: x = E' * (k S) + G' u, where u = rate * (v - [delta] alpha x) of earlier tokens.
// u: the rows before the tile. kept: the caller's pS or pR, to which forward writes it for backward; panel: where backward has it
// at hand, in panel s.
template <Pass PASS, int M>
INLINE void predict(Tile<M>& x, const Problem& p, const Task& task, const Chunk& ch, const Tile<M>& v, const float* rate,
                    const float* decayed_rate, const float* u, const float* S, const float* ready, float* kept, float* panel,
                    int64_t s, int64_t i0, Fetch& fetch) {
  const int64_t stride[3] = {p.a.T * p.a.HV * p.V, p.a.HV * p.V, p.V};
  const int64_t at = task.row(stride, ch.t + i0, task.h) + s * NR, columns = p.V - s * NR;
  if (PASS != OUTPUT && p.kept) {
    get_input(x, F32, kept, at, stride[1], columns);
    if (PASS == ERRORS) put(panel + i0 * NR, x);
    return;
  }
  if (PASS == ERRORS) return get(x, panel + i0 * NR);
  const float *G = ch.Gp + i0 * C, *diagonal = G + i0;
  times_state(x, p, ch.k + i0 * p.ldk, S, ready + i0 * NR, ch.sk + i0, fetch);
  scale_rows(x, ch.Ep + i0);
  mul_rows(x, G, C, u, i0);
  if (p.delta) solve_lower<true>(x, v, diagonal, C, rate + i0, decayed_rate + i0);
  else solve_lower<false>(x, v, diagonal, C, rate + i0, decayed_rate + i0);
  if (PASS == STATES) put(panel + i0 * NR, x);
  else if (kept) put_output(x, F32, kept, at, stride[1], columns, p.past_saved);
}

template <Pass PASS, int M>
INLINE void strip_tile(const Problem& p, const Task& task, const Chunk& ch, Strip& st, const float* S,
                       const float* R, int64_t s, int64_t i0) {
  const Args& a = p.a;
  const int64_t at = i0 * NR, columns = p.V - s * NR;
  const float *q = ch.q + i0 * p.ldk, *E = ch.E + i0, *alpha = ch.alpha + i0;
  const bool earlier = PASS == OUTPUT || (PASS == STATES && !p.kept);  // u and w of earlier tokens are asked for
  Tile<M> v, x, r;
  auto leave = [&](float* error, const float* rate, float* u, float* uL) __attribute__((always_inline)) {
    if (PASS == ERRORS) return put(error + at, x);
    scale_rows(x, rate + i0);
    if (earlier) put(u + at, x);
    put(uL + at, x, ch.L + i0);
  };
  get_input(v, p.dtype, a.v, task.row(a.v_stride, ch.t + i0, task.h) + s * NR, a.v_stride[1], columns);
  if (p.delta || p.residual) predict<PASS>(x, p, task, ch, v, ch.beta, ch.ab, st.u, S, st.rkS, a.pS, st.pS, s, i0, *st.fetch);
  if (p.residual) {
    EACH(M, r.v[i][j] = v.v[i][j] - x.v[i][j]);
    if (PASS == ERRORS) put(st.e + at, r);
    EACH(M, r.v[i][j] = psi(r.v[i][j], p));
  }
  if (p.delta) EACH(M, x.v[i][j] = v.v[i][j] - splat(alpha[i]) * x.v[i][j]);
  else x = v;
  leave(st.x, ch.beta, st.u, st.uL);
  if (p.fitted) {
    if (p.delta) {
      predict<PASS>(x, p, task, ch, r, ch.gamma, ch.ag, st.w, R, st.rkR, a.pR, st.pR, s, i0, *st.fetch);
      EACH(M, x.v[i][j] = r.v[i][j] - splat(alpha[i]) * x.v[i][j]);
    } else {
      x = r;
    }
    leave(st.y, ch.gamma, st.w, st.wL);
  }
  if (PASS != OUTPUT) return;
  Tile<M> o;
  times_state(o, p, q, S, st.qS + at, ch.sq + i0, *st.fetch);
  scale_rows(o, ch.eu + i0);
  if (p.fitted) {
    times_state(x, p, q, R, st.qR + at, ch.sq + i0, *st.fetch);
    EACH(M, o.v[i][j] += splat(E[i] * ch.go[i0 + i]) * x.v[i][j]);
    mul_sum<2>(o, {ch.Au + i0 * C, ch.Ag + i0 * C}, C, 1, {st.u, st.w}, i0);
    mul_lower<0>(o, ch.Ag + i0 * C + i0, C, st.w + at);
  } else {
    mul_rows(o, ch.Au + i0 * C, C, st.u, i0);
  }
  if (p.residual) mul_lower<1>(o, ch.Au + i0 * C + i0, C, st.u + at);
  else mul_lower<0>(o, ch.A + i0 * C + i0, C, st.u + at);
  if (p.residual && !p.fitted) {
    EACH(M, o.v[i][j] += splat(ch.go[i0 + i] * ch.A[(i0 + i) * (C + 1)]) * r.v[i][j]);
  }
  const int64_t o_stride[3] = {a.T * a.HV * a.V, a.HV * a.V, a.V};
  put_output(o, p.dtype, a.o, task.row(o_stride, ch.t + i0, task.h) + s * NR, o_stride[1], columns, p.past);
}

// to = decay * from + k^T u, one panel [K][NR]. copy: where it is saved too, or null.
inline void absorb(const Problem& p, const Chunk& ch, const float* from, float* to, const float* u, float* copy, Fetch& fetch) {
  tiles(p.K, [&](auto m, int64_t d) {
    constexpr int M = decltype(m)::value;
    Tile<M> x;
    V decay = splat(ch.decay);
    EACH(M, x.v[i][j] = decay * load(from + (d + i) * NR + j * W));
    if (ch.turned) mul_panels(x, ch.kT + d * NR, p.K * NR, u, CP, fetch);
    else mul_columns(x, ch.k + d, p.ldk, u, ch.c, fetch);
    put(to + d * NR, x);
    if (copy) put_past(copy + d * NR, x, NR, p.past_saved);
  });
}

// Rows of block n of a running state's panel: S <- f(S, row of the block, vector), and their part of the operand.
template <class F> INLINE void renew(const Problem& p, float* S, int64_t n, Fetch& fetch, F&& f) {
  const int64_t rows = least(DEPTH, p.K - n * DEPTH);
  uint16_t* to = operand_of(p, S) + n * RIGHT;
  S += n * DEPTH * NR;
  auto each_pair = [&](auto whole) __attribute__((always_inline)) {
    auto row = [&](int64_t d, int j) __attribute__((always_inline)) {
      if (!whole && d >= rows) return V{};
      const V x = f(load(S + d * NR + j * W), d, j);
      store(S + d * NR + j * W, x);
      return x;
    };
    for (int64_t d = 0; d < DEPTH; d += 2) {
      fetch.next();
      for (int j = 0; j < NV; ++j) put_pair(to, d, j, row(d, j), row(d + 1, j));
    }
  };
  if (rows == DEPTH) each_pair(Int<1>{});
  else each_pair(Int<0>{});
}
inline void make_operand(const Problem& p, float* S) {
  Fetch none;
  for (int64_t n = 0; n < p.blocks; ++n) renew(p, S, n, none, [](V x, int64_t, int) { return x; });
}

// What the tokens of a chunk leave in a state, times a factor, as a right operand; that of k^T is without the norms.
inline void put_updates(uint16_t* to, const Chunk& ch, const float* uL, float factor) {
  for (int64_t i = 0; i < C; i += 2)
    for (int j = 0; j < NV; ++j) {
      auto row = [&](int64_t i) { return i < ch.c ? load(uL + i * NR + j * W) * splat(ch.ik[i] * factor) : V{}; };
      put_pair(to, i, j, row(i), row(i + 1));
    }
}

// absorb on tiles, in place, for all chunks of a group. uL: of each.
inline void absorb_tiles(const Problem& p, const Chunk* group, int count, float* S, const float* uL, float* copy, Fetch& fetch) {
  alignas(64) uint16_t b[GROUP * RIGHT];
  alignas(64) float x[DEPTH * NR];
  float decay = 1;
  for (int i = count - 1; i >= 0; --i) {
    put_updates(b + i * RIGHT, group[i], uL + i * C * NR, decay);
    decay *= group[i].decay;
  }
  for (int64_t n = 0; n < p.blocks; ++n) {
    multiply(x, NR, {group->k16L + n * GROUP * LEFT, b, count});
    renew(p, S, n, fetch, [&](V s, int64_t d, int j) {
      s = splat(decay) * s + load(x + d * NR + j * W);
      const int64_t at = (n * DEPTH + d) * NR + j * W;
      if (copy && p.past_saved) stream(copy + at, s);
      else if (copy) store(copy + at, s);
      return s;
    });
  }
}

template <Pass PASS>
inline void strip_tiles(const Problem& p, const Task& task, const Chunk& ch, Strip& st, const float* S,
                        const float* R, int64_t s) {
  auto tile = [&](auto m, int64_t i0) { strip_tile<PASS, decltype(m)::value>(p, task, ch, st, S, R, s, i0); };
  if (PASS == ERRORS || (PASS == STATES && p.kept)) {  // nothing is multiplied: few rows at a time, which fit in the registers
    for (int64_t i0 = 0; i0 + 1 < ch.c; i0 += 2) tile(Int<2>{}, i0);
    if (ch.c % 2) tile(Int<1>{}, ch.c - 1);
  } else {
    tiles(ch.c, tile);
  }
}

// Panel s of a group of chunks forward; the states' panels S and R are updated in place, and saved for backward.
inline void forward_strip(const Problem& p, const Task& task, const Chunk* group, int count, Strip& st, float* S, float* R,
                          int64_t s) {
  const int64_t next = group->t + GROUP * C;
  const int64_t segment = p.a.saved && next < task.length ? p.segments.at(next) : -1;
  float *const S_copy = segment > 0 ? task.saved(p, segment) + s * p.K * NR : nullptr;
  float *const R_copy = S_copy ? S_copy + p.state : nullptr;
  if constexpr (HALVES) {
    for (int i = 0; i < count; ++i) {
      const Chunk& ch = group[i];
      const bool gone = i && group[i - 1].decay < GONE;
      auto times = [&](float* to, const uint16_t* rows, float* state, const uint16_t* products, const uint16_t* updates) {
        multiply(to, NR, {rows, operand_of(p, state), gone ? 0 : p.blocks}, {products, updates, i ? 1 : 0});
      };
      times(st.qS, ch.q16, S, ch.qx, st.u16);
      if (p.delta || p.residual) times(st.rkS, ch.k16, S, ch.kx, st.u16);
      if (p.fitted) times(st.qR, ch.q16, R, ch.qx, st.w16);
      if (p.fitted && p.delta) times(st.rkR, ch.k16, R, ch.kx, st.w16);
      Strip own = st;
      own.uL += i * C * NR, own.wL += i * C * NR;
      strip_tiles<OUTPUT>(p, task, ch, own, S, R, s);
      if (i + 1 == count) break;
      put_updates(st.u16, ch, own.uL, 1 / group[i + 1].fade);
      if (p.fitted) put_updates(st.w16, ch, own.wL, 1 / group[i + 1].fade);
    }
    absorb_tiles(p, group, count, S, st.uL, S_copy, *st.fetch);
    if (p.fitted) absorb_tiles(p, group, count, R, st.wL, R_copy, *st.fetch);
  } else {
    strip_tiles<OUTPUT>(p, task, *group, st, S, R, s);
    absorb(p, *group, S, S, st.uL, S_copy, *st.fetch);
    if (p.fitted) absorb(p, *group, R, R, st.wL, R_copy, *st.fetch);
  }
}

// A panel of a running state from one of the caller's, or zero.
inline void start_state(const Problem& p, const float* x, float* S, int64_t s) {
  pack_state(p, x, S, s);
  if constexpr (HALVES) make_operand(p, S);
}

inline Strip forward_scratch(Arena& m) {
  Strip st = {};
  for (float** x : {&st.u, &st.w}) *x = m.floats(C * NR);
  for (float** x : {&st.uL, &st.wL}) *x = m.floats(GROUP * C * NR);
  if (HALVES) {
    for (float** x : {&st.rkS, &st.qS, &st.rkR, &st.qR}) *x = m.floats(C * NR);
    for (uint16_t** x : {&st.u16, &st.w16}) *x = m.halves(RIGHT);
  }
  return st;
}

inline const float* state_of(const Problem& p, const float* x, const Task& task) {
  return x ? x + (task.n * p.a.HV + task.h) * p.K * p.V : nullptr;
}
inline float* state_of(const Problem& p, float* x, const Task& task) {
  return x ? x + (task.n * p.a.HV + task.h) * p.K * p.V : nullptr;
}

// What forward will touch in the chunks at t, in `count` panels from `first` on. heads: if it is the first of those taken in turn, how
// many they are, for their gates lie side by side; else 0.
inline void fetch_forward(Fetch& f, const Problem& p, const Task& task, int64_t t, int64_t first, int64_t count, const Ring* ring,
                          int64_t heads) {
  f.clear();
  if (t >= task.length) return;
  const int64_t o_stride[3] = {p.a.T * p.a.HV * p.V, p.a.HV * p.V, p.V};
  constexpr int64_t tokens = GROUP * C;
  const int64_t ahead = ring ? t + Ring::AHEAD * tokens : t;  // what is prepared next
  if (heads) fetch_gates(f, p, task, ahead, heads, tokens);
  fetch_keys(f, p, task, ahead, tokens);
  if (ring) ring->fetch(f, t / tokens);
  fetch_columns(f, p, task, p.a.v, p.a.v_stride, t, first, count, tokens);
  if (!p.past) fetch_columns(f, p, task, p.a.o, o_stride, t, first, count, tokens);
  // next is called in renew and in strip_tile with bfloat16 operands, else in products with a state and in absorb
  const int64_t products = 1 + (p.delta || p.residual) + p.fitted + (p.delta && p.fitted) + p.states();
  f.spread(count * (HALVES ? p.states() * p.blocks * DEPTH / 2 + tokens / MR : products * calls_of(C, p.K)));
}

// `heads` heads of one sequence from h on, `count` panels from `first` on, a group of chunks of each head in turn. ring, part:
// where threads share a head's chunks; then there is one head, and these are the panels of that part.
inline void forward_task(const Problem& p, int64_t n, int64_t h, int64_t heads, int64_t first, int64_t count, Ring* ring,
                         int64_t part) {
  Arena m;
  Ring::Group own[Ring::SLOTS];
  Strip st;
  Fetch fetch;
  float *S, *R;
  for (int pass = 0; pass < 2; ++pass) {
    if (pass) m = Arena{scratch_own.get(m.used), 0};
    if (ring) ring->carve_own(m, p, own);
    else
      for (int i = 0; i < GROUP; ++i) own[0][i].carve(m, p, false, i ? own[0] + i - 1 : nullptr);
    st = forward_scratch(m);
    S = m.floats(heads * count * p.panel);
    R = m.floats(heads * count * p.panel);
  }
  st.fetch = &fetch;
  auto each_panel = [&](int64_t g, auto&& f) {
    for (int64_t s = 0; s < count; ++s) f(S + (g * count + s) * p.panel, R + (g * count + s) * p.panel, first + s);
  };
  for (int64_t g = 0; g < heads; ++g) {
    const Task task(p, n, h + g);
    each_panel(g, [&](float* S, float* R, int64_t s) {
      start_state(p, state_of(p, p.a.S0, task), S, s);
      if (p.fitted) start_state(p, state_of(p, p.a.R0, task), R, s);
    });
  }
  const int64_t length = Task(p, n, h).length;
  for (int64_t t = 0; t < length; t += GROUP * C) {
    for (int64_t g = 0; g < heads; ++g) {
      const Task task(p, n, h + g), next(p, n, h + (g + 1) % heads);
      const int64_t after = g + 1 < heads ? t : t + GROUP * C;
      const Chunk* group = ring ? ring->take(p, task, own, t / (GROUP * C)) : own[0];
      if (!ring) prepare_group(p, task, own[0], t, p.a.saved && first == 0);
      fetch_forward(fetch, p, next, after, first, count, ring, after > t ? heads : 0);
      each_panel(g, [&](float* S, float* R, int64_t s) { forward_strip(p, task, group, task.group(t), st, S, R, s); });
      if (ring) ring->leave(t / (GROUP * C), part);
    }
  }
  for (int64_t g = 0; g < heads; ++g) {
    const Task task(p, n, h + g);
    each_panel(g, [&](float* S, float* R, int64_t s) {
      unpack_state(p, S, state_of(p, p.a.S, task), s);
      if (p.fitted) unpack_state(p, R, state_of(p, p.a.R, task), s);
    });
  }
}

// Below about this many multiply-adds waking the other threads costs more than they save.
constexpr double SMALL = 1 << 21;

inline void forward(const Args& a) {
  Problem p(a);
  const int64_t tasks = a.N * a.HV;
  int threads = (int)a.threads;
  advise(a.o, p.tokens() * a.HV * a.V * p.bytes());
  if (a.saved) advise(a.saved, p.saved() * 4);
  for (float* x : {a.pS, a.pR})
    if (x) advise(x, p.tokens() * a.HV * a.V * 4);
  if ((double)p.tokens() * a.HV * p.K * p.strips * NR < SMALL) threads = 1;
  // Few sequences and heads: a thread takes a part of a head's panels. A panel's arithmetic is the same either way.
  int64_t parts = 1;
  if (tasks < 2 * threads)
    while (parts < p.strips && tasks * parts % threads) ++parts;
  Queue queue(a.HV * parts, tasks * parts, p.strips * p.states() * p.panel, threads);
  if (parts > 1) queue.most = 1;
  Ring* rings = nullptr;
  if (parts > 1 && tasks <= threads) {  // their memory is as much as that of the threads
    rings = (Ring*)aligned_alloc(alignof(Ring), sizeof(Ring) * tasks);
    if (!rings) abort();
    memset((void*)rings, 0, sizeof(Ring) * tasks);
    Arena m;
    for (int pass = 0; pass < 2; ++pass) {
      if (pass) m = Arena{scratch_shared.get(m.used), 0};
      for (int64_t i = 0; i < tasks; ++i) {
        const int64_t chunks = Task(p, i / a.HV, i % a.HV).chunks();
        rings[i].carve(m, p, parts, (chunks + GROUP - 1) / GROUP);
      }
    }
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    // all parts of a head run at once, in the order of the queue, unless there are fewer threads than asked for
    const bool shared = rings && omp_get_num_threads() >= parts;
    FlushDenormals flush;
    [[maybe_unused]] Tiles tiles;
    int64_t i;
    while (const int64_t heads = queue.take(i)) {
      const int64_t n = i / parts, first = p.strips * (i % parts) / parts, end = p.strips * (i % parts + 1) / parts;
      forward_task(p, n / a.HV, n % a.HV, heads, first, end - first, shared ? rings + n : nullptr, i % parts);
    }
    end_streams();
  }
  free(rings);
}

}  // namespace RLA_ISA
