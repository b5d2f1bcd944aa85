// y = x @ weight.T with 4-bit weights on tile registers, bit-equal to linear_lut4.h: the exact sum of a group is one product of
// tiles, scaled and added in float in the order of the groups.
//
// Groups of two blocks are decoded into the L1 cache, as signed bytes, and all tiles of rows of a chunk use them.
#pragma once

#include "linear/linear_int8_amx.h"
#include "linear/lut4_direct.h"

namespace infer_native {
namespace {

constexpr int64_t AMX_PANEL_GROUPS = 8;
constexpr int AMX_PANEL_BLOCKS = 2, AMX_BATCH = 4;  // groups computed together, which hide each other's latency

struct AmxPanel {
  alignas(64) int8_t quads[AMX_PANEL_BLOCKS][AMX_PANEL_GROUPS][TILE_BYTES];
  alignas(64) float scale[AMX_PANEL_BLOCKS][AMX_PANEL_GROUPS][16];
};

// Quantized activations: q of a tile of rows is [group][row][64], step [group][row].
struct AmxLut4Activations {
  float* step;
  int8_t* q;

  AmxLut4Activations(const void* memory, const AmxRows& tiles, int64_t groups) {
    char* place = static_cast<char*>(const_cast<void*>(memory));
    step = reinterpret_cast<float*>(place);
    q = reinterpret_cast<int8_t*>(place + step_bytes(tiles, groups));
  }
  // Padded, because a tile of fewer than 16 rows reads steps beyond its own, and their results are not used.
  static int64_t step_bytes(const AmxRows& tiles, int64_t groups) {
    return (tiles.count * tiles.height * groups + TILE_MAX_ROWS + 15) / 16 * 64;
  }
};

inline void amx_decode(const Lut4Weight& weight, int64_t block, int count, Range groups, AmxPanel& panel) {
  const int64_t all = weight.columns / GROUP;
  for (int b = 0; b < count; ++b) {
    const uint8_t* codes = weight.codes + ((block + b) * all + groups.begin) * 512;
    const int8_t* scale = weight.scale + ((block + b) * all + groups.begin) * 16;
    const Vector::Table table = Vector::load_signed_table(weight.table + (block + b) * 16);
    for (int64_t group = 0; group < groups.end - groups.begin; ++group) {
      for (int j = 0; j < 8; ++j, codes += 64) {
        __builtin_prefetch(codes + AMX_PANEL_GROUPS * 512);
        Vector::Quads low, high;
        Vector::decode(codes, table, low, high);
        Vector::store_quads(panel.quads[b][group] + j * 64, low);
        Vector::store_quads(panel.quads[b][group] + (j + 8) * 64, high);
      }
      Vector::store(panel.scale[b][group], Vector::load_scale(scale + group * 16));
    }
  }
}

using AmxSums = int32_t[AMX_BATCH][TILE_MAX_ROWS][16];

// total [16][16] += float(sum of a group) * (scale of the group * step of the group and row), for `count` groups.
__attribute__((noinline)) void amx_lut4_groups(const int8_t (*weights)[TILE_BYTES], const float (*scale)[16], const int8_t* q,
                                               const float* step, int64_t height, int64_t count, AmxSums& sums,
                                               float* total) {
  Vector::Floats running[TILE_MAX_ROWS];
  unroll<TILE_MAX_ROWS>([&](auto row) { running[row] = Vector::load(total + row * 16); });
  for (int64_t first = 0; first < count; first += AMX_BATCH) {
    unroll<AMX_BATCH>([&](auto i) {
      constexpr int A = ROWS_A + i % 2, B = WEIGHTS_B + i % 2;
      if (first + i >= count) return;
      AmxTiles::load<A>(q + (first + i) * height * TILE_ROW_BYTES, TILE_ROW_BYTES);
      AmxTiles::load<B>(weights[first + i], TILE_ROW_BYTES);
      AmxTiles::zero<SUMS + i>();
      AmxTiles::dot_signed_signed<SUMS + i, A, B>();
      AmxTiles::store<SUMS + i>(sums[i], TILE_ROW_BYTES);
    });
    for (int64_t i = 0; i < AMX_BATCH && first + i < count; ++i) {
      const Vector::Floats factor = Vector::load(scale[first + i]);
      const float* const steps = step + (first + i) * height;
      unroll<TILE_MAX_ROWS>([&](auto row) {
        const Vector::Floats sum = Vector::to_float(Vector::load_sums(sums[i][row]));
        running[row] = Vector::fma(sum, Vector::mul(factor, Vector::broadcast(steps[row])), running[row]);
      });
    }
  }
  unroll<TILE_MAX_ROWS>([&](auto row) { Vector::store(total + row * 16, running[row]); });
}

struct AmxLut4Args {
  const Lut4Weight& weight;
  const AmxRows& tiles;
  const AmxLut4Activations& x;
  const float* bias;
  Rows y;
};

inline void amx_lut4_strip(const AmxLut4Args& args, Range chunk, int64_t block, int count) {
  AmxPanel panel;
  alignas(64) AmxSums sums = {};  // rows beyond the height of a tile stay 0
  alignas(64) float total[AMX_CHUNK_TILES][AMX_PANEL_BLOCKS][TILE_MAX_ROWS * 16];
  std::memset(total, 0, static_cast<size_t>(chunk.end - chunk.begin) * sizeof total[0]);
  const int64_t groups = args.weight.columns / GROUP, height = args.tiles.height;
  for (int64_t group = 0; group < groups; group += AMX_PANEL_GROUPS) {
    const int64_t some = groups - group < AMX_PANEL_GROUPS ? groups - group : AMX_PANEL_GROUPS;
    amx_decode(args.weight, block, count, {group, group + some}, panel);
    for (int64_t tile = chunk.begin; tile < chunk.end; ++tile) {
      const int64_t place = (tile * groups + group) * height;
      for (int b = 0; b < count; ++b)
        amx_lut4_groups(panel.quads[b], panel.scale[b], args.x.q + place * TILE_ROW_BYTES, args.x.step + place, height, some, sums,
                        total[tile - chunk.begin][b]);
    }
  }
  for (int64_t tile = chunk.begin; tile < chunk.end; ++tile)
    for (int64_t row = 0; row < args.tiles.size(tile); ++row)
      for (int b = 0; b < count; ++b)
        finish_lut4(Vector::load(total[tile - chunk.begin][b] + row * 16), args.weight, block + b, args.bias,
                    args.y.row(args.tiles.start(tile) + row));
}

inline void amx_lut4_rows(const AmxLut4Args& args, Range tiles, Range blocks) {
  if (tiles.begin == tiles.end || blocks.begin == blocks.end) return;
  const TileScope scope(args.tiles.config());
  for (int64_t tile = tiles.begin; tile < tiles.end; tile += AMX_CHUNK_TILES) {
    const Range chunk{tile, tile + AMX_CHUNK_TILES < tiles.end ? tile + AMX_CHUNK_TILES : tiles.end};
    for (int64_t block = blocks.begin; block < blocks.end; block += AMX_PANEL_BLOCKS)
      amx_lut4_strip(args, chunk, block, blocks.end - block < AMX_PANEL_BLOCKS ? 1 : AMX_PANEL_BLOCKS);
  }
}

int64_t amx_lut4_bytes(int64_t m, int64_t columns) {
  if (!amx_pays(m, columns)) return AVX512_VNNI.staged_lut4.bytes(m, columns);
  const AmxRows tiles(m);
  return AmxLut4Activations::step_bytes(tiles, columns / GROUP) + tiles.count * tiles.height * columns;
}

void amx_quantize_lut4(const float* x, int64_t stride, int64_t m, int64_t columns, InputGrid given, int64_t part, int64_t parts,
                       void* memory) {
  if (!amx_pays(m, columns)) return AVX512_VNNI.staged_lut4.quantize(x, stride, m, columns, given, part, parts, memory);
  const AmxRows tiles(m);
  const int64_t groups = columns / GROUP;
  const AmxLut4Activations to(memory, tiles, groups);
  const Range mine = share(m, part, parts);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const int64_t place = row / tiles.height * groups * tiles.height + row % tiles.height;
    quantize_groups<1>(x + row * stride, groups, tiles.height, 4, to.q + place * TILE_ROW_BYTES, to.step + place, nullptr);
  }
}

void amx_multiply_lut4(const void* packed, const void* memory, int64_t m, const float* bias, Rows y, Share mine) {
  const Lut4Weight& weight = *static_cast<const Lut4Weight*>(packed);
  if (!amx_pays(m, weight.columns)) return AVX512_VNNI.staged_lut4.multiply(packed, memory, m, bias, y, mine);
  const AmxRows tiles(m);
  const AmxLut4Activations x(memory, tiles, weight.columns / GROUP);
  const AmxLut4Args args{weight, tiles, x, bias, y};
  multiply_part(Tiles(m, TILE_MAX_ROWS), packed_blocks(weight.rows), mine,
                [&](Range my_tiles, Range my_blocks) { amx_lut4_rows(args, my_tiles, my_blocks); });
}

void amx_lut4(const float* x, int64_t m, const Lut4Weight& weight, const float* bias, float* y) {
  if (!amx_pays(m, weight.columns) || weight.rows == 0 || weight.scales != 1)
    return AVX512_VNNI.linear_lut4(x, m, weight, bias, y);
  void* const memory = scratch(amx_lut4_bytes(m, weight.columns));
  const AmxRows tiles(m);
  const AmxLut4Activations activations(memory, tiles, weight.columns / GROUP);
  const AmxLut4Args args{weight, tiles, activations, bias, {y, weight.rows}};
  const auto quantize = [&](int64_t part, int64_t parts) {
    amx_quantize_lut4(x, weight.columns, m, weight.columns, {}, part, parts, memory);
  };
  parallel(Tiles(m, TILE_MAX_ROWS), weight.columns, packed_blocks(weight.rows), quantize,
           [&](Range my_tiles, Range my_blocks) { amx_lut4_rows(args, my_tiles, my_blocks); });
}

constexpr Staged AMX_STAGED_LUT4 = {amx_lut4_bytes, amx_quantize_lut4, amx_multiply_lut4};

}  // namespace
}  // namespace infer_native
