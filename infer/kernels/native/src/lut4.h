// y = x @ weight.T where a weight is an index of 4 bits into 16 int8 entries, times an int8 scale per 64 columns.
//
// Few rows: codes are decoded in registers and meet every row at once. More rows: a panel of TILE_BLOCKS blocks by
// PANEL_GROUPS groups is decoded into the first-level cache and register tiles go over it.
#pragma once

#include "parallel.h"

namespace infer_native {
namespace {

constexpr int64_t PANEL_GROUPS = 16 / Vector::TILE_BLOCKS;
constexpr int64_t CHUNK_TILES = 192 / Vector::TILE_ROWS;  // rows that share a decoded panel
constexpr float TABLE_STEP = 1 / (LEVELS * LEVELS);

struct Lut4Activations {
  int8_t* q;
  float* step;       // [tile][group][row of the tile]
  int32_t* offset;   // the same
};

// Rows of 16 outputs of one block, from the float sums over all groups.
template <int HEIGHT>
inline void finish_lut4(const Vector::Floats* total, const Lut4Weight& weight, int64_t block, const float* bias,
                        float* y) {
  const int64_t n = block * BLOCK_ROWS, count = weight.rows - n;
  const Vector::Floats factor =
      Vector::mul(Vector::load(weight.row_scale + n), Vector::broadcast(TABLE_STEP));
  for (int row = 0; row < HEIGHT; ++row) {
    Vector::Floats value = Vector::mul(total[row], factor);
    if (bias != nullptr) value = Vector::add(value, read_row(bias + n, count));
    write_row(y + row * weight.rows + n, count, value);
  }
}

template <int HEIGHT>
void lut4_direct(const Lut4Weight& weight, const Lut4Activations& x, Range blocks, const float* bias, float* y) {
  constexpr int SPLIT = HEIGHT == 1 ? 4 : HEIGHT <= 4 ? 2 : 1;  // independent sums hide the latency of `dot`
  const int64_t groups = weight.columns / GROUP;
  for (int64_t block = blocks.begin; block < blocks.end; ++block) {
    const uint8_t* codes = weight.codes + block * groups * 512;
    const int8_t* scale = weight.scale + block * groups * 16;
    const Vector::Table table = Vector::load_table(weight.table + block * 16);
    Vector::Floats total[HEIGHT];
    for (int row = 0; row < HEIGHT; ++row) total[row] = Vector::broadcast(0.0f);
    const int8_t* q = x.q;
    for (int64_t group = 0; group < groups; ++group, codes += 512, scale += 16, q += 16 * 4 * HEIGHT) {
      Vector::Sums sum[HEIGHT][SPLIT];
      for (int row = 0; row < HEIGHT; ++row)
        for (int i = 0; i < SPLIT; ++i)
          sum[row][i] = Vector::broadcast(i == 0 ? x.offset[group * HEIGHT + row] : int32_t{0});
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        __builtin_prefetch(codes + j * 64 + Vector::PREFETCH);
        Vector::Quads low, high;
        Vector::decode(codes + j * 64, table, low, high);
#pragma GCC unroll 16
        for (int row = 0; row < HEIGHT; ++row) {
          Vector::Sums& first = sum[row][2 * j % SPLIT];
          first = Vector::dot(first, low, q + (j * HEIGHT + row) * 4);
          Vector::Sums& second = sum[row][(2 * j + 1) % SPLIT];
          second = Vector::dot(second, high, q + ((j + 8) * HEIGHT + row) * 4);
        }
      }
      const Vector::Floats factor = Vector::load_scale(scale);
      for (int row = 0; row < HEIGHT; ++row) {
        for (int i = 1; i < SPLIT; ++i) sum[row][0] = Vector::add(sum[row][0], sum[row][i]);
        const Vector::Floats step = Vector::broadcast(x.step[group * HEIGHT + row]);
        total[row] = Vector::fma(Vector::to_float(sum[row][0]), Vector::mul(factor, step), total[row]);
      }
    }
    finish_lut4<HEIGHT>(total, weight, block, bias, y);
  }
}

struct Lut4Panel {
  alignas(64) uint8_t quads[Vector::TILE_BLOCKS][PANEL_GROUPS * 16][64];
  alignas(64) float scale[Vector::TILE_BLOCKS][PANEL_GROUPS][16];
};

inline void decode_panel(const Lut4Weight& weight, int64_t block, int count, Range groups, Lut4Panel& panel) {
  const int64_t row_groups = weight.columns / GROUP;
  for (int b = 0; b < count; ++b) {
    const uint8_t* codes = weight.codes + ((block + b) * row_groups + groups.begin) * 512;
    const int8_t* scale = weight.scale + ((block + b) * row_groups + groups.begin) * 16;
    const Vector::Table table = Vector::load_table(weight.table + (block + b) * 16);
    for (int64_t group = 0; group < groups.end - groups.begin; ++group) {
      for (int j = 0; j < 8; ++j) {
        __builtin_prefetch(codes + (group * 8 + j) * 64 + PANEL_GROUPS * 512);
        Vector::Quads low, high;
        Vector::decode(codes + (group * 8 + j) * 64, table, low, high);
        Vector::store_quads(panel.quads[b][group * 16 + j], low);
        Vector::store_quads(panel.quads[b][group * 16 + j + 8], high);
      }
      Vector::store(panel.scale[b][group], Vector::load_scale(scale + group * 16));
    }
  }
}

template <int HEIGHT, int BLOCKS>
inline void lut4_tile(const Lut4Panel& panel, int64_t groups, const int8_t* q, const float* step,
                      const int32_t* offset, float* total) {
  for (int64_t group = 0; group < groups; ++group, q += 16 * 4 * HEIGHT, step += HEIGHT, offset += HEIGHT) {
    Vector::Sums sum[HEIGHT][BLOCKS];
#pragma GCC unroll 8
    for (int row = 0; row < HEIGHT; ++row)
      for (int b = 0; b < BLOCKS; ++b) sum[row][b] = Vector::broadcast(offset[row]);
    for (int quad = 0; quad < 16; ++quad) {
      Vector::Quads weights[BLOCKS];
#pragma GCC unroll 4
      for (int b = 0; b < BLOCKS; ++b) weights[b] = Vector::load_quads(panel.quads[b][group * 16 + quad]);
#pragma GCC unroll 8
      for (int row = 0; row < HEIGHT; ++row)
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; ++b)
          sum[row][b] = Vector::dot(sum[row][b], weights[b], q + (quad * HEIGHT + row) * 4);
    }
#pragma GCC unroll 8
    for (int row = 0; row < HEIGHT; ++row) {
      const Vector::Floats row_step = Vector::broadcast(step[row]);
#pragma GCC unroll 4
      for (int b = 0; b < BLOCKS; ++b) {
        float* place = total + (row * Vector::TILE_BLOCKS + b) * 16;
        const Vector::Floats factor = Vector::mul(Vector::load(panel.scale[b][group]), row_step);
        Vector::store(place, Vector::fma(Vector::to_float(sum[row][b]), factor, Vector::load(place)));
      }
    }
  }
}

