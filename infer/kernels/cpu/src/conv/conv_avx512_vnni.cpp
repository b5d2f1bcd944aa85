// Convolution tiles with AVX-512 VNNI: vpdpbusd multiplies unsigned activations by signed weights into int32.
#include <immintrin.h>

#include <cstring>

#include "conv/conv_results_avx512.h"

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
  const Results results(tile);
  unrolled<PIXELS>([&](auto i) INFER_INLINE { results.store<BLOCKS>(i, sum[i]); });
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
