// From the exact sums of a pixel to its bytes or floats, with AVX-512.
#pragma once

#include <immintrin.h>

#include "conv/conv_loop.h"

namespace infer_native {
namespace {

template <int BLOCKS>
[[gnu::always_inline]] inline void store_bytes(uint8_t* y, const __m512i (&v)[BLOCKS]) {
  if constexpr (BLOCKS == 4) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i all = _mm512_packus_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
    _mm512_storeu_si512(y, _mm512_permutexvar_epi32(order, all));
  } else {
    for (int j = 0; j < BLOCKS; ++j)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(y + 16 * j), _mm512_cvtepi32_epi8(v[j]));
  }
}

// Constants of all pixels of a tile.
struct Results {
  const Tile& tile;
  const __m512 low, high, factor;
  const __mmask16 last;
  const bool has_residual, is_float;

  explicit Results(const Tile& t)
      : tile(t), low(_mm512_set1_ps(t.low)), high(_mm512_set1_ps(t.high)), factor(_mm512_set1_ps(t.residual_multiplier)),
        last(static_cast<__mmask16>((1u << t.tail) - 1)), has_residual(t.residual[0] != nullptr),
        is_float(t.y_float[0] != nullptr) {}

  template <int BLOCKS>
  [[gnu::always_inline]] void store(int i, const __m512i (&sum)[BLOCKS]) const {
    __m512i bytes[BLOCKS];
    unrolled<BLOCKS>([&](auto j) INFER_INLINE {
      __m512 y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[j]), _mm512_loadu_ps(tile.multiplier + 16 * j),
                                 _mm512_loadu_ps(tile.offset + 16 * j));
      if (has_residual) {
        const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile.residual[i] + 16 * j));
        y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(q)), factor, y);
      }
      y = _mm512_min_ps(high, _mm512_max_ps(low, y));  // NaN stays NaN
      if (is_float)
        _mm512_mask_storeu_ps(tile.y_float[i] + 16 * j, j + 1 < BLOCKS ? __mmask16{0xffff} : last,
                              _mm512_add_ps(y, _mm512_set1_ps(tile.poison[i])));
      bytes[j] = _mm512_cvtps_epi32(y);
    });
    if (!is_float) store_bytes<BLOCKS>(tile.y[i], bytes);
  }
};

}  // namespace
}  // namespace infer_native
