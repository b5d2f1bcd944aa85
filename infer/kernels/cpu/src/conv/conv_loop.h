// The walk over a convolution that every instruction set shares: panels of output channels, tiles of output pixels.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "conv/conv.h"
#include "instruction_set.h"

namespace infer_native {

constexpr int MAX_TILE = 32;  // pixels
constexpr int MAX_RUNS = 64;  // stretches of contiguous input bytes under a window

// Arguments of a kernel of `blocks` blocks of 16 channels for one tile.
struct Tile {
  int pixels;
  const uint8_t* x[MAX_TILE];  // first byte under the window of each pixel
  const uint8_t* residual[MAX_TILE];
  uint8_t* y[MAX_TILE];
  float* y_float[MAX_TILE];
  float poison[MAX_TILE];
  const int8_t* weight;  // of the panel
  const int32_t* start;
  const float* multiplier;
  const float* offset;
  float low, high, residual_multiplier;
  int64_t tail;          // channels of the last block that a float result has
  int64_t num_runs, quads;  // each run has `quads` quads
  const int64_t* runs;   // byte offsets
};

// Bytes of floats: round to even of x / step, plus zero, clamped to [low, 255].
struct Grid {
  float step, zero, low;
};

using TileKernel = void (*)(const Tile&);

// kernels[blocks - 1][pixels - 1], with `limit[blocks - 1]` pixels at most.
struct ConvKernels {
  const TileKernel* kernels[CONV_PANEL];
  int limit[CONV_PANEL];
  bool (*quantize_row)(const float* x, int64_t count, const Grid& grid, uint8_t* y);
  void (*max_row)(const uint8_t* x, int64_t count, uint8_t* y);
  void (*begin)() = nullptr;  // of a thread's tiles, where they need a state of the CPU, and their end
  void (*end)() = nullptr;
  int64_t least = 0;  // pixels of an image for which these are worth it
  bool full_tiles = false;  // all but the last, rather than tiles of nearly equal size
};

// Each is defined only on its architecture.
INFER_OF_SET const ConvKernels CONV_AVX512_VNNI;
INFER_OF_SET const ConvKernels CONV_AMX;
INFER_OF_SET const ConvKernels CONV_AVX2;
INFER_OF_SET const ConvKernels CONV_NEON_DOTPROD;
INFER_OF_SET const ConvKernels CONV_SCALAR;

#define INFER_INLINE __attribute__((always_inline))

// body(0), body(1), … with constant indices, so that arrays of registers stay in registers.
template <typename Body, int... INDEX>
[[gnu::always_inline]] inline void unrolled(Body&& body, std::integer_sequence<int, INDEX...>) {
  (body(std::integral_constant<int, INDEX>()), ...);
}

template <int COUNT, typename Body>
[[gnu::always_inline]] inline void unrolled(Body&& body) {
  unrolled(body, std::make_integer_sequence<int, COUNT>());
}

const ConvKernels& conv_kernels(int64_t pixels);  // of the active instruction set

// Arguments of one sample.
void conv_fill_border(const Image& image, uint8_t value, uint8_t* y);

inline int64_t conv_quads(int64_t channels, const int64_t* kernel) { return kernel[0] * kernel[1] * channels / 4; }

namespace {  // each file has its own, compiled for its instruction set

// Returns whether a value is NaN, which becomes `low`. Adding and taking away 1.5 * 2**23 rounds as nearbyint does.
inline bool conv_quantize_row(const float* x, int64_t count, const Grid& grid, uint8_t* y) {
  int32_t bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    bad |= x[i] != x[i];
    float q = x[i] / grid.step;
    q = q > grid.low - grid.zero ? q : grid.low - grid.zero;
    q = q < 255.0f - grid.zero ? q : 255.0f - grid.zero;
    y[i] = static_cast<uint8_t>(static_cast<int32_t>((q + 12582912.0f) - 12582912.0f + grid.zero));
  }
  return bad != 0;
}

inline void conv_max_row(const uint8_t* x, int64_t count, uint8_t* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = x[i] > y[i] ? x[i] : y[i];
}

}  // namespace

}  // namespace infer_native
