// AMX tiles in plain C++, for tests on machines that have none: what LDTILECFG, TILELOADD, TDPBF16PS and TILESTORED do
// by Intel's definition (palette 1). Numbers are rounded to nearest even whatever the state of the processor, and
// denormals are zero on the way in and out. What would raise an exception ends the process.
#pragma once
#include <stdlib.h>

#include "simd.h"

namespace RLA_ISA {
namespace amx_model {

struct ModelTile {
  int64_t rows, bytes;
  uint8_t data[16][64];
};
inline thread_local ModelTile model_tiles[8];  // without rows: not configured

inline ModelTile& model_tile(int t) {
  if (!model_tiles[t].rows) abort();
  return model_tiles[t];
}

inline void configure(const uint8_t* rows, const uint16_t* bytes) {
  memset(model_tiles, 0, sizeof model_tiles);
  for (int t = 0; t < 8; ++t) {
    if (rows[t] > 16 || bytes[t] > 64 || !rows[t] != !bytes[t]) abort();
    model_tiles[t].rows = rows[t];
    model_tiles[t].bytes = bytes[t];
  }
}
inline void amx_release() { memset(model_tiles, 0, sizeof model_tiles); }

template <int T> inline void amx_zero() { memset(model_tile(T).data, 0, sizeof model_tile(T).data); }

template <int T> inline void amx_load(const void* p, int64_t stride) {
  amx_zero<T>();
  ModelTile& t = model_tile(T);
  for (int64_t i = 0; i < t.rows; ++i) memcpy(t.data[i], (const char*)p + i * stride, t.bytes);
}
template <int T> inline void amx_store(void* p, int64_t stride) {
  const ModelTile& t = model_tile(T);
  for (int64_t i = 0; i < t.rows; ++i) memcpy((char*)p + i * stride, t.data[i], t.bytes);
}

INLINE float model_flush(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  b &= b & 0x7f800000 ? 0xffffffff : 0x80000000;
  memcpy(&x, &b, 4);
  return x;
}
inline void model_numbers(const ModelTile& t, float (&to)[16][32]) {
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t j = 0; j < 32; ++j) {
      uint16_t h;
      memcpy(&h, t.data[i] + 2 * j, 2);
      to[i][j] = model_flush(from_bf16(h));
    }
  }
}

// Even and odd numbers along the depth are summed apart, then together, then into the tile. A float64 holds the product
// and the sum of a fused multiply-add; only when their exponents are 29 or more apart does it round twice.
template <int C, int A, int B> inline void amx_dot() {
  ModelTile &c = model_tile(C), &a = model_tile(A), &b = model_tile(B);
  if (a.rows != c.rows || b.rows * 4 != a.bytes || b.bytes != c.bytes) abort();
  float x[16][32], y[16][32];
  model_numbers(a, x);
  model_numbers(b, y);
  for (int64_t m = 0; m < c.rows; ++m) {
    float sums[32] = {};
    for (int64_t k = 0; k < a.bytes / 4; ++k) {
      const double even = x[m][2 * k], odd = x[m][2 * k + 1];
      for (int64_t n = 0; n < 32; n += 2) {
        sums[n] = model_flush((float)(even * y[k][n] + sums[n]));
        sums[n + 1] = model_flush((float)(odd * y[k][n + 1] + sums[n + 1]));
      }
    }
    for (int64_t n = 0; n < c.bytes / 4; ++n) {
      float z;
      memcpy(&z, c.data[m] + 4 * n, 4);
      z = model_flush(model_flush(z) + model_flush(sums[2 * n] + sums[2 * n + 1]));
      memcpy(c.data[m] + 4 * n, &z, 4);
    }
  }
}

}  // namespace amx_model
}  // namespace RLA_ISA
