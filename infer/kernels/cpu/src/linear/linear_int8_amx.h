// y = x @ weight.T where both are int8, on tile registers, bit-equal to linear_int8.h: the codes, the exact sums and the order
// of operations from a sum to a result are those of the vector kernels.
//
// 16 quads of a packed block are one tile of weights. Activations are in tiles too: `height` rows by 64 columns, row-major.
// Four accumulator tiles hide the latency of a product: two tiles of rows by two blocks, or one by four.
#pragma once

#include "amx/tiles.h"
#include "linear/parallel_linear.h"

namespace infer_native {
namespace {

constexpr int64_t AMX_QUADS = 16;         // quads in a tile of weights
constexpr int64_t AMX_CHUNK_STEPS = 16;   // 32 KiB of weights, which stay in the L1 cache while tiles of rows pass
constexpr int64_t AMX_CHUNK_TILES = 16;   // tiles of rows whose sums are kept between two chunks
constexpr int64_t AMX_PREFETCH = 8192;    // prefetch distance, in bytes, of weights that are read once
constexpr int AMX_BLOCKS = 4;             // blocks in a strip
static_assert(AMX_BLOCKS == Vector::TILE_BLOCKS, "threads share strips of whole register tiles");

// Returns whether AMX is used: below 8 rows the layer is bound by memory, and the vector kernels stream weights faster.
inline bool amx_pays(int64_t m, int64_t columns) { return m >= 8 && columns > 0; }

enum : int { SUMS = 0, ROWS_A = 4, WEIGHTS_B = 6 };

// Partition of rows into tiles of one height, the last one partly empty, so that one tile configuration serves all.
struct AmxRows {
  int64_t rows, count, height;

  explicit AmxRows(int64_t m)
      : rows(m), count((m + TILE_MAX_ROWS - 1) / TILE_MAX_ROWS), height(count ? (m + count - 1) / count : 0) {}
  int64_t start(int64_t tile) const { return tile * height; }
  int64_t size(int64_t tile) const { return rows - start(tile) < height ? rows - start(tile) : height; }
  int64_t padded() const { return (count * height + 15) / 16 * 16; }
  TileConfig config() const {
    TileConfig shapes;
    for (int i = 0; i < 4; ++i) shapes.shape(SUMS + i, height, TILE_ROW_BYTES);
    for (int i = 0; i < 2; ++i) shapes.shape(ROWS_A + i, height, TILE_ROW_BYTES);
    for (int i = 0; i < 2; ++i) shapes.shape(WEIGHTS_B + i, TILE_MAX_ROWS, TILE_ROW_BYTES);
    return shapes;
  }
};

struct AmxInt8Activations {
  RowGrid* grid;
  int32_t* offset;
  int8_t* q;

  AmxInt8Activations(const void* memory, const AmxRows& tiles) {
    char* place = static_cast<char*>(const_cast<void*>(memory));
    grid = reinterpret_cast<RowGrid*>(place);
    offset = reinterpret_cast<int32_t*>(place + tiles.padded() * 8);
    q = reinterpret_cast<int8_t*>(place + tiles.padded() * 12);
  }
};

inline int64_t amx_steps(int64_t columns) { return (columns + 63) / 64; }

struct AmxInt8Args {
  const Int8Weight& weight;
  const AmxRows& tiles;
  const AmxInt8Activations& x;
  const float* bias;
  Rows y;
  int64_t quads, full_steps, steps;  // full_steps: those of 16 quads

