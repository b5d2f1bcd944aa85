// AVX2: 16 tokens are two registers.
#include <immintrin.h>

#include "attend/attend_kernel.h"

namespace infer_native {
namespace {

struct Lane {
  static constexpr int COUNT = 8, ROWS = 6, GROUPS = 1, SUMS = 12, TILE_ROWS = 6, TILE_VECTORS = 2;

  static __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256 max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
  static __m256 load_half(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
  static __m256 load_bytes(const void* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
  }
  static __m256 load_bfloat(const void* p) {
    const __m128i halves = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  static void store_half(void* p, __m256 v) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static __m256i load_pairs(const void* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static __m256i dot_pairs(__m256i sum, __m256i a, int32_t pair) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, _mm256_set1_epi32(pair)));
  }
  static float reduce_max(__m256 v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  static uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
};

}  // namespace
}  // namespace infer_native

#include "attend/attend_decode.h"
#include "attend/attend_encoder_tile.h"
#include "attend/attend_tile.h"
#include "attend/attend_write.h"

namespace infer_native {
const AttendKernel ATTEND_AVX2 = {decodes, write_cache, decode, merge, attend_tile, 16 * Lane::TILE_ROWS, attend_all_tile};
}
