// The register tile that every layer of int8 activations shares.
#pragma once

#include "parallel.h"

namespace infer_native {
namespace {

template <int HEIGHT, int BLOCKS>
using Accumulators = Vector::Sums[HEIGHT][BLOCKS];

// acc[row][b] += weights of block b times activations of a row, over `quads` quads. Quads of one block follow each
// other, blocks are `stride` bytes apart.
template <int HEIGHT, int BLOCKS, bool FROM_MEMORY>
inline __attribute__((always_inline)) void accumulate(const char* weights, int64_t stride, int64_t quads,
                                                      const int8_t* q, Accumulators<HEIGHT, BLOCKS>& acc) {
  for (int64_t quad = 0; quad < quads; ++quad, weights += 64, q += HEIGHT * Vector::QUAD_BYTES) {
    Vector::Quads codes[BLOCKS];
    unroll<BLOCKS>([&](auto b) {
      if (FROM_MEMORY) __builtin_prefetch(weights + b * stride + Vector::PREFETCH);
      codes[b] = Vector::load_quads(weights + b * stride);
    });
    unroll<HEIGHT>([&](auto row) {
      unroll<BLOCKS>([&](auto b) { acc[row][b] = Vector::dot(acc[row][b], codes[b], q + row * Vector::QUAD_BYTES); });
    });
  }
}

}  // namespace
}  // namespace infer_native