  AmxInt8Args(const Int8Weight& w, const AmxRows& t, const AmxInt8Activations& a, const float* b, Rows to)
      : weight(w), tiles(t), x(a), bias(b), y(to), quads((w.columns + 3) / 4), full_steps(quads / AMX_QUADS),
        steps(amx_steps(w.columns)) {}
  int64_t tile_bytes() const { return tiles.height * TILE_ROW_BYTES; }
};

// sums += rows * weights over `steps` steps, for ROW_TILES tiles of rows and BLOCKS blocks.
template <int ROW_TILES, int BLOCKS, bool STREAMED>
inline __attribute__((always_inline)) void amx_products(const int8_t* weights, int64_t stride, const int8_t* q,
                                                        int64_t tile_bytes, int64_t tile_stride, int64_t steps) {
  for (int64_t step = 0; step < steps; ++step, weights += TILE_BYTES, q += tile_bytes) {
    unroll<ROW_TILES>([&](auto t) { AmxTiles::load<ROWS_A + t>(q + t * tile_stride, TILE_ROW_BYTES); });
    unroll<BLOCKS>([&](auto b) {
      constexpr int TILE = WEIGHTS_B + b % 2;
      const int8_t* const from = weights + b * stride;
      if (STREAMED)
        for (int line = 0; line < TILE_BYTES; line += 64) __builtin_prefetch(from + AMX_PREFETCH + line);
      AmxTiles::load<TILE>(from, TILE_ROW_BYTES);
      unroll<ROW_TILES>([&](auto t) { AmxTiles::dot_signed_unsigned<SUMS + t * BLOCKS + b, ROWS_A + t, TILE>(); });
    });
  }
}

// Computes steps [begin, end) for tiles from `tile` on and blocks from `block` on; `sums` of a tile are [16][AMX_BLOCKS * 16].
// `tail`: zero-padded weights of the last step of each block of the strip, where it has fewer than 16 quads.
template <int ROW_TILES, int BLOCKS, bool STREAMED>
__attribute__((noinline)) void amx_sums(const AmxInt8Args& args, int64_t tile, int64_t block, Range steps, const int8_t* tail,
                                        int32_t* sums) {
  constexpr int64_t STRIDE = AMX_BLOCKS * TILE_ROW_BYTES, NEXT = TILE_MAX_ROWS * AMX_BLOCKS * 16;
  unroll<ROW_TILES>([&](auto t) {
    unroll<BLOCKS>([&](auto b) {
      constexpr int SUM = SUMS + t * BLOCKS + b;
      if (steps.begin == 0) AmxTiles::zero<SUM>();
      else AmxTiles::load<SUM>(sums + t * NEXT + b * 16, STRIDE);
    });
  });
  const int64_t tile_bytes = args.tile_bytes(), tile_stride = args.steps * tile_bytes, block_stride = args.quads * 64;
  const int64_t full_end = steps.end < args.full_steps ? steps.end : args.full_steps;
  const int8_t* const q = args.x.q + tile * tile_stride;
  amx_products<ROW_TILES, BLOCKS, STREAMED>(args.weight.codes + block * block_stride + steps.begin * TILE_BYTES, block_stride,
                                      q + steps.begin * tile_bytes, tile_bytes, tile_stride, full_end - steps.begin);
  if (full_end < steps.end)
    amx_products<ROW_TILES, BLOCKS, false>(tail, TILE_BYTES, q + full_end * tile_bytes, tile_bytes, tile_stride, 1);
  unroll<ROW_TILES>([&](auto t) {
    unroll<BLOCKS>([&](auto b) { AmxTiles::store<SUMS + t * BLOCKS + b>(sums + t * NEXT + b * 16, STRIDE); });
  });
}

// Writes the results of one tile of rows and `count` blocks.
inline void amx_finish(const AmxInt8Args& args, int64_t tile, int64_t block, int64_t count, const int32_t* sums) {
  const int64_t start = args.tiles.start(tile), size = args.tiles.size(tile);
  const RowGrid* const grid = args.x.grid + start;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t n = (block + b) * BLOCK_ROWS, columns = args.weight.rows - n;
    const Vector::Floats scale = Vector::load(args.weight.scale + n);
    const Vector::Floats bias_vector = args.bias == nullptr ? Vector::broadcast(0.0f) : read_row(args.bias + n, columns);
    for (int64_t row = 0; row < size; ++row) {
      Vector::Sums exact = Vector::load_sums(sums + (row * AMX_BLOCKS + b) * 16);
      exact = Vector::add(exact, Vector::broadcast(args.x.offset[start + row]));
      if (grid[row].zero != 0)
        exact = Vector::sub_product(exact, Vector::broadcast(grid[row].zero), Vector::load_sums(args.weight.row_sum + n));
      Vector::Floats value = Vector::mul(Vector::mul(Vector::to_float(exact), Vector::broadcast(grid[row].step)), scale);
      if (args.bias != nullptr) value = Vector::add(value, bias_vector);
      write_row(args.y.row(start + row) + n, columns, value);
    }
  }
}

template <int ROW_TILES, int BLOCKS>
inline void amx_tiles(const AmxInt8Args& args, int64_t tile, int64_t block, Range steps, bool streamed, const int8_t* tail,
                     int32_t* sums) {
  if (streamed) amx_sums<ROW_TILES, BLOCKS, true>(args, tile, block, steps, tail, sums);
  else amx_sums<ROW_TILES, BLOCKS, false>(args, tile, block, steps, tail, sums);
  if (steps.end < args.steps) return;
  for (int t = 0; t < ROW_TILES; ++t) amx_finish(args, tile + t, block, BLOCKS, sums + t * TILE_MAX_ROWS * AMX_BLOCKS * 16);
}

// Computes up to AMX_BLOCKS blocks for the tiles of rows in `chunk`.
inline void amx_strip(const AmxInt8Args& args, Range chunk, int64_t block, int64_t count) {
  alignas(64) int32_t sums[AMX_CHUNK_TILES][TILE_MAX_ROWS][AMX_BLOCKS * 16];
  alignas(64) int8_t tail[AMX_BLOCKS][TILE_BYTES];
  if (args.full_steps < args.steps)
    for (int64_t b = 0; b < count; ++b) {
      const int64_t bytes = (args.quads - args.full_steps * AMX_QUADS) * 64;
      std::memcpy(tail[b], args.weight.codes + ((block + b) * args.quads + args.full_steps * AMX_QUADS) * 64, bytes);
      std::memset(tail[b] + bytes, 0, TILE_BYTES - bytes);
    }
  const bool streamed = chunk.end - chunk.begin <= 2;
  const int64_t stride = streamed ? args.steps : AMX_CHUNK_STEPS, pairs = (chunk.end - chunk.begin) / 2;
  for (int64_t step = 0; step < args.steps; step += stride) {
    const Range steps{step, step + stride < args.steps ? step + stride : args.steps};
    const auto place = [&](int64_t tile, int64_t b) { return sums[stride < args.steps ? tile - chunk.begin : 0][0] + b * 16; };
    for (int64_t b = 0; b < count; b += 2)
      for (int64_t tile = chunk.begin; tile < chunk.begin + 2 * pairs; tile += 2) {
        if (count - b >= 2) amx_tiles<2, 2>(args, tile, block + b, steps, streamed, tail[b], place(tile, b));
        else amx_tiles<2, 1>(args, tile, block + b, steps, streamed, tail[b], place(tile, b));
      }
    const int64_t last = chunk.begin + 2 * pairs;
    if (last == chunk.end) continue;
    if (count == 4) amx_tiles<1, 4>(args, last, block, steps, streamed, tail[0], place(last, 0));
    else for (int64_t b = 0; b < count; ++b) amx_tiles<1, 1>(args, last, block + b, steps, streamed, tail[b], place(last, b));
  }
}

inline void amx_int8_rows(const AmxInt8Args& args, Range tiles, Range blocks) {
  if (tiles.begin == tiles.end || blocks.begin == blocks.end) return;
  const TileScope scope(args.tiles.config());
  for (int64_t tile = tiles.begin; tile < tiles.end; tile += AMX_CHUNK_TILES) {
    const Range chunk{tile, tile + AMX_CHUNK_TILES < tiles.end ? tile + AMX_CHUNK_TILES : tiles.end};
    for (int64_t block = blocks.begin; block < blocks.end; block += AMX_BLOCKS)
      amx_strip(args, chunk, block, blocks.end - block < AMX_BLOCKS ? blocks.end - block : AMX_BLOCKS);
  }
}

int64_t amx_int8_bytes(int64_t m, int64_t columns) {
  if (!amx_pays(m, columns)) return AVX512_VNNI.staged_int8.bytes(m, columns);
  const AmxRows tiles(m);
  return tiles.padded() * 12 + tiles.count * tiles.height * amx_steps(columns) * TILE_ROW_BYTES;
}

void amx_quantize_int8(const float* x, int64_t stride, int64_t m, int64_t columns, InputGrid given, int64_t part, int64_t parts,
                       void* memory) {
  if (!amx_pays(m, columns)) return AVX512_VNNI.staged_int8.quantize(x, stride, m, columns, given, part, parts, memory);
  const AmxRows tiles(m);
  const AmxInt8Activations to(memory, tiles);
  const int64_t steps = amx_steps(columns), step_bytes = tiles.height * TILE_ROW_BYTES;
  const Range mine = share(m, part, parts);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    int8_t* const q = to.q + (row / tiles.height * steps * tiles.height + row % tiles.height) * TILE_ROW_BYTES;
    const auto place = [&](int64_t i) { return q + i / 4 * step_bytes + i % 4 * 16; };
    with_grid(x + row * stride, columns, given, [&](auto values, auto row_values, RowGrid grid) {
      to.grid[row] = grid;
      to.offset[row] = quantize_row<values>(row_values, columns, grid, 4, Range{0, columns / 16 + 1}, place);
    });
  }
}

