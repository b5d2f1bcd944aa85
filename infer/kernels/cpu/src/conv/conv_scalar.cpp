// Convolution tiles in plain C++: for other CPUs, and the twin that the rest is compared with.
#include <cmath>

#include "conv/conv_loop.h"

namespace infer_native {
namespace {

int32_t sum_of(const Tile& tile, int blocks, int block, int channel) {
  const int8_t* weight = tile.weight + 64 * block + 4 * channel;
  int32_t sum = tile.start[16 * block + channel];
  for (int64_t r = 0; r < tile.num_runs; ++r)
    for (int64_t q = 0; q < tile.quads; ++q, weight += 64 * blocks)
      for (int i = 0; i < 4; ++i) sum += int32_t{tile.x[0][tile.runs[r] + 4 * q + i]} * weight[i];
  return sum;
}

template <int BLOCKS>
void run(const Tile& tile) {
  for (int channel = 0; channel < 16 * BLOCKS; ++channel) {
    const float sum = static_cast<float>(sum_of(tile, BLOCKS, channel / 16, channel % 16));
    float y = std::fma(sum, tile.multiplier[channel], tile.offset[channel]);
    if (tile.residual[0]) y = std::fma(static_cast<float>(tile.residual[0][channel]), tile.residual_multiplier, y);
    y = y < tile.low ? tile.low : y;
    y = y > tile.high ? tile.high : y;
    if (tile.y_float[0]) {
      if (channel < 16 * (BLOCKS - 1) + tile.tail) tile.y_float[0][channel] = y + tile.poison[0];
    } else {
      tile.y[0][channel] = std::isnan(y) ? 0 : static_cast<uint8_t>(std::nearbyint(y));
    }
  }
}

constexpr TileKernel ONE[] = {run<1>}, TWO[] = {run<2>}, THREE[] = {run<3>}, FOUR[] = {run<4>};

}  // namespace

const ConvKernels CONV_SCALAR = {{ONE, TWO, THREE, FOUR}, {1, 1, 1, 1}, conv_quantize_row, conv_max_row};

}  // namespace infer_native
