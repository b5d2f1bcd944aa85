// The register tile that every layer of int8 activations shares.
#pragma once

#include "linear/parallel_linear.h"

namespace infer_native {
namespace {

// Of a `Vector`: TILE_ROWS by TILE_BLOCKS is the register tile of many int8 rows; up to STREAM_ROWS, in tiles of
// STREAM_TILE_ROWS, go through in one pass by one block, which reads weights in a single stream, asking PREFETCH bytes ahead.
// Of 4-bit weights, up to DIRECT_ROWS go through in one pass of decoding, direct_blocks(rows) blocks side by side; more
// either in tiles of DIRECT_TILE_ROWS that decode again, or by PANELS of decoded weights. DOT_CHAINS independent sums hide
// the latency of `dot`, FLOAT_CHAINS of one or two rows that of `fma`.

// A quad that several blocks share is worth a register.
template <int BLOCKS>
inline __attribute__((always_inline)) Vector::Sums dot_shared(Vector::Sums sum, Vector::Quads weights, const int8_t* quad) {
  return BLOCKS > 1 ? Vector::dot(sum, weights, quad) : Vector::dot_once(sum, weights, quad);
}

template <int HEIGHT, int BLOCKS>
using Accumulators = Vector::Sums[HEIGHT][BLOCKS];

// Where the weights of a register tile come from.
enum class Weights {
  CACHED,
  SHARED,  // memory, and then the cache for the tiles of more rows
  ONCE,    // memory: no other rows meet them
};

constexpr int SHARED_AHEAD = 2048;  // bytes; farther ahead, what the next tile of rows reads again would be pushed out

// acc[row][b] += weights of block b times activations of a row, over `quads` quads. Quads of one block follow each
// other, blocks are `stride` bytes apart. Read ONCE, the quads end where their blocks do, and after a block each stream
// goes on with the one that follows all of them. Of two tiles in one pass, the FIRST rows are at q, the others at `second`.
template <int HEIGHT, int BLOCKS, Weights WEIGHTS, int FIRST = HEIGHT>
inline __attribute__((always_inline)) void accumulate(const char* weights, int64_t stride, int64_t quads, const int8_t* q,
                                                      Accumulators<HEIGHT, BLOCKS>& acc, const int8_t* second = nullptr) {
  constexpr int AHEAD = WEIGHTS == Weights::SHARED && Vector::PREFETCH > SHARED_AHEAD ? SHARED_AHEAD : Vector::PREFETCH;
  for (int64_t quad = 0; quad < quads; ++quad, weights += 64, q += FIRST * Vector::QUAD_BYTES) {
    Vector::Quads codes[BLOCKS];
    const int64_t skip = WEIGHTS == Weights::ONCE && quad + AHEAD / 64 >= quads ? (BLOCKS - 1) * stride : 0;
    unroll<BLOCKS>([&](auto b) {
      if (WEIGHTS != Weights::CACHED) __builtin_prefetch(weights + b * stride + AHEAD + skip);
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