void amx_multiply_int8(const void* packed, const void* memory, int64_t m, const float* bias, Rows y, Share mine) {
  if (!amx_pays(m, static_cast<const Int8Weight*>(packed)->columns))
    return AVX512_VNNI.staged_int8.multiply(packed, memory, m, bias, y, mine);
  const Int8Weight& weight = *static_cast<const Int8Weight*>(packed);
  const AmxRows tiles(m);
  const AmxInt8Activations x(memory, tiles);
  const AmxInt8Args args(weight, tiles, x, bias, y);
  multiply_part(Tiles(m, TILE_MAX_ROWS), packed_blocks(weight.rows), mine,
                [&](Range my_tiles, Range my_blocks) { amx_int8_rows(args, my_tiles, my_blocks); });
}

void amx_int8(const float* x, int64_t m, const Int8Weight& weight, InputGrid given, const float* bias, float* y) {
  if (!amx_pays(m, weight.columns) || weight.rows == 0) return AVX512_VNNI.linear_int8(x, m, weight, given, bias, y);
  void* const memory = scratch(amx_int8_bytes(m, weight.columns));
  const AmxRows tiles(m);
  const AmxInt8Activations activations(memory, tiles);
  const AmxInt8Args args(weight, tiles, activations, bias, {y, weight.rows});
  const auto quantize = [&](int64_t part, int64_t parts) {
    amx_quantize_int8(x, weight.columns, m, weight.columns, given, part, parts, memory);
  };
  parallel(Tiles(m, TILE_MAX_ROWS), weight.columns, packed_blocks(weight.rows), quantize,
           [&](Range my_tiles, Range my_blocks) { amx_int8_rows(args, my_tiles, my_blocks); });
}

constexpr Staged AMX_STAGED_INT8 = {amx_int8_bytes, amx_quantize_int8, amx_multiply_int8};

}  // namespace
}  // namespace infer_native
