// Convolution tiles with AVX-512 VNNI: vpdpbusd multiplies unsigned activations by signed weights into int32.
#include <immintrin.h>

#include <cstring>

#include "conv/conv_loop.h"

namespace infer_native {
namespace {

inline __m512i quad(const uint8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}

// Written out because compilers copy the sums to and fro around the intrinsic when nearly all registers are taken.
[[gnu::always_inline]] inline void add_products(__m512i& sum, __m512i a, __m512i w) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(w));
}

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

template <int BLOCKS, int PIXELS>
void run(const Tile& tile) {
  __m512i sum[PIXELS][BLOCKS];
  unrolled<BLOCKS>([&](auto j) INFER_INLINE {
    const __m512i start = _mm512_loadu_si512(tile.start + 16 * j);
    unrolled<PIXELS>([&](auto i) INFER_INLINE { sum[i][j] = start; });
  });
  const int8_t* weight = tile.weight;
  const int64_t quads = tile.quads, num_runs = tile.num_runs;
  for (int64_t r = 0; r < num_runs; ++r) {
    const uint8_t* x[PIXELS];
    unrolled<PIXELS>([&](auto i) INFER_INLINE { x[i] = tile.x[i] + tile.runs[r]; });
    for (int64_t q = 0; q < quads; ++q, weight += 64 * BLOCKS) {
      __m512i w[BLOCKS];
      unrolled<BLOCKS>([&](auto j) INFER_INLINE { w[j] = _mm512_loadu_si512(weight + 64 * j); });
      unrolled<PIXELS>([&](auto i) INFER_INLINE {
        const __m512i a = quad(x[i] + 4 * q);
        unrolled<BLOCKS>([&](auto j) INFER_INLINE { add_products(sum[i][j], a, w[j]); });
      });
    }
  }
  const __m512 low = _mm512_set1_ps(tile.low), high = _mm512_set1_ps(tile.high);
  const __m512 factor = _mm512_set1_ps(tile.residual_multiplier);
  const auto last = static_cast<__mmask16>((1u << tile.tail) - 1);
  const bool has_residual = tile.residual[0] != nullptr, is_float = tile.y_float[0] != nullptr;
  unrolled<PIXELS>([&](auto i) INFER_INLINE {
    __m512i bytes[BLOCKS];
    unrolled<BLOCKS>([&](auto j) INFER_INLINE {
      __m512 y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i][j]), _mm512_loadu_ps(tile.multiplier + 16 * j),
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
  });
}

template <int BLOCKS, int... PIXELS>
constexpr std::array<TileKernel, sizeof...(PIXELS)> all(std::integer_sequence<int, PIXELS...>) {
  return {run<BLOCKS, PIXELS + 1>...};
}

// With the weights and one quad of activations these use 29 to 32 registers.
constexpr auto ONE = all<1>(std::make_integer_sequence<int, 14>());
constexpr auto TWO = all<2>(std::make_integer_sequence<int, 12>());
constexpr auto THREE = all<3>(std::make_integer_sequence<int, 8>());
constexpr auto FOUR = all<4>(std::make_integer_sequence<int, 6>());

}  // namespace

const ConvKernels CONV_AVX512_VNNI = {
    {ONE.data(), TWO.data(), THREE.data(), FOUR.data()}, {14, 12, 8, 6}, conv_quantize_row, conv_max_row};

}  // namespace infer_native
