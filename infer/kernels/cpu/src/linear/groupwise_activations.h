// Activations of groupwise weights, quantized to int8 for each 64 or 32 columns, with what each part of them adds to the products.
#pragma once

#include "linear/parallel_linear.h"

namespace infer_native {
namespace {

// Steps of 64 columns: one, or two for a weight with two scales, where a second step costs one multiplication for each 16 rows of the
// weight and halves the divergence (docs/decisions/0510). Files with four scales were made for one step for 256 columns.
template <int PARTS>
constexpr int STEPS = PARTS == 2 ? 2 : 1;

// Quantized activations; each of the PARTS (1, 2 or 4) of 64 columns has a weight scale.
struct GroupwiseActivations {
  int8_t* q;
  float* step;      // [tile][group][step][row of the tile]
  int32_t* offset;  // [tile][group][part][row of the tile]: minus the sum of q times what stored codes exceed their values by
  float* sum;       // [tile][group][part][row of the tile]: its step times the sum of q

  // Returns those of the tile that begins with row `start`.
  template <int PARTS>
  GroupwiseActivations from(int64_t start, int64_t groups) const {
    const int64_t place = start * groups;
    return {q + place * 16 * Vector::QUAD_BYTES, step + place * STEPS<PARTS>, offset + place * PARTS, sum + place * PARTS};
  }
};

// Returns the number of groups of m rows, rounded up so that the next array is 64-byte aligned.
inline int64_t groupwise_groups(int64_t m, int64_t columns) { return (m * (columns / GROUP) + 15) / 16 * 16; }

inline Tiles groupwise_tiles(int64_t m) { return {m, Vector::DIRECT_TILE_ROWS}; }

template <int PARTS>
int64_t groupwise_bytes(int64_t m, int64_t columns) {
  return m * columns / 4 * Vector::QUAD_BYTES + groupwise_groups(m, columns) * 4 * (STEPS<PARTS> + 2 * PARTS);
}

template <int PARTS>
GroupwiseActivations groupwise_activations(const void* memory, int64_t m, int64_t columns) {
  const int64_t bytes = groupwise_groups(m, columns) * 4;
  char* place = static_cast<char*>(const_cast<void*>(memory));
  return {reinterpret_cast<int8_t*>(place + bytes * (STEPS<PARTS> + 2 * PARTS)), reinterpret_cast<float*>(place),
          reinterpret_cast<int32_t*>(place + bytes * STEPS<PARTS>), reinterpret_cast<float*>(place + bytes * (STEPS<PARTS> + PARTS))};
}

// Quantizes one row with its steps of each 64 columns, as `quantize_groups` does, and sums its parts.
template <int PARTS>
inline void quantize_parts(const float* x, int64_t groups, int64_t height, int32_t excess, int8_t* q, float* step,
                           int32_t* offset, float* sum) {
  constexpr int WIDTH = 4 / STEPS<PARTS>;  // vectors of columns that share a step
  const int64_t stride = height * Vector::QUAD_BYTES;
  for (int64_t piece = 0; piece < groups * STEPS<PARTS>; ++piece, x += WIDTH * 16, q += WIDTH * 4 * stride, step += height) {
    Vector::Floats part[WIDTH];
    *step = load_group(x, part);
    Vector::Sums total = Vector::broadcast(int32_t{0});
    const Grid<ValueRange::SYMMETRIC> grid(*step, 0);
    for (int i = 0; i < WIDTH; ++i) {
      const Vector::Sums codes = grid(part[i]);
      total = i % (4 / PARTS) == 0 ? codes : Vector::add(total, codes);
      Vector::store_quads(q + 4 * i * stride, stride, codes);
      if ((i + 1) % (4 / PARTS) != 0) continue;
      const int32_t all = Vector::reduce_add(total);
      *offset = -excess * all;
      *sum = *step * static_cast<float>(all);
      offset += height, sum += height;
    }
  }
}

template <int PARTS>
void quantize_groupwise(const float* x, int64_t stride, int64_t m, int64_t columns, InputGrid given, int64_t part, int64_t parts,
                        void* memory) {
  const int64_t groups = columns / GROUP;
  const int32_t excess = given.zero >= 0 ? static_cast<int32_t>(given.zero) : Vector::UNSIGNED ? 128 : 0;
  const GroupwiseActivations to = groupwise_activations<PARTS>(memory, m, columns);
  each_slice(groupwise_tiles(m), groups, part, parts, [&](int64_t start, int64_t height, Range rows, Range mine) {
    const int64_t place = start * groups + mine.begin * height, count = mine.end - mine.begin;
    for (int64_t row = rows.begin; row < rows.end; ++row)
      quantize_parts<PARTS>(x + (start + row) * stride + mine.begin * GROUP, count, height, excess,
                            to.q + (place * 16 + row) * Vector::QUAD_BYTES, to.step + place * STEPS<PARTS> + row,
                            to.offset + place * PARTS + row, to.sum + place * PARTS + row);
  });
}

}  // namespace
}  // namespace infer_native
