// bfloat16 matrices as operands of products, for the instruction sets `amx` and `dots`: forward of bfloat16 inputs.
//
// A left operand [32, depth] is stored in blocks of depth 32, each two tiles of 16 rows of 64 bytes. A right operand
// [depth, NR] is stored in blocks of depth 32 too, each two tiles of W columns: 16 rows of pairs, where a pair holds
// two numbers that follow each other along the depth. So AMX takes them (amx.h), and so do dot products of pairs (dots.h).
#pragma once
#include "simd.h"

namespace RLA_ISA {

#if defined(RLA_AMX) || defined(RLA_DOTS)
constexpr bool HALVES = true;
#else
constexpr bool HALVES = false;
#endif

constexpr int64_t DEPTH = 32;          // of a block
constexpr int64_t LEFT = 32 * DEPTH;   // numbers in a block of a left operand
constexpr int64_t RIGHT = DEPTH * NR;  // and in one of a right operand

// What is multiplied: a left and a right operand of so many blocks of depth.
struct Factors {
  const uint16_t *left, *right;
  int64_t blocks;
};

// Row i of a left operand: n numbers, then zeros. Returns their squares, W sums.
INLINE V put_row(uint16_t* left, int64_t i, const uint16_t* row, int64_t n, int64_t blocks) {
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
INLINE void put_pair(uint16_t* right, int64_t d, int j, V low, V high) {
  store_pair(right + d / DEPTH * RIGHT + j * (RIGHT / 2) + d % DEPTH * W, low, high);
}

// right = the transpose of a left operand [32, depth]: 32 / NR right operands [depth, NR], one after the other.
inline void transpose_right(const uint16_t* left, uint16_t* right, int64_t blocks) {
  for (int64_t n = 0; n < 32; n += NR)
    for (int64_t b = 0; b < blocks; ++b, right += RIGHT)
      for (int64_t j = 0; j < 2; ++j)  // W rows of 16 pairs; the pairs stay together
        transpose((const float*)(left + b * LEFT + (n + j * W) * DEPTH), 16, (float*)(right + j * (RIGHT / 2)), W, W, 16);
}

// to = the transpose of a left operand [32, depth] as left operands [32, 32], one for each block, `step` apart.
inline void transpose_left(const uint16_t* left, uint16_t* to, int64_t blocks, int64_t step) {
  uint32_t pairs[16][DEPTH];  // of rows that follow each other
  for (int64_t b = 0; b < blocks; ++b, left += LEFT, to += step) {
    for (int64_t i = 0; i < 16; ++i) {
      const uint16_t *low = left + 2 * i * DEPTH, *high = low + DEPTH;
      for (int64_t d = 0; d < DEPTH; ++d) pairs[i][d] = low[d] | (uint32_t)high[d] << 16;
    }
    transpose((const float*)pairs, DEPTH, (float*)to, 16, 16, DEPTH);
  }
}

}  // namespace RLA_ISA
