// Products of bfloat16 operands on AMX tiles. A product is two by two tiles, so every tile is read once.
//
// Only the operations in front know the instructions. With RLA_AMX_MODEL they are plain C++ after Intel's definition, so
// that all the rest can run on any machine.
#pragma once
#include <initializer_list>

#include "halves.h"
#if defined(RLA_AMX_MODEL)
#include "amx_model.h"
#endif

namespace RLA_ISA {

static_assert(W <= 16, "a tile has at most 16 columns");

// Chunks that forward takes together. To bring a state up to date costs more than all products with it, so what the first
// chunk leaves in it reaches the second by products of their tokens, and both are absorbed at once.
constexpr int GROUP = 2;

struct AmxConfig {  // as LDTILECFG reads it
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(AmxConfig) == 64, "LDTILECFG reads 64 bytes");

#if defined(RLA_AMX_MODEL)
using namespace amx_model;
INLINE void amx_configure(const AmxConfig& c) { configure(c.rows, c.bytes); }
#else
// Not the compiler's intrinsics: those of gcc 12 do not say which memory they read.
INLINE void amx_configure(const AmxConfig& c) { asm volatile("ldtilecfg %0" ::"m"(c)); }
INLINE void amx_release() { asm volatile("tilerelease"); }
template <int T> INLINE void amx_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> INLINE void amx_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int T> INLINE void amx_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int C, int A, int B> INLINE void amx_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#endif

// Tiles are configured for a thread while an object of this class lives: 0 to 3 sums, 4 and 5 left, 6 and 7 right.
struct Tiles {
  Tiles() {
    AmxConfig c;
    for (int i = 0; i < 8; ++i) {
      c.rows[i] = 16;
      c.bytes[i] = i == 4 || i == 5 ? 64 : 4 * W;
    }
    amx_configure(c);
  }
  ~Tiles() { amx_release(); }
};

// c[32, NR] = the sum of two products; rows of c are ldc floats apart.
inline void multiply(float* c, int64_t ldc, Factors x, Factors y = {}) {
  amx_zero<0>();
  amx_zero<1>();
  amx_zero<2>();
  amx_zero<3>();
  for (Factors f : {x, y}) {
    for (; f.blocks > 0; --f.blocks, f.left += LEFT, f.right += RIGHT) {
      amx_load<4>(f.left, 64);
      amx_load<6>(f.right, 4 * W);
      amx_dot<0, 4, 6>();
      amx_load<7>(f.right + RIGHT / 2, 4 * W);
      amx_dot<1, 4, 7>();
      amx_load<5>(f.left + LEFT / 2, 64);
      amx_dot<2, 5, 6>();
      amx_dot<3, 5, 7>();
    }
  }
  amx_store<0>(c, ldc * 4);
  amx_store<1>(c + W, ldc * 4);
  amx_store<2>(c + 16 * ldc, ldc * 4);
  amx_store<3>(c + 16 * ldc + W, ldc * 4);
}

// 0 if a product of small integers, exact in any order, comes out right on the tiles of this machine.
inline int64_t amx_check() {
  Tiles tiles;
  constexpr int64_t blocks = 3;
  uint16_t a[blocks * LEFT], rows[blocks * DEPTH];
  alignas(64) uint16_t b[blocks * RIGHT];
  float x[32][blocks * DEPTH], y[blocks * DEPTH][NR], c[32 * NR];
  uint32_t seed = 1;
  auto next = [&] { return (float)(int32_t)((seed = seed * 1664525u + 1013904223u) >> 28) - 7; };
  for (auto& row : x)
    for (float& e : row) e = next();
  for (auto& row : y)
    for (float& e : row) e = next();
  for (int64_t i = 0; i < 32; ++i) {
    for (int64_t d = 0; d < blocks * DEPTH; d += W) store_bf16(rows + d, load(x[i] + d));
    put_row(a, i, rows, blocks * DEPTH, blocks);
  }
  for (int64_t d = 0; d < blocks * DEPTH; d += 2)
    for (int j = 0; j < NV; ++j) put_pair(b, d, j, load(y[d] + j * W), load(y[d + 1] + j * W));
  multiply(c, NR, {a, b, blocks});
  for (int64_t i = 0; i < 32; ++i) {
    for (int64_t j = 0; j < NR; ++j) {
      float want = 0;
      for (int64_t d = 0; d < blocks * DEPTH; ++d) want += x[i][d] * y[d][j];
      if (c[i * NR + j] != want) return 1;
    }
  }
  return 0;
}

}  // namespace RLA_ISA
