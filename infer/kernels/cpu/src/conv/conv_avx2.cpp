// Convolution tiles with AVX2: bytes are widened to int16, because vpmaddubsw saturates at 255 * 127 * 2.
#include <immintrin.h>

#include <cstring>

#include "conv/conv_loop.h"

namespace infer_native {
namespace {

constexpr int VECTORS = 4;  // of 4 output channels by 2 partial sums: one block

inline __m256i quad(const uint8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_cvtepu8_epi16(_mm_set1_epi32(four));
}

// The partial sums of two vectors → 8 output channels in order.
inline __m256i joined(__m256i a, __m256i b) {
  return _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8);
}

struct Scale {
  __m256 low, high, factor;
};

// Eight results of one pixel, before they are rounded.
inline __m256 finished(const Tile& tile, int pixel, int channel, __m256i sum, const Scale& scale) {
  const __m256i start = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile.start + channel));
  __m256 y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(start, sum)), _mm256_loadu_ps(tile.multiplier + channel),
                             _mm256_loadu_ps(tile.offset + channel));
  if (tile.residual[0]) {
    const __m128i q = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(tile.residual[pixel] + channel));
    y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(q)), scale.factor, y);
  }
  return _mm256_min_ps(scale.high, _mm256_max_ps(scale.low, y));  // NaN stays NaN
}

inline void store_bytes(uint8_t* y, __m256 first, __m256 second) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(first), _mm256_cvtps_epi32(second));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), bytes);
}

inline void store_floats(float* y, __m256 values, int64_t count, float poison) {
  alignas(32) float all[8];
  _mm256_store_ps(all, _mm256_add_ps(values, _mm256_set1_ps(poison)));
  if (count > 0) std::memcpy(y, all, sizeof(float) * static_cast<size_t>(std::min<int64_t>(count, 8)));
}

template <int BLOCKS, int PIXELS>
void run(const Tile& tile) {
  const Scale scale{_mm256_set1_ps(tile.low), _mm256_set1_ps(tile.high), _mm256_set1_ps(tile.residual_multiplier)};
  for (int block = 0; block < BLOCKS; ++block) {
    __m256i sum[PIXELS][VECTORS];
    unrolled<PIXELS>([&](auto i) INFER_INLINE {
      unrolled<VECTORS>([&](auto j) INFER_INLINE { sum[i][j] = _mm256_setzero_si256(); });
    });
    const int8_t* weight = tile.weight + 64 * block;
    for (int64_t r = 0; r < tile.num_runs; ++r) {
      const uint8_t* x[PIXELS];
      unrolled<PIXELS>([&](auto i) INFER_INLINE { x[i] = tile.x[i] + tile.runs[r]; });
      for (int64_t q = 0; q < tile.quads; ++q, weight += 64 * BLOCKS) {
        __m256i a[PIXELS];
        unrolled<PIXELS>([&](auto i) INFER_INLINE { a[i] = quad(x[i] + 4 * q); });
        unrolled<VECTORS>([&](auto j) INFER_INLINE {
          const __m256i w =
              _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight + 16 * j)));
          unrolled<PIXELS>([&](auto i) INFER_INLINE {
            sum[i][j] = _mm256_add_epi32(sum[i][j], _mm256_madd_epi16(a[i], w));
          });
        });
      }
    }
    const int channel = 16 * block;
    const int64_t count = block + 1 < BLOCKS ? CONV_BLOCK : tile.tail;
    unrolled<PIXELS>([&](auto i) INFER_INLINE {
      const __m256 first = finished(tile, i, channel, joined(sum[i][0], sum[i][1]), scale);
      const __m256 second = finished(tile, i, channel + 8, joined(sum[i][2], sum[i][3]), scale);
      if (tile.y_float[0]) {
        store_floats(tile.y_float[i] + channel, first, count, tile.poison[i]);
        store_floats(tile.y_float[i] + channel + 8, second, count - 8, tile.poison[i]);
      } else {
        store_bytes(tile.y[i] + channel, first, second);
      }
    });
  }
}

constexpr TileKernel ONE[] = {run<1, 1>, run<1, 2>, run<1, 3>};
constexpr TileKernel TWO[] = {run<2, 1>, run<2, 2>, run<2, 3>};
constexpr TileKernel THREE[] = {run<3, 1>, run<3, 2>, run<3, 3>};
constexpr TileKernel FOUR[] = {run<4, 1>, run<4, 2>, run<4, 3>};

}  // namespace

const ConvKernels CONV_AVX2 = {{ONE, TWO, THREE, FOUR}, {3, 3, 3, 3}, conv_quantize_row, conv_max_row};

}  // namespace infer_native
