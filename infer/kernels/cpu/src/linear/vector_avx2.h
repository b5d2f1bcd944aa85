// Vector of 16 rows in two registers, for AVX2, and for AVX-VNNI where the including file defines INFER_AVX_VNNI.
//
// AVX2: |x| times sign(weight, x), both within ±127, keeps pairs of products below 32768, so that the 16-bit sums of `maddubs`
// never saturate. Each quad of activations is followed by its magnitudes.
// AVX-VNNI: weights are stored as code + 128 and multiplied as unsigned bytes, by one instruction.
#pragma once

#include <immintrin.h>

#include "isa.h"

namespace infer_native {
namespace {

struct Vector {
  struct Floats {
    __m256 a, b;
  };
  struct Sums {
    __m256i a, b;
  };
  struct Quads {
    __m256i a, b;
  };
  using Table = __m256i;
#if defined(INFER_AVX_VNNI)
  static constexpr bool UNSIGNED = true, PANELS = true;
  static constexpr int QUAD_BYTES = 4;
#else
  static constexpr bool UNSIGNED = false, PANELS = true;
  static constexpr int QUAD_BYTES = 8;
#endif
  static constexpr int TILE_ROWS = 5, TILE_BLOCKS = 1, STREAM_ROWS = 5, STREAM_TILE_ROWS = 5, DOT_CHAINS = 1, FLOAT_CHAINS = 2, PREFETCH = 1024;
  static constexpr bool BYTE_SCALES = false;  // of groupwise weights: converted where they are used, for few rows
  static constexpr int DIRECT_ROWS = 4, DIRECT_TILE_ROWS = 4, DIRECT_BLOCKS = 1;
  static constexpr int direct_blocks(int) { return DIRECT_BLOCKS; }

  static Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, Floats v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
  static Floats broadcast(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
  static Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static Floats fma(Floats x, Floats y, Floats z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  static Floats fnma(Floats x, Floats y, Floats z) {
    return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
  }
  static Floats negate(Floats v) {
    return {_mm256_sub_ps(_mm256_setzero_ps(), v.a), _mm256_sub_ps(_mm256_setzero_ps(), v.b)};
  }
  static Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static Floats clamp(Floats v, Floats low, Floats high) { return max(min(v, high), low); }
  static Floats to_float(Sums v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
  static Floats load_scale(const int8_t* p) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return to_float({_mm256_cvtepi8_epi32(codes), _mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8))});
  }
  static Floats load_float16(const uint16_t* p) {
    const __m128i* const halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }

  static Sums broadcast(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
  static Sums load_sums(const int32_t* p) { return {load_256(p), load_256(p + 8)}; }
  static void store_sums(int32_t* p, Sums v) { store_256(p, v.a), store_256(p + 8, v.b); }
  static Sums add(Sums x, Sums y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  static Sums sub_product(Sums x, Sums y, Sums z) {
    return {_mm256_sub_epi32(x.a, _mm256_mullo_epi32(y.a, z.a)), _mm256_sub_epi32(x.b, _mm256_mullo_epi32(y.b, z.b))};
  }
  static Sums max(Sums x, Sums y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
  static Sums abs_bits(Floats v) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_and_si256(_mm256_castps_si256(v.a), mask), _mm256_and_si256(_mm256_castps_si256(v.b), mask)};
  }
  static Sums round(Floats v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
  // Returns 2 to the power of each integer, -126..127.
  static Floats pow2(Sums v) {
    const __m256i bias = _mm256_set1_epi32(127);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(v.a, bias), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(v.b, bias), 23))};
  }
  static int32_t reduce_max(Sums v) {
    const __m256i both = _mm256_max_epi32(v.a, v.b);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
  static int32_t reduce_add(Sums v) {
    const __m256i both = _mm256_add_epi32(v.a, v.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
  static void store_quads(int8_t* q, int64_t stride, Sums v) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
    const __m128i codes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#if defined(INFER_AVX_VNNI)
    if (stride == 4) return _mm_storeu_si128(reinterpret_cast<__m128i*>(q), codes);
    const int32_t quads[4] = {_mm_cvtsi128_si32(codes), _mm_extract_epi32(codes, 1), _mm_extract_epi32(codes, 2),
                              _mm_extract_epi32(codes, 3)};
    for (int i = 0; i < 4; ++i) __builtin_memcpy(q + i * stride, quads + i, 4);
#else
    const __m128i magnitudes = _mm_abs_epi8(codes);
    const __m128i low = _mm_unpacklo_epi32(codes, magnitudes), high = _mm_unpackhi_epi32(codes, magnitudes);
    const int64_t quads[4] = {_mm_cvtsi128_si64(low), _mm_extract_epi64(low, 1), _mm_cvtsi128_si64(high),
                              _mm_extract_epi64(high, 1)};
    for (int i = 0; i < 4; ++i) __builtin_memcpy(q + i * stride, quads + i, 8);
#endif
  }

  static Quads load_quads(const void* p) { return {load_256(p), load_256(static_cast<const char*>(p) + 32)}; }
  static void store_quads(void* p, Quads v) { store_256(p, v.a), store_256(static_cast<char*>(p) + 32, v.b); }
#if defined(INFER_AVX_VNNI)
  static Sums dot(Sums sum, Quads weights, const int8_t* quad) {
    const __m256i x = broadcast_quad(quad);
    return {products(sum.a, weights.a, x), products(sum.b, weights.b, x)};
  }
#else
  static Sums dot(Sums sum, Quads weights, const int8_t* quad) {
    const __m256i x = broadcast_quad(quad), magnitude = broadcast_quad(quad + 4), one = _mm256_set1_epi16(1);
    const __m256i a = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(weights.a, x));
    const __m256i b = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(weights.b, x));
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(a, one)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(b, one))};
  }
