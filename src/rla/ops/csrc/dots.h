// Products of bfloat16 operands by dot products of pairs (VDPBF16PS), 8 x NR sums in registers. Zen 4 does two multiply-adds
// in the time of one of float32. Without RLA_DOTS, what the other instruction sets need to compile.
#pragma once
#include <initializer_list>

#include "halves.h"

namespace RLA_ISA {

constexpr int GROUP = 1;  // chunks that forward takes together
struct Tiles {};          // nothing to configure

// c[32, NR] = the sum of two products; rows of c are ldc floats apart.
#if defined(RLA_DOTS)
inline void multiply(float* c, int64_t ldc, Factors x, Factors y = {}) {
  constexpr int M = 8;
  for (int64_t i0 = 0; i0 < 32; i0 += M) {
    __m512 sums[M][NV] = {};
    for (Factors f : {x, y}) {
      for (int64_t n = 0; n < f.blocks; ++n, f.right += RIGHT) {
        const uint16_t* left = f.left + n * LEFT + i0 * DEPTH;
        for (int64_t d = 0; d < DEPTH; d += 2) {
          __m512bh b[NV];
          unroll<NV>([&](auto j) __attribute__((always_inline)) {
            b[j.value] = (__m512bh)_mm512_loadu_si512(f.right + j.value * (RIGHT / 2) + d * W);
          });
          unroll<M>([&](auto i) __attribute__((always_inline)) {
            int32_t pair;
            memcpy(&pair, left + i.value * DEPTH + d, 4);
            const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
            unroll<NV>([&](auto j) __attribute__((always_inline)) {
              sums[i.value][j.value] = _mm512_dpbf16_ps(sums[i.value][j.value], a, b[j.value]);
            });
          });
        }
      }
    }
    unroll<M>([&](auto i) __attribute__((always_inline)) {
      unroll<NV>([&](auto j) __attribute__((always_inline)) {
        store(c + (i0 + i.value) * ldc + j.value * W, (V)sums[i.value][j.value]);
      });
    });
  }
}
#else
void multiply(float* c, int64_t ldc, Factors x, Factors y = {});  // of no other instruction set
#endif

}  // namespace RLA_ISA
