// y = x @ weight.T where a weight is an index of 4 bits into 16 int8 entries, times an int8 scale per 64 columns.
//
// Few rows: codes are decoded in registers and meet every row at once. More rows: a panel of TILE_BLOCKS blocks by
// PANEL_GROUPS groups is decoded into the first-level cache and register tiles go over it.
#pragma once

#include "tile.h"

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

// 16 outputs of one row from the float sums over all groups.
inline void finish_lut4(Vector::Floats total, const Lut4Weight& weight, int64_t block, const float* bias, float* y) {
  const int64_t n = block * BLOCK_ROWS, count = weight.rows - n;
  const Vector::Floats factor = Vector::mul(Vector::load(weight.row_scale + n), Vector::broadcast(TABLE_STEP));
  total = Vector::mul(total, factor);
  if (bias != nullptr) total = Vector::add(total, read_row(bias + n, count));
  write_row(y + n, count, total);
}

// BLOCKS neighbours at a time: several streams from memory and independent sums, which hide the latency of `dot`.
template <int HEIGHT, int BLOCKS>
void lut4_direct(const Lut4Weight& weight, const Lut4Activations& x, Range blocks, const float* bias, Rows y) {
  constexpr int SPLIT = HEIGHT * BLOCKS < Vector::DOT_CHAINS ? 2 : 1;
  const int64_t groups = weight.columns / GROUP, stride = groups * 512;  // bytes of a block
  for (int64_t block = blocks.begin; block < blocks.end; block += BLOCKS) {
    const uint8_t* codes = weight.codes + block * stride;
    const int8_t* scale = weight.scale + block * groups * 16;
    Vector::Table table[BLOCKS];
    Vector::Floats total[BLOCKS][HEIGHT];
    unroll<BLOCKS>([&](auto b) {
      table[b] = Vector::load_table(weight.table + (block + b) * 16);
      unroll<HEIGHT>([&](auto row) { total[b][row] = Vector::broadcast(0.0f); });
    });
    const int8_t* q = x.q;
    for (int64_t group = 0; group < groups; ++group, codes += 512, scale += 16, q += 16 * HEIGHT * Vector::QUAD_BYTES) {
      Vector::Sums sum[BLOCKS][HEIGHT][SPLIT];
      unroll<HEIGHT>([&](auto row) {
        unroll<BLOCKS>([&](auto b) {
          sum[b][row][0] = Vector::broadcast(x.offset[group * HEIGHT + row]);
          if (SPLIT > 1) sum[b][row][SPLIT - 1] = Vector::broadcast(int32_t{0});
        });
      });
      // Beyond its end, a block is followed by the one that this stream reads next.
      const int64_t ahead = group * 512 + Vector::PREFETCH < stride ? Vector::PREFETCH : Vector::PREFETCH + (BLOCKS - 1) * stride;
#pragma GCC unroll 1
      for (int j = 0; j < 8; ++j) {
        const int8_t* low_quads = q + j * HEIGHT * Vector::QUAD_BYTES;
        const int8_t* high_quads = low_quads + 8 * HEIGHT * Vector::QUAD_BYTES;
        unroll<BLOCKS>([&](auto b) {
          const uint8_t* place = codes + b * stride + j * 64;
          __builtin_prefetch(place + ahead);
          Vector::Quads low, high;
          Vector::decode(place, table[b], low, high);
          unroll<HEIGHT>([&](auto row) {
            Vector::Sums& first = sum[b][row][0];
            first = Vector::dot_once(first, low, low_quads + row * Vector::QUAD_BYTES);
            Vector::Sums& second = sum[b][row][SPLIT - 1];
            second = Vector::dot_once(second, high, high_quads + row * Vector::QUAD_BYTES);
          });
        });
      }
      unroll<BLOCKS>([&](auto b) {
        const Vector::Floats factor = Vector::load_scale(scale + b * groups * 16);
        unroll<HEIGHT>([&](auto row) {
          if (SPLIT > 1) sum[b][row][0] = Vector::add(sum[b][row][0], sum[b][row][SPLIT - 1]);
          const Vector::Floats step = Vector::broadcast(x.step[group * HEIGHT + row]);
          total[b][row] = Vector::fma(Vector::to_float(sum[b][row][0]), Vector::mul(factor, step), total[b][row]);
        });
      });
    }
    unroll<BLOCKS>([&](auto b) {
      unroll<HEIGHT>([&](auto row) {
        finish_lut4(total[b][row], weight, block + b, bias, y.row(row));
      });
    });
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
#pragma GCC unroll 1
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

// total[row][b] += (sum of a group) * scale of the group in block b * step of the group in the row.
// `total` is [HEIGHT][TILE_BLOCKS][16].
template <int HEIGHT, int BLOCKS>
__attribute__((noinline)) void lut4_tile(const char* weights, int64_t stride, int64_t quads, const int8_t* q,
                                         const int32_t* offset, const float* scale, const float* step,
                                         float* total) {
  Accumulators<HEIGHT, BLOCKS> acc;
  unroll<HEIGHT>([&](auto row) {
    unroll<BLOCKS>([&](auto b) { acc[row][b] = Vector::broadcast(offset[row]); });
  });
  accumulate<HEIGHT, BLOCKS, Weights::CACHED>(weights, stride, quads, q, acc);
  unroll<BLOCKS>([&](auto b) {
    const Vector::Floats block_scale = Vector::load(scale + b * PANEL_GROUPS * 16);
    unroll<HEIGHT>([&](auto row) {
      float* place = total + (row * Vector::TILE_BLOCKS + b) * 16;
      const Vector::Floats factor = Vector::mul(block_scale, Vector::broadcast(step[row]));
      Vector::store(place, Vector::fma(Vector::to_float(acc[row][b]), factor, Vector::load(place)));
    });
  });
}

template <int BLOCKS>
void lut4_strip(const Lut4Weight& weight, const Lut4Activations& x, const Tiles& tiles, Range chunk, int64_t block,
                const float* bias, Rows y) {
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
        for (int64_t i = 0; i < count; ++i) {
          const int64_t at = place + i * rows;
          lut4_tile<rows, BLOCKS>(reinterpret_cast<const char*>(panel.quads[0][i * 16]), sizeof panel.quads[0], 16,
                                  x.q + at * 16 * Vector::QUAD_BYTES, x.offset + at, panel.scale[0][i], x.step + at,
                                  total[start - first][0]);
        }
      });
    }
  }
  for (int64_t row = first; row < tiles.start(chunk.end); ++row)
    for (int b = 0; b < BLOCKS; ++b)
      finish_lut4(Vector::load(total[row - first][b]), weight, block + b, bias, y.row(row));
}