#endif
  static Sums dot_from_memory(Sums sum, Quads weights, const int8_t* quad) { return dot(sum, weights, quad); }
  // Dot product with weights in 0..127, signed or unsigned alike.
  static Sums dot_nonnegative(Sums sum, Quads weights, const int8_t* quad) {
#if defined(INFER_AVX_VNNI)
    return dot(sum, weights, quad);
#else
    const __m256i x = broadcast_quad(quad), one = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(_mm256_maddubs_epi16(weights.a, x), one)),
            _mm256_add_epi32(sum.b, _mm256_madd_epi16(_mm256_maddubs_epi16(weights.b, x), one))};
#endif
  }
  // The same with weights in 0..15; sums of at most 8 products are widened before they are used. AVX2 keeps them in 16 bits:
  // 8 * 2 * 15 * 127 < 32768.
#if defined(INFER_AVX_VNNI)
  static constexpr bool SHORT_NIBBLES = false;
  static Sums dot_nibbles(Sums sum, Quads weights, const int8_t* quad) { return dot(sum, weights, quad); }
  static Sums widen(Sums v) { return v; }
#else
  static constexpr bool SHORT_NIBBLES = true;
  static Sums dot_nibbles(Sums sum, Quads weights, const int8_t* quad) {
    const __m256i x = broadcast_quad(quad);
    return {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(weights.a, x)), _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(weights.b, x))};
  }
  static Sums widen(Sums v) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(v.a, one), _mm256_madd_epi16(v.b, one)};
  }
#endif
  // Shifts each byte to higher (SHIFT > 0) or lower bits; bits of the adjacent byte may move in.
  template <int SHIFT>
  static Quads shift_bits(Quads v) {
    if constexpr (SHIFT > 0) return {_mm256_slli_epi16(v.a, SHIFT), _mm256_slli_epi16(v.b, SHIFT)};
    if constexpr (SHIFT < 0) return {_mm256_srli_epi16(v.a, -SHIFT), _mm256_srli_epi16(v.b, -SHIFT)};
    return v;
  }
  static Quads and_bits(Quads v, int bits) {
    const __m256i mask = _mm256_set1_epi8(static_cast<char>(bits));
    return {_mm256_and_si256(v.a, mask), _mm256_and_si256(v.b, mask)};
  }
  // (x & bits) | y
  static Quads join_bits(Quads x, int bits, Quads y) {
    const Quads kept = and_bits(x, bits);
    return {_mm256_or_si256(kept.a, y.a), _mm256_or_si256(kept.b, y.b)};
  }
  static Quads add_bits(Quads x, int bits, Quads y) { return join_bits(x, bits, y); }
  static Table load_table(const int8_t* p) {
    const Table table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return UNSIGNED ? _mm256_xor_si256(table, _mm256_set1_epi8(-128)) : table;
  }
  // Returns the entries of indices below 16.
  static Quads lookup(Table table, Quads index) { return {_mm256_shuffle_epi8(table, index.a), _mm256_shuffle_epi8(table, index.b)}; }
  static void decode(const uint8_t* p, Table table, Quads& low, Quads& high) {
    const Quads codes = load_quads(p);
    low = lookup(table, and_bits(codes, 15));
    high = lookup(table, and_bits(shift_bits<-4>(codes), 15));
  }
  // Widens the four columns of a quad to 16 floats each.
  static void widen_columns(const int8_t* p, Floats (&column)[4]) {
    Quads codes = load_quads(p);
    if (UNSIGNED) {
      const __m256i sign = _mm256_set1_epi8(-128);
      codes = {_mm256_xor_si256(codes.a, sign), _mm256_xor_si256(codes.b, sign)};
    }
    column[0] = to_float({_mm256_srai_epi32(_mm256_slli_epi32(codes.a, 24), 24),
                          _mm256_srai_epi32(_mm256_slli_epi32(codes.b, 24), 24)});
    column[1] = to_float({_mm256_srai_epi32(_mm256_slli_epi32(codes.a, 16), 24),
                          _mm256_srai_epi32(_mm256_slli_epi32(codes.b, 16), 24)});
    column[2] = to_float({_mm256_srai_epi32(_mm256_slli_epi32(codes.a, 8), 24),
                          _mm256_srai_epi32(_mm256_slli_epi32(codes.b, 8), 24)});
    column[3] = to_float({_mm256_srai_epi32(codes.a, 24), _mm256_srai_epi32(codes.b, 24)});
  }

 private:
#if defined(INFER_AVX_VNNI)
  // Assembly, because the intrinsic needs a compiler flag that would allow the instruction set everywhere, and because a CPU
  // without AVX-VNNI can test the kernel with the AVX-512 encoding.
  static __m256i products(__m256i sum, __m256i weights, __m256i x) {
#if defined(INFER_AVX_VNNI_AS_AVX512)
    asm("%{evex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(x));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(x));
#endif
    return sum;
  }
#endif
  static __m256i broadcast_quad(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
  }
  static __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void store_256(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
};

}  // namespace
}  // namespace infer_native
