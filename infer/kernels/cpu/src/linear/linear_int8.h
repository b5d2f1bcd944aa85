// y = x @ weight.T where both are int8 and the sum is exact; one scale per output row, one step per activation row.
//
// A register tile covers all columns of TILE_BLOCKS blocks where these stay in the L2 cache while every tile of rows passes;
// longer rows are cut into chunks of columns, with the int32 sums in memory between chunks.
#pragma once

#include "linear/int8_tile.h"

namespace infer_native {
namespace {

constexpr int64_t CHUNK_QUADS = 1024;
constexpr int64_t CHUNK_ROWS = 192;

inline Tiles int8_tiles(int64_t m) { return {m, m <= Vector::STREAM_ROWS ? Vector::STREAM_TILE_ROWS : Vector::TILE_ROWS}; }

struct Int8Activations {
  int8_t* q;
  RowGrid* grid;
  int32_t* offset;
};

// sum [HEIGHT][TILE_BLOCKS][16] (+)= weights times activations. Not inlined: inside another function gcc 12 spills sums.
template <int HEIGHT, int BLOCKS, bool BEGIN, WeightSource SOURCE>
__attribute__((noinline)) void int8_tile(const char* weights, int64_t stride, int64_t quads, const int8_t* q,
                                         const int32_t* offset, int32_t* sum) {
  Accumulators<HEIGHT, BLOCKS> acc;
  unroll<HEIGHT>([&](auto row) {
    unroll<BLOCKS>([&](auto b) {
      acc[row][b] = BEGIN ? Vector::broadcast(offset[row]) : Vector::load_sums(sum + (row * Vector::TILE_BLOCKS + b) * 16);
    });
  });
  accumulate<HEIGHT, BLOCKS, SOURCE>(weights, stride, quads, q, acc);
  unroll<HEIGHT>([&](auto row) {
    unroll<BLOCKS>([&](auto b) { Vector::store_sums(sum + (row * Vector::TILE_BLOCKS + b) * 16, acc[row][b]); });
  });
}

// Writes y of `height` rows and BLOCKS blocks from `block` on: zero point, scales and bias applied to the exact sums.
template <int BLOCKS>
inline void finish_int8(const int32_t* sum, const RowGrid* grid, int64_t height, const Int8Weight& weight, int64_t block,
                        const float* bias, Rows y) {
  for (int b = 0; b < BLOCKS; ++b) {
    const int64_t n = (block + b) * BLOCK_ROWS, count = weight.rows - n;
    const Vector::Floats scale = Vector::load(weight.scale + n);
    const Vector::Floats bias_vector = bias == nullptr ? Vector::broadcast(0.0f) : read_row(bias + n, count);
    for (int64_t row = 0; row < height; ++row) {
      Vector::Sums exact = Vector::load_sums(sum + (row * Vector::TILE_BLOCKS + b) * 16);
      if (grid[row].zero != 0)
        exact = Vector::sub_product(exact, Vector::broadcast(grid[row].zero), Vector::load_sums(weight.row_sum + n));
      Vector::Floats value = Vector::mul(Vector::mul(Vector::to_float(exact), Vector::broadcast(grid[row].step)), scale);
      if (bias != nullptr) value = Vector::add(value, bias_vector);
      write_row(y.row(row) + n, count, value);
    }
  }
}

template <int BLOCKS>
void int8_strip(const Int8Weight& weight, const Int8Activations& x, const Tiles& tiles, Range chunk, int64_t block,
                const float* bias, Rows y) {
  const int64_t quads = (weight.columns + 3) / 4, stride = quads * 64;
  const int64_t first = tiles.start(chunk.begin);
  const bool single_tile = chunk.end - chunk.begin == 1;
  const int64_t step = single_tile ? quads + 1 : CHUNK_QUADS;
  alignas(64) int32_t sums[CHUNK_ROWS][Vector::TILE_BLOCKS * 16];
  for (int64_t quad = 0; quad < quads || quad == 0; quad += step) {
    const int64_t count = quads - quad < step ? quads - quad : step;
    const char* codes = reinterpret_cast<const char*>(weight.codes) + block * stride + quad * 64;
    for (int64_t tile = chunk.begin; tile < chunk.end; ++tile) {
      const int64_t start = tiles.start(tile), height = tiles.height(tile);
      const int8_t* q = x.q + (start * quads + quad * height) * Vector::QUAD_BYTES;
      int32_t* sum = sums[count == quads ? 0 : start - first];
      const bool last = quad + count == quads;
      if (last)
        for (int64_t row = start; row < start + height; ++row)
          for (int b = 0; b < BLOCKS; ++b) __builtin_prefetch(y.row(row) + (block + b) * BLOCK_ROWS, 1);
      with_height<Vector::TILE_ROWS>(tiles.height(tile), [&](auto rows) {
        if (single_tile)
          int8_tile<rows, BLOCKS, true, WeightSource::STREAMED>(codes, stride, count, q, x.offset + start, sum);
        else if (quad == 0)
          int8_tile<rows, BLOCKS, true, WeightSource::REUSED>(codes, stride, count, q, x.offset + start, sum);
        else
          int8_tile<rows, BLOCKS, false, WeightSource::REUSED>(codes, stride, count, q, x.offset + start, sum);
      });
      if (last) finish_int8<BLOCKS>(sum, x.grid + start, height, weight, block, bias, y.from(start));
    }
  }
}

// Multiplies all rows in one pass over the weights, which are one stream from memory: faster than several streams.
template <int HEIGHT>
__attribute__((noinline)) void int8_stream(const Int8Weight& weight, const int8_t* q, const int32_t* offset, const RowGrid* grid,
                                           Range blocks, const float* bias, Rows y) {
  constexpr int FIRST = HEIGHT > Vector::STREAM_TILE_ROWS ? (HEIGHT + 1) / 2 : HEIGHT;
  const int64_t quads = (weight.columns + 3) / 4, stride = quads * 64;
  alignas(64) int32_t sum[HEIGHT][Vector::TILE_BLOCKS * 16];
  for (int64_t block = blocks.begin; block < blocks.end; ++block) {
    Accumulators<HEIGHT, 1> acc;
    unroll<HEIGHT>([&](auto row) { acc[row][0] = Vector::broadcast(offset[row]); });
    const char* codes = reinterpret_cast<const char*>(weight.codes) + block * stride;
    accumulate<HEIGHT, 1, WeightSource::STREAMED, FIRST>(codes, stride, quads, q, acc, q + FIRST * quads * Vector::QUAD_BYTES);
    unroll<HEIGHT>([&](auto row) { Vector::store_sums(sum[row], acc[row][0]); });
    finish_int8<1>(sum[0], grid, HEIGHT, weight, block, bias, y);
  }
}

void int8_rows(const Int8Weight& weight, const Int8Activations& x, const Tiles& tiles, Range mine, Range blocks,
               const float* bias, Rows y) {
  if (mine.begin == mine.end) return;
  if (tiles.rows <= Vector::STREAM_ROWS) {
    const int64_t start = tiles.start(mine.begin), quads = (weight.columns + 3) / 4;
    return with_height<Vector::STREAM_ROWS>(static_cast<int>(tiles.start(mine.end) - start), [&](auto rows) {
      int8_stream<rows>(weight, x.q + start * quads * Vector::QUAD_BYTES, x.offset + start, x.grid + start, blocks, bias, y.from(start));
    });
  }
  constexpr int64_t STEP = CHUNK_ROWS / Vector::TILE_ROWS;
  for (int64_t tile = mine.begin; tile < mine.end; tile += STEP) {
    const Range chunk{tile, tile + STEP < mine.end ? tile + STEP : mine.end};
    int64_t block = blocks.begin;
    for (; block + Vector::TILE_BLOCKS <= blocks.end; block += Vector::TILE_BLOCKS)
      int8_strip<Vector::TILE_BLOCKS>(weight, x, tiles, chunk, block, bias, y);
    if (Vector::TILE_BLOCKS > 2 && block + 2 <= blocks.end) {
      int8_strip<(Vector::TILE_BLOCKS > 2 ? 2 : 1)>(weight, x, tiles, chunk, block, bias, y);
      block += 2;
    }
    for (; block < blocks.end; ++block) int8_strip<1>(weight, x, tiles, chunk, block, bias, y);
  }
}

inline int64_t int8_bytes(int64_t m, int64_t columns) {
  return m * ((columns + 3) / 4) * Vector::QUAD_BYTES + (m + 15) / 16 * 16 * 12;
}

inline Int8Activations int8_activations(const void* memory, int64_t m) {
  const int64_t padded = (m + 15) / 16 * 16;
  char* place = static_cast<char*>(const_cast<void*>(memory));
  return {reinterpret_cast<int8_t*>(place + padded * 12), reinterpret_cast<RowGrid*>(place),
          reinterpret_cast<int32_t*>(place + padded * 8)};
}

void quantize_int8(const float* x, int64_t stride, int64_t m, int64_t columns, InputGrid given, int64_t part,
                   int64_t parts, void* memory) {
  const int64_t quads = (columns + 3) / 4;
  const Int8Activations to = int8_activations(memory, m);
  // A thread with some columns of a row reads all of them: range and sum of a row cover all columns.
  each_slice(int8_tiles(m), quads > 4 ? (quads + 3) / 4 : 1, part, parts, [&](int64_t start, int64_t height, Range rows, Range mine) {
    const int64_t stride_bytes = height * Vector::QUAD_BYTES;
    for (int64_t row = start + rows.begin; row < start + rows.end; ++row)
      with_grid(x + row * stride, columns, given, [&](auto values, auto x, RowGrid grid) {
        int8_t* q = to.q + (start * quads + row - start) * Vector::QUAD_BYTES;
        const int32_t offset =
            quantize_row<values>(x, columns, grid, stride_bytes, mine, [=](int64_t i) { return q + 4 * i * stride_bytes; });
        if (mine.begin == 0) to.grid[row] = grid, to.offset[row] = offset;
      });
  });
}

void multiply_int8(const void* packed, const void* memory, int64_t m, const float* bias, Rows y, Share mine) {
  const Int8Weight& weight = *static_cast<const Int8Weight*>(packed);
  const Int8Activations x = int8_activations(memory, m);
  const Tiles tiles = int8_tiles(m);
  multiply_part(tiles, packed_blocks(weight.rows), mine, [&](Range my_tiles, Range my_blocks) {
    int8_rows(weight, x, tiles, my_tiles, my_blocks, bias, y);
  });
}

void run_int8(const float* x, int64_t m, const Int8Weight& weight, InputGrid given, const float* bias, float* y) {
  if (m == 0 || weight.rows == 0) return;
  void* memory = scratch(int8_bytes(m, weight.columns));
  const Int8Activations activations = int8_activations(memory, m);
  const Tiles tiles = int8_tiles(m);
  const auto quantize = [&](int64_t part, int64_t parts) {
    quantize_int8(x, weight.columns, m, weight.columns, given, part, parts, memory);
  };
  parallel(tiles, weight.columns, packed_blocks(weight.rows), quantize, [&](Range my_tiles, Range my_blocks) {
    int8_rows(weight, activations, tiles, my_tiles, my_blocks, bias, {y, weight.rows});
  });
}

constexpr Staged STAGED_INT8 = {int8_bytes, quantize_int8, multiply_int8};

}  // namespace
}  // namespace infer_native
