// Vectors of W floats (compiler vector extensions), conversions of rows, transposes, tanh, and the flush of denormals.
// Everything lives in a namespace of its instruction set and uses no standard templates: a shared inline function
// would be compiled for one instruction set and linked into the others.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace RLA_ISA {

#if defined(RLA_W)
constexpr int W = RLA_W;
#elif defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
constexpr int MR = W == 16 ? 8 : 6;  // rows of a register tile
constexpr int NV = 2;                // vectors in a row of a register tile
constexpr int NR = NV * W;           // columns of a register tile, width of a panel

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef uint32_t VB __attribute__((vector_size(4 * W)));
typedef float VU __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t VBU __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t HU __attribute__((vector_size(2 * W), aligned(2), may_alias));

INLINE V load(const float* p) { return *(const VU*)p; }
INLINE void store(float* p, V x) { *(VU*)p = x; }
// A store that passes the caches by; p is a multiple of W floats. end_streams: before another thread may read it.
INLINE void stream(float* p, V x) {
#if defined(__AVX512F__) && !defined(RLA_W)
  _mm512_stream_ps(p, (__m512)x);
#elif defined(__AVX2__) && !defined(RLA_W)
  _mm256_stream_ps(p, (__m256)x);
#else
  store(p, x);
#endif
}
INLINE void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}
INLINE V splat(float x) { return x - V{}; }  // x - 0 keeps the sign of zero

template <class T> INLINE T least(T a, T b) { return a < b ? a : b; }
template <class T> INLINE T most(T a, T b) { return a > b ? a : b; }

template <int I> struct Int {
  static constexpr int value = I;
  constexpr operator int() const { return I; }
};

// f(Int<0>), f(Int<1>), ...: indices that are constants before the optimiser runs keep accumulators in registers.
template <int N, int I = 0, class F> INLINE void unroll(F&& f) {
  if constexpr (I < N) {
    f(Int<I>{});
    unroll<N, I + 1>(f);
  }
}

#if defined(__AVX512F__) && !defined(RLA_W)
INLINE __m256 add_halves(V x) {
  __m256 h[2];
  __builtin_memcpy(h, &x, sizeof h);
  return _mm256_add_ps(h[0], h[1]);
}
#elif defined(__AVX2__) && !defined(RLA_W)
INLINE __m256 add_halves(V x) { return (__m256)x; }
#endif

INLINE float sum(V x) {
#if defined(__AVX2__) && !defined(RLA_W)  // in the order of the loop below
  __m256 y = add_halves(x);
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
#else
  float s[W];
  __builtin_memcpy(s, &x, sizeof s);
  for (int h = W / 2; h; h /= 2)
    for (int i = 0; i < h; ++i) s[i] += s[i + h];
  return s[0];
#endif
}

// The sums of four vectors.
INLINE void sum4(V a, V b, V c, V d, float* to) {
#if defined(__AVX2__) && !defined(RLA_W)
  __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(add_halves(a), add_halves(b)), _mm256_hadd_ps(add_halves(c), add_halves(d)));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
#else
  to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
#endif
}

INLINE V select(VI mask, V a, V b) { return (V)(((VI)a & mask) | ((VI)b & ~mask)); }
INLINE V abs(V x) { return (V)((VI)x & (VI{} + 0x7fffffff)); }

// exp for -87 <= x <= 88: 2^n times a polynomial (Cephes).
INLINE V exp(V x) {
  V n = x * 1.44269504f + 12582912.f;
  VI bits = ((VI)n - 0x4b400000 + 127) << 23;
  n -= 12582912.f;
  x = x - n * 0.693359375f + n * 2.12194440e-4f;
  V y = x * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  return (y * x * x + x + 1.f) * (V)bits;
}

INLINE V tanh(V x) {
  V a = abs(x), z = x * x;
  V small = z * -5.70498872745e-3f + 2.06390887954e-2f;
  small = small * z - 5.37397155531e-2f;
  small = small * z + 1.33314422036e-1f;
  small = small * z - 3.33332819422e-1f;
  small = small * z * x + x;
  V c = select(a > 15.f, V{} + 15.f, a);
  V large = 1.f - 2.f / (exp(c + c) + 1.f);
  large = (V)((VI)large | ((VI)x & (VI{} + (int32_t)0x80000000)));
  return select(a > 0.625f, large, small);  // a NaN compares false and stays NaN in `small`
}

INLINE float from_bf16(uint16_t h) {
  uint32_t b = (uint32_t)h << 16;
  float f;
  memcpy(&f, &b, 4);
  return f;
}

