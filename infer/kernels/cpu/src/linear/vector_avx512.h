// Vector of 16 rows in one register of AVX-512 VNNI; weights are stored as code + 128 and multiplied as unsigned bytes.
#pragma once

#include <immintrin.h>

#include "isa.h"

namespace infer_native {
namespace {

struct Vector {
  using Floats = __m512;
  using Sums = __m512i;
  using Quads = __m512i;
  using Table = __m512i;
  static constexpr bool UNSIGNED = true, PANELS = false;
  static constexpr int QUAD_BYTES = 4, TILE_ROWS = 6, TILE_BLOCKS = 4, STREAM_ROWS = 16, STREAM_TILE_ROWS = 8, DOT_CHAINS = 8, FLOAT_CHAINS = 2, PREFETCH = 8192;
  static constexpr bool BYTE_SCALES = true;  // of groupwise weights: converted where they are used, for few rows
  static constexpr int DIRECT_ROWS = 12, DIRECT_TILE_ROWS = 8, DIRECT_BLOCKS = 2;
  static constexpr int direct_blocks(int rows) { return rows > 6 ? DIRECT_BLOCKS : 1; }

  static Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
  static Floats broadcast(float v) { return _mm512_set1_ps(v); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
  static Floats negate(Floats v) { return _mm512_sub_ps(_mm512_setzero_ps(), v); }
  static Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static Floats clamp(Floats v, Floats low, Floats high) { return max(min(v, high), low); }
  static Floats to_float(Sums v) { return _mm512_cvtepi32_ps(v); }
  static Floats load_scale(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static Floats load_float16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  static Sums broadcast(int32_t v) { return _mm512_set1_epi32(v); }
  static Sums load_sums(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store_sums(int32_t* p, Sums v) { _mm512_storeu_si512(p, v); }
  static Sums add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
  static Sums sub_product(Sums a, Sums b, Sums c) { return _mm512_sub_epi32(a, _mm512_mullo_epi32(b, c)); }
  static Sums max(Sums a, Sums b) { return _mm512_max_epi32(a, b); }
  static Sums abs_bits(Floats v) { return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff)); }
  static Sums round(Floats v) { return _mm512_cvtps_epi32(v); }
  // Returns 2 to the power of each integer, -126..127.
  static Floats pow2(Sums v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(127)), 23)); }
  static int32_t reduce_max(Sums v) { return _mm512_reduce_max_epi32(v); }
  static int32_t reduce_add(Sums v) { return _mm512_reduce_add_epi32(v); }
  static void store_quads(int8_t* q, int64_t stride, Sums v) {
    const __m128i codes = _mm512_cvtsepi32_epi8(v);
    if (stride == 4) return _mm_storeu_si128(reinterpret_cast<__m128i*>(q), codes);
    const int32_t quads[4] = {_mm_cvtsi128_si32(codes), _mm_extract_epi32(codes, 1), _mm_extract_epi32(codes, 2),
                              _mm_extract_epi32(codes, 3)};
    for (int i = 0; i < 4; ++i) __builtin_memcpy(q + i * stride, quads + i, 4);
  }

  static Quads load_quads(const void* p) { return _mm512_loadu_si512(p); }
  static void store_quads(void* p, Quads v) { _mm512_storeu_si512(p, v); }
  static Sums dot(Sums sum, Quads weights, const int8_t* quad) {
    int32_t four;
    __builtin_memcpy(&four, quad, 4);
    // Assembly: with the intrinsic, gcc 12 copies the sum before and after it in some loops.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(_mm512_set1_epi32(four)));
    return sum;
  }
  // Dot product with a quad as memory operand, for few rows, which do not reuse it.
  static Sums dot_from_memory(Sums sum, Quads weights, const int8_t* quad) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*reinterpret_cast<const int32_t*>(quad)));
    return sum;
  }
  // Dot product with weights in 0..127, signed or unsigned alike.
  static Sums dot_nonnegative(Sums sum, Quads weights, const int8_t* quad) { return dot_from_memory(sum, weights, quad); }
  // The same with weights in 0..15; sums of at most 8 products are widened before they are used.
  static constexpr bool SHORT_NIBBLES = false;
  static Sums dot_nibbles(Sums sum, Quads weights, const int8_t* quad) { return dot_from_memory(sum, weights, quad); }
  static Sums widen(Sums v) { return v; }
  // Shifts each byte to higher (SHIFT > 0) or lower bits; bits of the adjacent byte may move in.
  template <int SHIFT>
  static Quads shift_bits(Quads v) {
    return SHIFT > 0 ? _mm512_slli_epi16(v, SHIFT > 0 ? SHIFT : 0) : SHIFT < 0 ? _mm512_srli_epi16(v, SHIFT < 0 ? -SHIFT : 0) : v;
  }
  static Quads and_bits(Quads v, int bits) { return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(bits))); }
  // (a & bits) | b
  static Quads join_bits(Quads a, int bits, Quads b) {
    return _mm512_ternarylogic_epi32(a, _mm512_set1_epi8(static_cast<char>(bits)), b, 0xea);
  }
  // The same where no bit is in both, without ternary logic: AMD's Zen 4 executes that partly on the ports of `vpdpbusd`, adds on others.
  static Quads add_bits(Quads a, int bits, Quads b) { return _mm512_add_epi8(and_bits(a, bits), b); }
  static Table load_signed_table(const int8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Table load_table(const int8_t* p) { return _mm512_xor_si512(load_signed_table(p), _mm512_set1_epi8(-128)); }
  // Returns the entries of indices below 16.
  static Quads lookup(Table table, Quads index) { return _mm512_shuffle_epi8(table, index); }
  static void decode(const uint8_t* p, Table table, Quads& low, Quads& high) {
    const __m512i codes = _mm512_loadu_si512(p), nibble = _mm512_set1_epi8(15);
    low = lookup(table, _mm512_and_si512(codes, nibble));
    high = lookup(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble));
  }
  // Widens the four columns of a quad to 16 floats each. Code + 128 as the lowest byte of the float 2^23 needs no conversion.
  static void widen_columns(const int8_t* p, Floats (&column)[4]) {
    constexpr __mmask64 LOWEST = 0x1111111111111111;
    const __m512i codes = _mm512_loadu_si512(p), base = _mm512_castps_si512(_mm512_set1_ps(8388608.0f));
    const __m512 zero = _mm512_set1_ps(8388608.0f + 128);
    column[0] = _mm512_sub_ps(_mm512_castsi512_ps(_mm512_mask_blend_epi8(LOWEST, base, codes)), zero);
    for (int i = 1; i < 4; ++i) {
      const __m512i places = _mm512_set4_epi32(12 + i, 8 + i, 4 + i, i);
      column[i] = _mm512_sub_ps(_mm512_castsi512_ps(_mm512_mask_shuffle_epi8(base, LOWEST, codes, places)), zero);
    }
  }
};

}  // namespace
}  // namespace infer_native
