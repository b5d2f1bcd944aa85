// The register tile that every layer of int8 activations shares.
#pragma once

#include "parallel.h"

namespace infer_native {
namespace {

template <int HEIGHT, int BLOCKS>
using Accumulators = Vector::Sums[HEIGHT][BLOCKS];

// Where the weights of a register tile come from.
enum class Weights {
  CACHED,
  SHARED,  // memory, and then the cache for the tiles of more rows
  ONCE,    // memory: no other rows meet them
};

// acc[row][b] += weights of block b times activations of a row, over `quads` quads. Quads of one block follow each
// other, blocks are `stride` bytes apart. Read ONCE, the quads end where their blocks do, and after a block each stream
// goes on with the one that follows all of them.
template <int HEIGHT, int BLOCKS, Weights WEIGHTS>
inline __attribute__((always_inline)) void accumulate(const char* weights, int64_t stride, int64_t quads,
                                                      const int8_t* q, Accumulators<HEIGHT, BLOCKS>& acc) {
  constexpr int64_t AHEAD = Vector::PREFETCH / 64;
  for (int64_t quad = 0; quad < quads; ++quad, weights += 64, q += HEIGHT * Vector::QUAD_BYTES) {
    Vector::Quads codes[BLOCKS];
    const int64_t skip = WEIGHTS == Weights::ONCE && quad + AHEAD >= quads ? (BLOCKS - 1) * stride : 0;
    unroll<BLOCKS>([&](auto b) {
      if (WEIGHTS != Weights::CACHED) __builtin_prefetch(weights + b * stride + Vector::PREFETCH + skip);
      codes[b] = Vector::load_quads(weights + b * stride);
    });
    unroll<HEIGHT>([&](auto row) {
      unroll<BLOCKS>([&](auto b) { acc[row][b] = Vector::dot(acc[row][b], codes[b], q + row * Vector::QUAD_BYTES); });
    });
  }
}

}  // namespace
}  // namespace infer_native