INLINE uint16_t to_bf16(float f) {
  uint32_t b;
  memcpy(&b, &f, 4);
  uint16_t rounded = (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
  return f != f ? 0x7fc0 : rounded;
}

INLINE V load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)  // gcc 12 converts a vector of halves in four pieces
  return (V)((VB)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i*)p)) << 16);
#elif defined(__AVX2__)
  return (V)((VB)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#else
  return (V)(__builtin_convertvector(*(const HU*)p, VB) << 16);
#endif
}

#if defined(__AVX512BF16__)
INLINE void store_bf16(uint16_t* p, V x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
// 2 W numbers past the caches; p is a multiple of 64 bytes.
INLINE void stream_bf16(uint16_t* p, V first, V second) {
  _mm512_stream_si512((__m512i*)p, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}
// p[2 i] = low_i, p[2 i + 1] = high_i
INLINE void store_pair(uint16_t* p, V low, V high) {
  const VB lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, order = lane | (lane + 16) << 16;
  *(VBU*)p = (VB)_mm512_permutexvar_epi16((__m512i)order, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
#else
INLINE VB round_bf16(V x) {
  const VB b = (VB)x;
  return (VB)select(x == x, (V)(b + 0x7fff + ((b >> 16) & 1)), (V)(VB{} + 0x7fc00000)) >> 16;
}
INLINE void store_bf16(uint16_t* p, V x) { *(HU*)p = __builtin_convertvector(round_bf16(x), HU); }
INLINE void stream_bf16(uint16_t* p, V first, V second) {
  store_bf16(p, first);
  store_bf16(p + W, second);
}
INLINE void store_pair(uint16_t* p, V low, V high) { *(VBU*)p = round_bf16(low) | round_bf16(high) << 16; }
#endif

#if defined(__ARM_FP16_FORMAT_IEEE)
INLINE float from_f16(uint16_t h) {
  __fp16 x;
  memcpy(&x, &h, 2);
  return x;
}
INLINE uint16_t to_f16(float f) {
  __fp16 x = f;
  uint16_t h;
  memcpy(&h, &x, 2);
  return h;
}
#elif defined(__F16C__)
INLINE float from_f16(uint16_t h) { return _cvtsh_ss(h); }
INLINE uint16_t to_f16(float f) { return _cvtss_sh(f, 0); }
#else
// The bits of a half and of a float, apart from the bias of the exponent; subnormal halves by an addition that the
// flush of denormals cannot touch.
INLINE float from_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 0x3ff, b;
  float f;
  if (e == 0) {
    f = (float)m * 5.9604644775390625e-8f;
    memcpy(&b, &f, 4);
  } else {
    b = ((e == 31 ? 255 : e + 112) << 23) | (m << 13);
  }
  b |= sign;
  memcpy(&f, &b, 4);
  return f;
}
INLINE uint16_t to_f16(float f) {
  uint32_t b;
  memcpy(&b, &f, 4);
  uint16_t sign = (uint16_t)((b >> 16) & 0x8000);
  b &= 0x7fffffff;
  if (b > 0x7f800000) return sign | 0x7e00;
  if (b >= 0x477ff000) return sign | 0x7c00;
  if (b < 0x38800000) {  // subnormal or zero: let the addition of 0.5 round
    float a;
    memcpy(&a, &b, 4);
    a += 0.5f;
    memcpy(&b, &a, 4);
    return (uint16_t)(sign | (b - 0x3f000000));
  }
  b += 0xfff + ((b >> 13) & 1);
  return (uint16_t)(sign | ((b - 0x38000000) >> 13));
}
#endif

// n elements of type dtype at p + at, as floats.
inline void load_row(int dtype, const void* p, int64_t at, float* to, int64_t n) {
  if (dtype == F32) {
    memcpy(to, (const float*)p + at, n * 4);
  } else if (dtype == BF16) {
    const uint16_t* x = (const uint16_t*)p + at;
    for (int64_t i = 0; i < n; ++i) to[i] = from_bf16(x[i]);
  } else {
    const uint16_t* x = (const uint16_t*)p + at;
    int64_t i = 0;
#if defined(__AVX2__) && defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + i))));
#endif
    for (; i < n; ++i) to[i] = from_f16(x[i]);
  }
}

inline void store_row(int dtype, void* p, int64_t at, const float* from, int64_t n) {
  if (dtype == F32) {
    memcpy((float*)p + at, from, n * 4);
  } else if (dtype == BF16) {
    uint16_t* x = (uint16_t*)p + at;
    for (int64_t i = 0; i < n; ++i) x[i] = to_bf16(from[i]);
  } else {
    uint16_t* x = (uint16_t*)p + at;
    int64_t i = 0;
#if defined(__AVX2__) && defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i*)(x + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    for (; i < n; ++i) x[i] = to_f16(from[i]);
  }
}

#if defined(__clang__) || __GNUC__ >= 12
// a0 b0 a1 b1 and a2 b2 a3 b3, of each four numbers of a and b.
template <int... L> INLINE void zip(V& a, V& b, Int<L>...) {
  V x = __builtin_shufflevector(a, b, ((L & 1) * W + L / 4 * 4 + L % 4 / 2)...);
  b = __builtin_shufflevector(a, b, ((L & 1) * W + L / 4 * 4 + L % 4 / 2 + 2)...);
  a = x;
}
INLINE void zip(V& a, V& b) {
  if constexpr (W == 4)
    zip(a, b, Int<0>{}, Int<1>{}, Int<2>{}, Int<3>{});
  else if constexpr (W == 8)
    zip(a, b, Int<0>{}, Int<1>{}, Int<2>{}, Int<3>{}, Int<4>{}, Int<5>{}, Int<6>{}, Int<7>{});
  else
    zip(a, b, Int<0>{}, Int<1>{}, Int<2>{}, Int<3>{}, Int<4>{}, Int<5>{}, Int<6>{}, Int<7>{}, Int<8>{}, Int<9>{}, Int<10>{},
        Int<11>{}, Int<12>{}, Int<13>{}, Int<14>{}, Int<15>{});
}
// Four numbers of each of the rows 0, 4, 8 ... of a block, one after the other.
INLINE V load_fours(const float* a, int64_t lda) {
#if defined(__AVX512F__) && !defined(RLA_W)
  __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(a));
  x = _mm512_insertf32x4(x, _mm_loadu_ps(a + 4 * lda), 1);
  x = _mm512_insertf32x4(x, _mm_loadu_ps(a + 8 * lda), 2);
  return (V)_mm512_insertf32x4(x, _mm_loadu_ps(a + 12 * lda), 3);
#elif defined(__AVX2__) && !defined(RLA_W)  // the loop below would go through memory, and wait for it
  return (V)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(a + 4 * lda), 1);
#else
  V x;
  for (int i = 0; i < W; i += 4) __builtin_memcpy((char*)&x + 4 * i, a + i * lda, 16);
  return x;
#endif
}
INLINE void transpose_block(const float* a, int64_t lda, float* b, int64_t ldb, const float* scale) {
  V r[W];
  unroll<W>([&](auto i) __attribute__((always_inline)) { r[i.value] = load_fours(a + i.value % 4 * lda + i.value / 4 * 4, lda); });
  unroll<W / 4>([&](auto i) __attribute__((always_inline)) {
    V* four = r + 4 * i.value;
    zip(four[0], four[2]);
    zip(four[1], four[3]);
    zip(four[0], four[1]);
    zip(four[2], four[3]);
  });
  if (scale) {
    const V s = load(scale);
    unroll<W>([&](auto i) __attribute__((always_inline)) { r[i.value] *= s; });
  }
  unroll<W>([&](auto i) __attribute__((always_inline)) { store(b + i.value * ldb, r[i.value]); });
}
#else
inline void transpose_block(const float* a, int64_t lda, float* b, int64_t ldb, const float* scale) {
  for (int i = 0; i < W; ++i)
    for (int j = 0; j < W; ++j) b[j * ldb + i] = scale ? a[i * lda + j] * scale[i] : a[i * lda + j];
}
#endif

// b[j, i] = a[i, j], times scale[i] if there is one, for i < rows, j < columns.
inline void transpose(const float* a, int64_t lda, float* b, int64_t ldb, int64_t rows, int64_t columns,
                      const float* scale = nullptr) {
  int64_t full = rows / W * W, width = columns / W * W;
  for (int64_t i = 0; i < full; i += W)
    for (int64_t j = 0; j < width; j += W) transpose_block(a + i * lda + j, lda, b + j * ldb + i, ldb, scale ? scale + i : nullptr);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < full ? width : 0; j < columns; ++j) b[j * ldb + i] = scale ? a[i * lda + j] * scale[i] : a[i * lda + j];
}

// Decaying states drift into denormals, which are slow: flush them while an object of this class lives.
struct FlushDenormals {
#if defined(__SSE2__)
  unsigned old = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(old | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(old); }
#elif defined(__aarch64__)
  uint64_t old;
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(old));
    asm volatile("msr fpcr, %0" ::"r"(old | (1ull << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(old)); }
#endif
};

}  // namespace RLA_ISA