void lut4_panels(const Lut4Weight& weight, const Lut4Activations& x, const Tiles& tiles, Range mine, Range blocks,
                 const float* bias, Rows y) {
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
               const float* bias, Rows y) {
  if (tiles.rows > Vector::DIRECT_ROWS) return lut4_panels(weight, x, tiles, mine, blocks, bias, y);
  with_height<Vector::DIRECT_ROWS>(static_cast<int>(tiles.rows), [&](auto rows) {
    constexpr int BLOCKS = rows * 2 <= Vector::DIRECT_ROWS ? Vector::DIRECT_BLOCKS : 1;
    const int64_t whole = blocks.begin + (blocks.end - blocks.begin) / BLOCKS * BLOCKS;
    lut4_direct<rows, BLOCKS>(weight, x, {blocks.begin, whole}, bias, y);
    if (BLOCKS > 1) lut4_direct<rows, 1>(weight, x, {whole, blocks.end}, bias, y);
  });
}

inline Tiles lut4_tiles(int64_t m) { return {m, m <= Vector::DIRECT_ROWS ? Vector::DIRECT_ROWS : Vector::TILE_ROWS}; }

inline int64_t lut4_bytes(int64_t m, int64_t columns) {
  return m * columns / 4 * Vector::QUAD_BYTES + (m * (columns / GROUP) + 15) / 16 * 16 * 8;
}

inline Lut4Activations lut4_activations(const void* memory, int64_t m, int64_t columns) {
  const int64_t padded = (m * (columns / GROUP) + 15) / 16 * 16;
  char* place = static_cast<char*>(const_cast<void*>(memory));
  return {reinterpret_cast<int8_t*>(place + padded * 8), reinterpret_cast<float*>(place),
          reinterpret_cast<int32_t*>(place + padded * 4)};
}

void quantize_lut4(const float* x, int64_t stride, int64_t m, int64_t columns, InputGrid, int64_t begin, int64_t end,
                   void* memory) {
  const int64_t groups = columns / GROUP;
  const Lut4Activations to = lut4_activations(memory, m, columns);
  each_row(lut4_tiles(m), {begin, end}, [&](int64_t row, int64_t start, int64_t height) {
    const int64_t place = start * groups, inside = row - start;
    quantize_groups(x + row * stride, groups, height, to.q + (place * 16 + inside) * Vector::QUAD_BYTES,
                    to.step + place + inside, to.offset + place + inside);
  });
}

void multiply_lut4(const void* packed, const void* memory, int64_t m, const float* bias, Rows y, Share mine) {
  const Lut4Weight& weight = *static_cast<const Lut4Weight*>(packed);
  const Lut4Activations x = lut4_activations(memory, m, weight.columns);
  const Tiles tiles = lut4_tiles(m);
  multiply_part(tiles, packed_blocks(weight.rows), mine, [&](Range my_tiles, Range my_blocks) {
    lut4_rows(weight, x, tiles, my_tiles, my_blocks, bias, y);
  });
}

void run_lut4(const float* x, int64_t m, const Lut4Weight& weight, const float* bias, float* y) {
  if (m == 0 || weight.rows == 0) return;
  void* memory = scratch(lut4_bytes(m, weight.columns));
  const Lut4Activations activations = lut4_activations(memory, m, weight.columns);
  const Tiles tiles = lut4_tiles(m);
  const auto quantize = [&](Range rows) {
    quantize_lut4(x, weight.columns, m, weight.columns, {}, rows.begin, rows.end, memory);
  };
  parallel(tiles, weight.columns, packed_blocks(weight.rows), quantize, [&](Range my_tiles, Range my_blocks) {
    lut4_rows(weight, activations, tiles, my_tiles, my_blocks, bias, {y, weight.rows});
  });
}

constexpr Staged STAGED_LUT4 = {lut4_bytes, quantize_lut4, multiply_lut4};

}  // namespace
}  // namespace infer_native
