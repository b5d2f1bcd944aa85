// Convolution tiles with ARM's dot-product instructions, which multiply signed by signed bytes: activations are taken
// less 128, and 128 times the sum of the weights, which every pixel of a tile shares, is added.
#include <arm_neon.h>

#include <cstring>

#include "conv/conv_loop.h"

namespace infer_native {
namespace {

constexpr int VECTORS = 4;  // of 4 output channels: one block

inline int8x16_t quad(const uint8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return veorq_s8(vreinterpretq_s8_s32(vdupq_n_s32(four)), vdupq_n_s8(-128));
}

// Both keep NaN, and the sign of zero where both operands are zero.
inline float32x4_t at_least(float32x4_t y, float32x4_t low) { return vbslq_f32(vcltq_f32(y, low), low, y); }
inline float32x4_t at_most(float32x4_t y, float32x4_t high) { return vbslq_f32(vcgtq_f32(y, high), high, y); }

// Four results of one pixel, before they are rounded.
inline float32x4_t finished(const Tile& tile, int pixel, int channel, int32x4_t sum) {
  float32x4_t y = vfmaq_f32(vld1q_f32(tile.offset + channel), vcvtq_f32_s32(sum), vld1q_f32(tile.multiplier + channel));
  if (tile.residual[0]) {
    uint32_t four;
    std::memcpy(&four, tile.residual[pixel] + channel, 4);
    const uint16x8_t words = vmovl_u8(vcreate_u8(four));
    y = vfmaq_f32(y, vcvtq_f32_u32(vmovl_u16(vget_low_u16(words))), vdupq_n_f32(tile.residual_multiplier));
  }
  return at_most(at_least(y, vdupq_n_f32(tile.low)), vdupq_n_f32(tile.high));
}

// A NaN becomes 0.
inline uint16x4_t rounded(float32x4_t y) { return vqmovun_s32(vcvtnq_s32_f32(y)); }

template <int BLOCKS, int PIXELS>
void run(const Tile& tile) {
  for (int block = 0; block < BLOCKS; ++block) {
    const int channel = 16 * block;
    int32x4_t sum[PIXELS][VECTORS], weights[VECTORS];
    unrolled<VECTORS>([&](auto j) INFER_INLINE {
      weights[j] = vdupq_n_s32(0);
      unrolled<PIXELS>([&](auto i) INFER_INLINE { sum[i][j] = vld1q_s32(tile.start + channel + 4 * j); });
    });
    const int8_t* weight = tile.weight + 64 * block;
    for (int64_t r = 0; r < tile.num_runs; ++r) {
      const uint8_t* x[PIXELS];
      unrolled<PIXELS>([&](auto i) INFER_INLINE { x[i] = tile.x[i] + tile.runs[r]; });
      for (int64_t q = 0; q < tile.quads; ++q, weight += 64 * BLOCKS) {
        int8x16_t w[VECTORS];
        unrolled<VECTORS>([&](auto j) INFER_INLINE {
          w[j] = vld1q_s8(weight + 16 * j);
          weights[j] = vdotq_s32(weights[j], w[j], vdupq_n_s8(1));
        });
        unrolled<PIXELS>([&](auto i) INFER_INLINE {
          const int8x16_t a = quad(x[i] + 4 * q);
          unrolled<VECTORS>([&](auto j) INFER_INLINE { sum[i][j] = vdotq_s32(sum[i][j], w[j], a); });
        });
      }
    }
    const int64_t count = block + 1 < BLOCKS ? CONV_BLOCK : tile.tail;
    unrolled<PIXELS>([&](auto i) INFER_INLINE {
      float32x4_t y[VECTORS];
      unrolled<VECTORS>([&](auto j) INFER_INLINE {
        y[j] = finished(tile, i, channel + 4 * j, vaddq_s32(sum[i][j], vshlq_n_s32(weights[j], 7)));
      });
      if (tile.y_float[0]) {
        alignas(16) float all[CONV_BLOCK];
        unrolled<VECTORS>([&](auto j) INFER_INLINE { vst1q_f32(all + 4 * j, vaddq_f32(y[j], vdupq_n_f32(tile.poison[i]))); });
        std::memcpy(tile.y_float[i] + channel, all, sizeof(float) * static_cast<size_t>(count));
      } else {
        const uint8x8_t first = vqmovn_u16(vcombine_u16(rounded(y[0]), rounded(y[1])));
        const uint8x8_t second = vqmovn_u16(vcombine_u16(rounded(y[2]), rounded(y[3])));
        vst1q_u8(tile.y[i] + channel, vcombine_u8(first, second));
      }
    });
  }
}

// With the weights, their sums, a quad of activations and two constants five pixels use 31 registers.
constexpr TileKernel ONE[] = {run<1, 1>, run<1, 2>, run<1, 3>, run<1, 4>, run<1, 5>};
constexpr TileKernel TWO[] = {run<2, 1>, run<2, 2>, run<2, 3>, run<2, 4>, run<2, 5>};
constexpr TileKernel THREE[] = {run<3, 1>, run<3, 2>, run<3, 3>, run<3, 4>, run<3, 5>};
constexpr TileKernel FOUR[] = {run<4, 1>, run<4, 2>, run<4, 3>, run<4, 4>, run<4, 5>};

}  // namespace

const ConvKernels CONV_NEON_DOTPROD = {
    {ONE, TWO, THREE, FOUR}, {5, 5, 5, 5}, conv_quantize_row, conv_max_row};

}  // namespace infer_native
