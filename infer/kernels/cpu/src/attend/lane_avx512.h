// AVX-512: 16 tokens or columns are one register.
#pragma once

#include <immintrin.h>

#include "attend/attend_kernel.h"

namespace infer_native {
namespace {

struct Lane {
  // ROWS queries against GROUPS groups of keys, SUMS registers of values: decoding; TILE_*: many queries.
  static constexpr int COUNT = 16, ROWS = 8, GROUPS = 2, SUMS = 24, TILE_ROWS = 12, TILE_VECTORS = 2;

  static __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512 max(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
  static __m512 load_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
  static __m512 load_bytes(const void* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
  }
  static __m512 load_bfloat(const void* p) {
    const __m256i halves = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  static void store_half(void* p, __m512 v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // 16 pairs of bytes, and each pair times a pair of int16, added to what is there.
  static __m512i load_pairs(const void* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  static __m512i dot_pairs(__m512i sum, __m512i a, int32_t pair) { return _mm512_dpwssd_epi32(sum, a, _mm512_set1_epi32(pair)); }
  static float reduce_max(__m512 v) { return _mm512_reduce_max_ps(v); }
  static uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
};

}  // namespace
}  // namespace infer_native
