// Many rows times a 4-bit weight: a panel of TILE_BLOCKS blocks by PANEL_GROUPS groups is decoded into the L1 cache and read
// by every register tile.
#pragma once

#include "linear/lut4_direct.h"

namespace infer_native {
namespace {

constexpr int64_t PANEL_GROUPS = 16 / Vector::TILE_BLOCKS;
constexpr int64_t CHUNK_TILES = 192 / Vector::TILE_ROWS;  // rows that share a decoded panel

template <int SCALES>
struct Lut4Panel {
  alignas(64) uint8_t quads[Vector::TILE_BLOCKS][PANEL_GROUPS * 16][64];
  alignas(64) float scale[Vector::TILE_BLOCKS][PANEL_GROUPS][SCALES][16];
};

template <int SCALES>
inline void decode_panel(const Lut4Weight& weight, int64_t block, int count, Range groups, Lut4Panel<SCALES>& panel) {
  const int64_t row_groups = weight.columns / GROUP;
  for (int b = 0; b < count; ++b) {
    const uint8_t* codes = weight.codes + ((block + b) * row_groups + groups.begin) * 512;
    const int8_t* scale = weight.scale + ((block + b) * row_groups + groups.begin) * SCALES * 16;
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
      for (int s = 0; s < SCALES; ++s)
        Vector::store(panel.scale[b][group][s], Vector::load_scale(scale + (group * SCALES + s) * 16));
    }
  }
}

// total[row][b] += sum of a group * scale of the group in block b * step of the group in the row.
// `total` is [HEIGHT][TILE_BLOCKS][16].
template <int HEIGHT, int BLOCKS>
__attribute__((noinline)) void lut4_tile(const char* weights, int64_t stride, int64_t quads, const int8_t* q,
                                         const int32_t* offset, const float* scale, const float* step,
                                         float* total) {
  Accumulators<HEIGHT, BLOCKS> acc;
  unroll<HEIGHT>([&](auto row) {
    unroll<BLOCKS>([&](auto b) { acc[row][b] = Vector::broadcast(offset[row]); });
  });
  accumulate<HEIGHT, BLOCKS, WeightSource::CACHE>(weights, stride, quads, q, acc);
  unroll<BLOCKS>([&](auto b) {
    const Vector::Floats block_scale = Vector::load(scale + b * PANEL_GROUPS * 16);
    unroll<HEIGHT>([&](auto row) {
      float* place = total + (row * Vector::TILE_BLOCKS + b) * 16;
      const Vector::Floats factor = Vector::mul(block_scale, Vector::broadcast(step[row]));
      Vector::store(place, Vector::fma(Vector::to_float(acc[row][b]), factor, Vector::load(place)));
    });
  });
}

// total[row][b] += scaled sums of a group with a scale for each 16 columns. The sums and their scaled pairs stay in registers.
template <int HEIGHT, int BLOCKS>
__attribute__((noinline)) void lut4_tile_fine(const char* weights, int64_t stride, const int8_t* q,
                                              const int32_t* offset, const float* scale, const float* step,
                                              float* total) {
#pragma GCC unroll 1
  for (int part = 0; part < 2; ++part) {
    Vector::Floats pair[HEIGHT][BLOCKS];
    unroll<2>([&](auto high) {
      const int s = part + 2 * high;
      Accumulators<HEIGHT, BLOCKS> acc;
      unroll<HEIGHT>([&](auto row) {
        unroll<BLOCKS>([&](auto b) { acc[row][b] = Vector::broadcast(offset[s * HEIGHT + row]); });
      });
      accumulate<HEIGHT, BLOCKS, WeightSource::CACHE>(weights + s * 4 * 64, stride, 4, q + s * 4 * HEIGHT * Vector::QUAD_BYTES, acc);
      unroll<BLOCKS>([&](auto b) {
        const Vector::Floats factor = Vector::load(scale + (b * PANEL_GROUPS * FINE_SCALES + s) * 16);
        unroll<HEIGHT>([&](auto row) {
          const Vector::Floats sum = Vector::to_float(acc[row][b]);
          pair[row][b] = high ? Vector::fma(sum, factor, pair[row][b]) : Vector::mul(sum, factor);
        });
      });
    });
    unroll<HEIGHT>([&](auto row) {
      unroll<BLOCKS>([&](auto b) {
        float* place = total + (row * Vector::TILE_BLOCKS + b) * 16;
        Vector::store(place, Vector::fma(pair[row][b], Vector::broadcast(step[row]), Vector::load(place)));
      });
    });
  }
}

template <int BLOCKS, int SCALES>
void lut4_strip(const Lut4Weight& weight, const Lut4Activations& x, const Tiles& tiles, Range chunk, int64_t block,
                const float* bias, Rows y) {
  constexpr int WIDTH = SCALES == 1 || BLOCKS < 2 ? BLOCKS : 2;
  const int64_t groups = weight.columns / GROUP, first = tiles.start(chunk.begin);
  Lut4Panel<SCALES> panel;
  alignas(64) float total[CHUNK_TILES * Vector::TILE_ROWS][Vector::TILE_BLOCKS][16];
  std::memset(total, 0, (tiles.start(chunk.end) - first) * sizeof total[0]);
  for (int64_t group = 0; group < groups; group += PANEL_GROUPS) {
    const int64_t count = groups - group < PANEL_GROUPS ? groups - group : PANEL_GROUPS;
    decode_panel<SCALES>(weight, block, BLOCKS, {group, group + count}, panel);
    for (int64_t tile = chunk.begin; tile < chunk.end; ++tile) {
      const int64_t start = tiles.start(tile), height = tiles.height(tile);
      const int64_t place = start * groups + group * height;
      with_height<Vector::TILE_ROWS>(tiles.height(tile), [&](auto rows) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t at = place + i * rows;
          const int8_t* q = x.q + at * 16 * Vector::QUAD_BYTES;
          unroll<BLOCKS / WIDTH>([&](auto part) {
            constexpr int B = part * WIDTH;
            const char* quads = reinterpret_cast<const char*>(panel.quads[B][i * 16]);
            float* sums = total[start - first][B];
            if constexpr (SCALES == 1)
              lut4_tile<rows, WIDTH>(quads, sizeof panel.quads[0], 16, q, x.offset + at, panel.scale[B][i][0], x.step + at, sums);
            else
              lut4_tile_fine<rows, WIDTH>(quads, sizeof panel.quads[0], q, x.offset + at * SCALES, panel.scale[B][i][0],
                                          x.step + at, sums);
          });
        }
      });
    }
  }
  for (int64_t row = first; row < tiles.start(chunk.end); ++row)
    for (int b = 0; b < BLOCKS; ++b)
      finish_lut4(Vector::load(total[row - first][b]), weight, block + b, bias, y.row(row));
}

template <int SCALES>
void lut4_panels(const Lut4Weight& weight, const Lut4Activations& x, const Tiles& tiles, Range mine, Range blocks,
                 const float* bias, Rows y) {
  for (int64_t tile = mine.begin; tile < mine.end; tile += CHUNK_TILES) {
    const Range chunk{tile, tile + CHUNK_TILES < mine.end ? tile + CHUNK_TILES : mine.end};
    int64_t block = blocks.begin;
    for (; block + Vector::TILE_BLOCKS <= blocks.end; block += Vector::TILE_BLOCKS)
      lut4_strip<Vector::TILE_BLOCKS, SCALES>(weight, x, tiles, chunk, block, bias, y);
    if (Vector::TILE_BLOCKS > 2 && block + 2 <= blocks.end) {
      lut4_strip<(Vector::TILE_BLOCKS > 2 ? 2 : 1), SCALES>(weight, x, tiles, chunk, block, bias, y);
      block += 2;
    }
    for (; block < blocks.end; ++block) lut4_strip<1, SCALES>(weight, x, tiles, chunk, block, bias, y);
  }
}

}  // namespace
}  // namespace infer_native
