// Register tile of the layers with int8 activations.
#pragma once

#include "linear/parallel_linear.h"

namespace infer_native {
namespace {

// Tuning constants of each `Vector`. int8 weights: the register tile is TILE_ROWS by TILE_BLOCKS; up to STREAM_ROWS rows, in
// tiles of STREAM_TILE_ROWS, are multiplied in one pass over one block, which reads weights as a single stream, PREFETCH bytes
// ahead. 4-bit weights: up to DIRECT_ROWS rows share one decoding, direct_blocks(rows) blocks side by side; more rows go in
// tiles of DIRECT_TILE_ROWS that decode again, or over PANELS of decoded weights. DOT_CHAINS independent sums hide the
// latency of `dot`, FLOAT_CHAINS that of `fma` with one or two rows.

// Adds a dot product; a quad shared by several blocks is kept in a register, another is a memory operand.
template <int BLOCKS>
inline __attribute__((always_inline)) Vector::Sums dot_shared(Vector::Sums sum, Vector::Quads weights, const int8_t* quad) {
  return BLOCKS > 1 ? Vector::dot(sum, weights, quad) : Vector::dot_from_memory(sum, weights, quad);
}

template <int HEIGHT, int BLOCKS>
using Accumulators = Vector::Sums[HEIGHT][BLOCKS];

// Where the weights of a register tile are read from.
enum class WeightSource {
  CACHE,
  REUSED,    // memory, then cache for further tiles of rows
  STREAMED,  // memory, by one tile of rows only
};

constexpr int REUSED_PREFETCH = 2048;  // bytes; a larger distance evicts weights that the next tile of rows reads again

// acc[row][b] += weights of block b times activations of a row, over `quads` quads. Quads of one block are consecutive,
// blocks `stride` bytes apart. STREAMED quads end at the end of their blocks, and each stream continues after the last of
// the BLOCKS blocks. With two tiles in one pass, the FIRST rows are at q, the others at `second`.
template <int HEIGHT, int BLOCKS, WeightSource SOURCE, int FIRST = HEIGHT>
inline __attribute__((always_inline)) void accumulate(const char* weights, int64_t stride, int64_t quads, const int8_t* q,
                                                      Accumulators<HEIGHT, BLOCKS>& acc, const int8_t* second = nullptr) {
  constexpr int64_t REUSED = Vector::PREFETCH > REUSED_PREFETCH ? REUSED_PREFETCH : Vector::PREFETCH;
  const int64_t distance = SOURCE == WeightSource::REUSED ? REUSED : stream_distance<HEIGHT>();
  for (int64_t quad = 0; quad < quads; ++quad, weights += 64, q += FIRST * Vector::QUAD_BYTES) {
    Vector::Quads codes[BLOCKS];
    const int64_t skip = SOURCE == WeightSource::STREAMED && quad + distance / 64 >= quads ? (BLOCKS - 1) * stride : 0;
    unroll<BLOCKS>([&](auto b) {
      if (SOURCE != WeightSource::CACHE) __builtin_prefetch(weights + b * stride + distance + skip);
      codes[b] = Vector::load_quads(weights + b * stride);
    });
    unroll<HEIGHT>([&](auto row) {
      const int8_t* quad_of_row = row < FIRST ? q + row * Vector::QUAD_BYTES : second + (row - FIRST) * Vector::QUAD_BYTES;
      unroll<BLOCKS>([&](auto b) { acc[row][b] = dot_shared<BLOCKS>(acc[row][b], codes[b], quad_of_row); });
    });
    if (FIRST < HEIGHT) second += (HEIGHT - FIRST) * Vector::QUAD_BYTES;
  }
}

}  // namespace
}  // namespace infer_native
