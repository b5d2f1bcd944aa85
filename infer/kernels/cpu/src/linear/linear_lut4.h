// y = x @ weight.T where a weight is a 4-bit index into 16 int8 entries, times an int8 scale for each 64 or 16 columns.
#pragma once

#include "linear/lut4_panel.h"

namespace infer_native {
namespace {

// DIRECT: rows up to which one tile decodes the weight in registers. REDECODE: whether each tile of more rows decodes it
// again, instead of reading a decoded panel. With four scales a group has twice as many sums.
template <int SCALES>
constexpr int DIRECT = SCALES == 1 ? Vector::DIRECT_ROWS : Vector::DIRECT_TILE_ROWS;
template <int SCALES>
constexpr bool REDECODE = SCALES == 1 && !Vector::PANELS;

template <int SCALES, int HEIGHT>
void lut4_tile_rows(const Lut4Weight& weight, const Lut4Activations& x, Range blocks, const float* bias, Rows y) {
  constexpr int BLOCKS = SCALES == 1 || HEIGHT <= 2 ? Vector::direct_blocks(HEIGHT) : 1;
  const int64_t whole = blocks.begin + (blocks.end - blocks.begin) / BLOCKS * BLOCKS;
  if constexpr (SCALES == 1) {
    lut4_direct<HEIGHT, BLOCKS>(weight, x, {blocks.begin, whole}, bias, y);
    if (BLOCKS > 1) lut4_direct<HEIGHT, 1>(weight, x, {whole, blocks.end}, bias, y);
  } else {
    lut4_direct_fine<HEIGHT, BLOCKS>(weight, x, {blocks.begin, whole}, bias, y);
    if (BLOCKS > 1) lut4_direct_fine<HEIGHT, 1>(weight, x, {whole, blocks.end}, bias, y);
  }
}

template <int SCALES>
void lut4_rows(const Lut4Weight& weight, const Lut4Activations& x, const Tiles& tiles, Range mine, Range blocks,
               const float* bias, Rows y) {
  if constexpr (!REDECODE<SCALES>)
    if (tiles.rows > DIRECT<SCALES>) return lut4_panels<SCALES>(weight, x, tiles, mine, blocks, bias, y);
  const int64_t groups = weight.columns / GROUP;
  // With several tiles, the first reads some blocks into the cache for the others.
  const int64_t step = tiles.count > 1 ? Vector::DIRECT_BLOCKS : blocks.end - blocks.begin;
  for (int64_t chunk = mine.begin; chunk < mine.end; chunk += CHUNK_TILES) {
    const int64_t end = chunk + CHUNK_TILES < mine.end ? chunk + CHUNK_TILES : mine.end;
    for (int64_t block = blocks.begin; block < blocks.end; block += step) {
      const Range some{block, block + step < blocks.end ? block + step : blocks.end};
      for (int64_t tile = chunk; tile < end; ++tile) {
        const int64_t start = tiles.start(tile), place = start * groups;
        const Lut4Activations from{x.q + place * 16 * Vector::QUAD_BYTES, x.step + place, x.offset + place * SCALES};
        with_height<DIRECT<SCALES>>(tiles.height(tile), [&](auto rows) {
          lut4_tile_rows<SCALES, rows>(weight, from, some, bias, y.from(start));
        });
      }
    }
  }
}

template <int SCALES>
Tiles lut4_tiles(int64_t m) {
  if (m <= DIRECT<SCALES>) return {m, DIRECT<SCALES>};
  return {m, REDECODE<SCALES> ? Vector::DIRECT_TILE_ROWS : Vector::TILE_ROWS};
}

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
  each_slice(lut4_tiles<SCALES>(m), groups, part, parts, [&](int64_t start, int64_t height, Range rows, Range mine) {
    const int64_t place = start * groups + mine.begin * height, count = mine.end - mine.begin;
    for (int64_t row = rows.begin; row < rows.end; ++row)
      quantize_groups<SCALES>(x + (start + row) * stride + mine.begin * GROUP, count, height, height * Vector::QUAD_BYTES,
                              to.q + (place * 16 + row) * Vector::QUAD_BYTES, to.step + place + row,
                              to.offset + place * SCALES + row);
  });
}

template <int SCALES>
void multiply_lut4(const void* packed, const void* memory, int64_t m, const float* bias, Rows y, Share mine) {
  const Lut4Weight& weight = *static_cast<const Lut4Weight*>(packed);
  const Lut4Activations x = lut4_activations<SCALES>(memory, m, weight.columns);
  const Tiles tiles = lut4_tiles<SCALES>(m);
  multiply_part(tiles, packed_blocks(weight.rows), mine, [&](Range my_tiles, Range my_blocks) {
    lut4_rows<SCALES>(weight, x, tiles, my_tiles, my_blocks, bias, y);
  });
}

template <int SCALES>
void run_lut4_of(const float* x, int64_t m, const Lut4Weight& weight, const float* bias, float* y) {
  void* memory = scratch(lut4_bytes<SCALES>(m, weight.columns));
  const Lut4Activations activations = lut4_activations<SCALES>(memory, m, weight.columns);
  const Tiles tiles = lut4_tiles<SCALES>(m);
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