template <int BLOCKS>
void lut4_strip(const Lut4Weight& weight, const Lut4Activations& x, const Tiles& tiles, Range chunk, int64_t block,
                const float* bias, float* y) {
  const int64_t groups = weight.columns / GROUP, first = tiles.start(chunk.begin);
  Lut4Panel panel;
  alignas(64) float total[CHUNK_TILES * Vector::TILE_ROWS][Vector::TILE_BLOCKS][16];
  std::memset(total, 0, (tiles.start(chunk.end) - first) * sizeof total[0]);
  for (int64_t group = 0; group < groups; group += PANEL_GROUPS) {
    const int64_t count = groups - group < PANEL_GROUPS ? groups - group : PANEL_GROUPS;
    decode_panel(weight, block, BLOCKS, {group, group + count}, panel);
    for (int64_t tile = chunk.begin; tile < chunk.end; ++tile) {
      const int64_t start = tiles.start(tile), height = tiles.height(tile);
      const int64_t place = start * groups + group * height;
      with_height<Vector::TILE_ROWS>(tiles.height(tile), [&](auto rows) {
        lut4_tile<rows, BLOCKS>(panel, count, x.q + place * GROUP, x.step + place, x.offset + place,
                                total[start - first][0]);
      });
    }
  }
  for (int64_t row = first; row < tiles.start(chunk.end); ++row)
    for (int b = 0; b < BLOCKS; ++b) {
      const Vector::Floats sum = Vector::load(total[row - first][b]);
      finish_lut4<1>(&sum, weight, block + b, bias, y + row * weight.rows);
    }
}

