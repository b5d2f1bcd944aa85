// y = x @ weight.T where a weight is an index of 4 bits into 16 int8 entries, times an int8 scale per 64 or per 16 columns.
#pragma once

#include "lut4_panel.h"

namespace infer_native {
namespace {

template <int SCALES>
void lut4_rows(const Lut4Weight& weight, const Lut4Activations& x, const Tiles& tiles, Range mine, Range blocks,
               const float* bias, Rows y) {
  if (tiles.rows > Vector::DIRECT_ROWS) return lut4_panels<SCALES>(weight, x, tiles, mine, blocks, bias, y);
  with_height<Vector::DIRECT_ROWS>(static_cast<int>(tiles.rows), [&](auto rows) {
    constexpr int BLOCKS = rows * 2 <= Vector::DIRECT_ROWS ? Vector::DIRECT_BLOCKS : 1;
    const int64_t whole = blocks.begin + (blocks.end - blocks.begin) / BLOCKS * BLOCKS;
    if constexpr (SCALES == 1) {
      lut4_direct<rows, BLOCKS>(weight, x, {blocks.begin, whole}, bias, y);
      if (BLOCKS > 1) lut4_direct<rows, 1>(weight, x, {whole, blocks.end}, bias, y);
    } else {
      lut4_direct_fine<rows, BLOCKS>(weight, x, {blocks.begin, whole}, bias, y);
      if (BLOCKS > 1) lut4_direct_fine<rows, 1>(weight, x, {whole, blocks.end}, bias, y);
    }
  });
}

inline Tiles lut4_tiles(int64_t m) { return {m, m <= Vector::DIRECT_ROWS ? Vector::DIRECT_ROWS : Vector::TILE_ROWS}; }

inline int64_t lut4_steps(int64_t m, int64_t columns) { return (m * (columns / GROUP) + 15) / 16 * 16; }

template <int SCALES>
int64_t lut4_bytes(int64_t m, int64_t columns) {
  return m * columns / 4 * Vector::QUAD_BYTES + lut4_steps(m, columns) * 4 * (1 + SCALES);
}

template <int SCALES>
Lut4Activations lut4_activations(const void* memory, int64_t m, int64_t columns) {
  const int64_t steps = lut4_steps(m, columns);
  char* place = static_cast<char*>(const_cast<void*>(memory));
  return {reinterpret_cast<int8_t*>(place + steps * 4 * (1 + SCALES)), reinterpret_cast<float*>(place),
          reinterpret_cast<int32_t*>(place + steps * 4)};
}

template <int SCALES>
void quantize_lut4(const float* x, int64_t stride, int64_t m, int64_t columns, InputGrid, int64_t part, int64_t parts,
                   void* memory) {
  const int64_t groups = columns / GROUP;
  const Lut4Activations to = lut4_activations<SCALES>(memory, m, columns);
  each_slice(lut4_tiles(m), groups, part, parts, [&](int64_t start, int64_t height, Range mine) {
    const int64_t place = start * groups + mine.begin * height, count = mine.end - mine.begin;
    for (int64_t row = 0; row < height; ++row)
      quantize_groups<SCALES>(x + (start + row) * stride + mine.begin * GROUP, count, height,
                              to.q + (place * 16 + row) * Vector::QUAD_BYTES, to.step + place + row,
                              to.offset + place * SCALES + row);
  });
}

template <int SCALES>
void multiply_lut4(const void* packed, const void* memory, int64_t m, const float* bias, Rows y, Share mine) {
  const Lut4Weight& weight = *static_cast<const Lut4Weight*>(packed);
  const Lut4Activations x = lut4_activations<SCALES>(memory, m, weight.columns);
  const Tiles tiles = lut4_tiles(m);
  multiply_part(tiles, packed_blocks(weight.rows), mine, [&](Range my_tiles, Range my_blocks) {
    lut4_rows<SCALES>(weight, x, tiles, my_tiles, my_blocks, bias, y);
  });
}

template <int SCALES>
void run_lut4_of(const float* x, int64_t m, const Lut4Weight& weight, const float* bias, float* y) {
  void* memory = scratch(lut4_bytes<SCALES>(m, weight.columns));
  const Lut4Activations activations = lut4_activations<SCALES>(memory, m, weight.columns);
  const Tiles tiles = lut4_tiles(m);
  const auto quantize = [&](int64_t part, int64_t parts) {
    quantize_lut4<SCALES>(x, weight.columns, m, weight.columns, {}, part, parts, memory);
  };
  parallel(tiles, weight.columns, packed_blocks(weight.rows), quantize, [&](Range my_tiles, Range my_blocks) {
    lut4_rows<SCALES>(weight, activations, tiles, my_tiles, my_blocks, bias, {y, weight.rows});
  });
}

void run_lut4(const float* x, int64_t m, const Lut4Weight& weight, const float* bias, float* y) {
  if (m == 0 || weight.rows == 0) return;
  if (weight.scales == 1) return run_lut4_of<1>(x, m, weight, bias, y);
  run_lut4_of<FINE_SCALES>(x, m, weight, bias, y);
}

template <int SCALES>
constexpr Staged STAGED_LUT4_OF = {lut4_bytes<SCALES>, quantize_lut4<SCALES>, multiply_lut4<SCALES>};

constexpr Staged STAGED_LUT4 = STAGED_LUT4_OF<1>, STAGED_LUT4_FINE = STAGED_LUT4_OF<FINE_SCALES>;

}  // namespace
}  // namespace infer_native
