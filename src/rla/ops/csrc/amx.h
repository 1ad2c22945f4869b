// Products of bfloat16 matrices on AMX tiles, for the instruction set level `amx`: forward of bfloat16 inputs.
//
// A left operand [32, depth] is stored in blocks of depth 32, each two tiles of 16 rows of 64 bytes. A right operand
// [depth, NR] is stored in blocks of depth 32 too, each two tiles of W columns: 16 rows of pairs, where a pair holds
// two numbers that follow each other along the depth. A product is two by two tiles, so every tile is read once.
//
// Only the operations in front know the instructions. With RLA_AMX_MODEL they are plain C++ after Intel's definition, so
// that all the rest can run on any machine.
#pragma once
#include "simd.h"
#if defined(RLA_AMX_MODEL)
#include "amx_model.h"
#endif

namespace RLA_ISA {

#if defined(RLA_AMX)
constexpr bool AMX = true;
#else
constexpr bool AMX = false;
#endif

constexpr int64_t DEPTH = 32;          // of a block
constexpr int64_t LEFT = 32 * DEPTH;   // numbers in a block of a left operand
constexpr int64_t RIGHT = DEPTH * NR;  // and in one of a right operand
static_assert(!AMX || W <= 16, "a tile has at most 16 columns");

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
struct AmxTiles {
  AmxTiles() {
    if constexpr (AMX) {
      AmxConfig c;
      for (int i = 0; i < 8; ++i) {
        c.rows[i] = 16;
        c.bytes[i] = i == 4 || i == 5 ? 64 : 4 * W;
      }
      amx_configure(c);
    }
  }
  ~AmxTiles() {
    if constexpr (AMX) amx_release();
  }
};

// The sums, 32 rows of NR columns that are ldc floats apart.
inline void amx_store_sums(float* c, int64_t ldc) {
  amx_store<0>(c, ldc * 4);
  amx_store<1>(c + W, ldc * 4);
  amx_store<2>(c + 16 * ldc, ldc * 4);
  amx_store<3>(c + 16 * ldc + W, ldc * 4);
}

// The sums += a b, over `blocks` blocks of depth.
inline void amx_add(const uint16_t* a, const uint16_t* b, int64_t blocks) {
  for (; blocks > 0; --blocks, a += LEFT, b += RIGHT) {
    amx_load<4>(a, 64);
    amx_load<6>(b, 4 * W);
    amx_dot<0, 4, 6>();
    amx_load<7>(b + RIGHT / 2, 4 * W);
    amx_dot<1, 4, 7>();
    amx_load<5>(a + LEFT / 2, 64);
    amx_dot<2, 5, 6>();
    amx_dot<3, 5, 7>();
  }
}

inline void amx_clear() {
  amx_zero<0>();
  amx_zero<1>();
  amx_zero<2>();
  amx_zero<3>();
}

// c[32, NR] = a b, over `blocks` blocks of depth.
inline void amx_multiply(float* c, int64_t ldc, const uint16_t* a, const uint16_t* b, int64_t blocks) {
  amx_clear();
  amx_add(a, b, blocks);
  amx_store_sums(c, ldc);
}

// Row i of a left operand: n numbers, then zeros. Returns their squares, W sums.
INLINE V amx_put_row(uint16_t* left, int64_t i, const uint16_t* row, int64_t n, int64_t blocks) {
  V squares = V{};
  for (int64_t b = 0; b < blocks; ++b) {
    uint16_t* to = left + b * LEFT + i * DEPTH;
    const int64_t m = most<int64_t>(0, least(DEPTH, n - b * DEPTH));
    const uint16_t* from = row + b * DEPTH;
    if (m < DEPTH) {
      uint16_t padded[DEPTH] = {};
      if (m) memcpy(padded, from, m * 2);
      memcpy(to, padded, DEPTH * 2);
      from = to;
    }
    for (int64_t d = 0; d < DEPTH; d += 2 * W) {
      const VB x = *(const VBU*)(from + d);  // W pairs
      *(VBU*)(to + d) = x;
      const V low = (V)(x << 16), high = (V)(x & 0xffff0000);
      squares += low * low + high * high;
    }
  }
  return squares;
}

// Rows d and d + 1 (d even), columns j W to j W + W - 1 of a right operand.
INLINE void amx_put_pair(uint16_t* right, int64_t d, int j, V low, V high) {
  store_pair(right + d / DEPTH * RIGHT + j * (RIGHT / 2) + d % DEPTH * W, low, high);
}

// right = the transpose of a left operand [32, depth]: 32 / NR right operands [depth, NR], one after the other.
inline void amx_transpose(const uint16_t* left, uint16_t* right, int64_t blocks) {
  for (int64_t n = 0; n < 32; n += NR)
    for (int64_t b = 0; b < blocks; ++b, right += RIGHT)
      for (int64_t j = 0; j < 2; ++j)  // W rows of 16 pairs; the pairs stay together
        transpose((const float*)(left + b * LEFT + (n + j * W) * DEPTH), 16, (float*)(right + j * (RIGHT / 2)), W, W, 16);
}

// to = the transpose of a left operand [32, depth] as left operands [32, 32], one for each block, `step` apart.
inline void amx_transpose_left(const uint16_t* left, uint16_t* to, int64_t blocks, int64_t step) {
  uint32_t pairs[16][DEPTH];  // of rows that follow each other
  for (int64_t b = 0; b < blocks; ++b, left += LEFT, to += step) {
    for (int64_t i = 0; i < 16; ++i) {
      const uint16_t *low = left + 2 * i * DEPTH, *high = low + DEPTH;
      for (int64_t d = 0; d < DEPTH; ++d) pairs[i][d] = low[d] | (uint32_t)high[d] << 16;
    }
    transpose((const float*)pairs, DEPTH, (float*)to, 16, 16, DEPTH);
  }
}

// 0 if a product of small integers, exact in any order, comes out right on the tiles of this machine.
inline int64_t amx_check() {
  AmxTiles tiles;
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
    amx_put_row(a, i, rows, blocks * DEPTH, blocks);
  }
  for (int64_t d = 0; d < blocks * DEPTH; d += 2)
    for (int j = 0; j < NV; ++j) amx_put_pair(b, d, j, load(y[d] + j * W), load(y[d + 1] + j * W));
  amx_multiply(c, NR, a, b, blocks);
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