void lut4_panels(const Lut4Weight& weight, const Lut4Activations& x, const Tiles& tiles, Range mine, Range blocks,
                 const float* bias, float* y) {
  for (int64_t tile = mine.begin; tile < mine.end; tile += CHUNK_TILES) {
    const Range chunk{tile, tile + CHUNK_TILES < mine.end ? tile + CHUNK_TILES : mine.end};
    int64_t block = blocks.begin;
    for (; block + Vector::TILE_BLOCKS <= blocks.end; block += Vector::TILE_BLOCKS)
      lut4_strip<Vector::TILE_BLOCKS>(weight, x, tiles, chunk, block, bias, y);
    if (Vector::TILE_BLOCKS > 2 && block + 2 <= blocks.end) {
      lut4_strip<(Vector::TILE_BLOCKS > 2 ? 2 : 1)>(weight, x, tiles, chunk, block, bias, y);
      block += 2;
    }
    for (; block < blocks.end; ++block) lut4_strip<1>(weight, x, tiles, chunk, block, bias, y);
  }
}

void lut4_rows(const Lut4Weight& weight, const Lut4Activations& x, const Tiles& tiles, Range mine, Range blocks,
               const float* bias, float* y) {
  if (tiles.rows > Vector::DIRECT_ROWS) return lut4_panels(weight, x, tiles, mine, blocks, bias, y);
  with_height<Vector::DIRECT_ROWS>(static_cast<int>(tiles.rows),
                                   [&](auto rows) { lut4_direct<rows>(weight, x, blocks, bias, y); });
}

void run_lut4(const float* x, int64_t m, const Lut4Weight& weight, const float* bias, float* y) {
  if (m == 0 || weight.rows == 0) return;
  const int64_t groups = weight.columns / GROUP, blocks = packed_blocks(weight.rows);
  const Tiles tiles(m, m <= Vector::DIRECT_ROWS ? Vector::DIRECT_ROWS : Vector::TILE_ROWS);
  const int64_t padded = (m * groups + 15) / 16 * 16;
  char* memory = static_cast<char*>(scratch(m * weight.columns + 64 + padded * 8));
  Lut4Activations activations;
  activations.step = reinterpret_cast<float*>(memory);
  activations.offset = reinterpret_cast<int32_t*>(memory + padded * 4);
  activations.q = reinterpret_cast<int8_t*>(memory + padded * 8);

  const auto quantize = [&](Range rows) {
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t start = tiles.start(tile), height = tiles.height(tile);
      for (int64_t row = start; row < start + height; ++row) {
        if (row < rows.begin || row >= rows.end) continue;
        const int64_t place = start * groups;
        quantize_groups(x + row * weight.columns, groups, height, activations.q + place * GROUP + (row - start) * 4,
                        activations.step + place + row - start, activations.offset + place + row - start);
      }
    }
  };
  parallel(tiles, weight.columns, blocks, quantize, [&](Range my_tiles, Range my_blocks) {
    lut4_rows(weight, activations, tiles, my_tiles, my_blocks, bias, y);
  });
}

}  // namespace
}  // namespace infer_native
