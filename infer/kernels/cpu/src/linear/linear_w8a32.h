// y = x @ weight.T with int8 weights and float activations: codes are widened to float in registers.
//
// Partial sums cover 4 * PART_QUADS columns and are added in order, whatever the number of rows.
#pragma once

#include "linear/parallel_linear.h"

namespace infer_native {
namespace {

constexpr int64_t PART_QUADS = 16;

// Writes quads of a row as [column][row of the tile], with zeros beyond the last column.
inline void interleave(const float* x, int64_t columns, Range quads, int64_t height, float* out) {
  for (int64_t k = quads.begin * 4; k < quads.end * 4; ++k) out[k * height] = k < columns ? x[k] : 0;
}

// total += CHAINS consecutive parts of `quads` quads each. Their sums are independent, because a single one would be bound by
// the latency of fma, and are added in order. Lines are prefetched in the order of memory: in the order of use, bandwidth
// falls to a third. All calls of a block have the same DISTANCE, in bytes; otherwise lines between two calls would be
// prefetched twice or never.
template <int CHAINS, int64_t DISTANCE, int HEIGHT, int BLOCKS>
inline __attribute__((always_inline)) void add_parts(const int8_t* codes, int64_t stride, int64_t quads, int64_t left,
                                                     const float* x, Vector::Floats (&total)[HEIGHT][BLOCKS]) {
  Vector::Floats part[CHAINS][HEIGHT][BLOCKS];
  unroll<CHAINS>([&](auto c) __attribute__((always_inline)) {
    unroll<HEIGHT>([&](auto row) __attribute__((always_inline)) {
      unroll<BLOCKS>([&](auto b) { part[c][row][b] = Vector::broadcast(0.0f); });
    });
  });
  for (int64_t quad = 0; quad < quads; ++quad, x += 4 * HEIGHT) {
    unroll<CHAINS>([&](auto c) __attribute__((always_inline)) {
      const int64_t line = quad * CHAINS + c, place = c * PART_QUADS + quad;
      // At the end of a block the stream continues BLOCKS blocks on.
      const int64_t skip = line + DISTANCE / 64 >= left ? (BLOCKS - 1) * stride : 0;
      unroll<BLOCKS>([&](auto b) __attribute__((always_inline)) {
        __builtin_prefetch(codes + line * 64 + b * stride + DISTANCE + skip);
        Vector::Floats column[4];
        Vector::widen_columns(codes + place * 64 + b * stride, column);
        unroll<4>([&](auto i) __attribute__((always_inline)) {
          unroll<HEIGHT>([&](auto row) __attribute__((always_inline)) {
            const Vector::Floats value = Vector::broadcast(x[(c * PART_QUADS * 4 + i) * HEIGHT + row]);
            part[c][row][b] = Vector::fma(column[i], value, part[c][row][b]);
          });
        });
      });
    });
  }
  unroll<CHAINS>([&](auto c) __attribute__((always_inline)) {
    unroll<HEIGHT>([&](auto row) __attribute__((always_inline)) {
      unroll<BLOCKS>([&](auto b) { total[row][b] = Vector::add(total[row][b], part[c][row][b]); });
    });
  });
}

template <int HEIGHT, int BLOCKS>
inline void float_tile(const Int8Weight& weight, int64_t block, const float* x, const float* bias, Rows y) {
  constexpr int CHAINS = HEIGHT * BLOCKS <= 2 ? Vector::FLOAT_CHAINS : 1;
  constexpr int64_t DISTANCE = Vector::PREFETCH + (CHAINS > 1 ? CHAINS * PART_QUADS * 64 : 0);
  const int64_t quads = (weight.columns + 3) / 4, stride = quads * 64;
  const int8_t* codes = weight.codes + block * stride;
  Vector::Floats total[HEIGHT][BLOCKS];
  unroll<HEIGHT>([&](auto row) { unroll<BLOCKS>([&](auto b) { total[row][b] = Vector::broadcast(0.0f); }); });
  int64_t quad = 0;
  for (; quad + CHAINS * PART_QUADS <= quads; quad += CHAINS * PART_QUADS)
    add_parts<CHAINS, DISTANCE>(codes + quad * 64, stride, PART_QUADS, quads - quad, x + quad * 4 * HEIGHT, total);
  for (; quad < quads; quad += PART_QUADS) {
    const int64_t count = quads - quad < PART_QUADS ? quads - quad : PART_QUADS;
    add_parts<1, DISTANCE>(codes + quad * 64, stride, count, quads - quad, x + quad * 4 * HEIGHT, total);
  }
  unroll<BLOCKS>([&](auto b) {
    const int64_t n = (block + b) * BLOCK_ROWS, count = weight.rows - n;
    unroll<HEIGHT>([&](auto row) {
      Vector::Floats value = Vector::mul(total[row][b], Vector::load(weight.scale + n));
      if (bias != nullptr) value = Vector::add(value, read_row(bias + n, count));
      write_row(y.row(row) + n, count, value);
    });
  });
}

template <int BLOCKS>
inline void float_blocks(const Int8Weight& weight, Range blocks, const float* interleaved, const Tiles& tiles,
                         Range mine, const float* bias, Rows y) {
  for (int64_t block = blocks.begin; block < blocks.end; block += BLOCKS)
    for (int64_t tile = mine.begin; tile < mine.end; ++tile) {
      const int64_t start = tiles.start(tile);
      with_height<Vector::TILE_ROWS>(tiles.height(tile), [&](auto rows) {
        float_tile<rows, BLOCKS>(weight, block, interleaved + start * ((weight.columns + 3) / 4 * 4), bias,
                                 y.from(start));
      });
    }
}

inline int64_t int8_weight_bytes(int64_t m, int64_t columns) {
  return m * ((columns + 3) / 4) * 4 * static_cast<int64_t>(sizeof(float)) + 64;
}

void arrange_int8_weight(const float* x, int64_t stride, int64_t m, int64_t columns, InputGrid, int64_t part,
                         int64_t parts, void* memory) {
  const int64_t quads = (columns + 3) / 4;
  float* interleaved = static_cast<float*>(memory);
  each_slice(Tiles(m, Vector::TILE_ROWS), quads, part, parts, [&](int64_t start, int64_t height, Range rows, Range mine) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
      interleave(x + (start + row) * stride, columns, mine, height, interleaved + start * quads * 4 + row);
  });
}

inline void int8_weight_rows(const Int8Weight& weight, const float* interleaved, const Tiles& tiles, Range mine,
                             Range blocks, const float* bias, Rows y) {
  constexpr int PAIR = Vector::TILE_BLOCKS >= 2 ? 2 : 1;
  // One or two rows wait for memory, and that is read fastest in one stream.
  const int64_t pairs = tiles.rows <= 2 ? blocks.begin : blocks.begin + (blocks.end - blocks.begin) / PAIR * PAIR;
  float_blocks<PAIR>(weight, {blocks.begin, pairs}, interleaved, tiles, mine, bias, y);
  float_blocks<1>(weight, {pairs, blocks.end}, interleaved, tiles, mine, bias, y);
}

void multiply_int8_weight(const void* packed, const void* memory, int64_t m, const float* bias, Rows y, Share mine) {
  const Int8Weight& weight = *static_cast<const Int8Weight*>(packed);
  const Tiles tiles(m, Vector::TILE_ROWS);
  multiply_part(tiles, packed_blocks(weight.rows), mine, [&](Range my_tiles, Range my_blocks) {
    int8_weight_rows(weight, static_cast<const float*>(memory), tiles, my_tiles, my_blocks, bias, y);
  });
}

void run_int8_weight(const float* x, int64_t m, const Int8Weight& weight, const float* bias, float* y) {
  if (m == 0 || weight.rows == 0) return;
  const Tiles tiles(m, Vector::TILE_ROWS);
  void* memory = scratch(int8_weight_bytes(m, weight.columns));
  const auto arrange = [&](int64_t part, int64_t parts) {
    arrange_int8_weight(x, weight.columns, m, weight.columns, {}, part, parts, memory);
  };
  parallel(tiles, weight.columns, packed_blocks(weight.rows), arrange, [&](Range my_tiles, Range my_blocks) {
    int8_weight_rows(weight, static_cast<const float*>(memory), tiles, my_tiles, my_blocks, bias, {y, weight.rows});
  });
}

constexpr Staged STAGED_INT8_WEIGHT = {int8_weight_bytes, arrange_int8_weight, multiply_int8_weight};

}  // namespace
}  // namespace infer_native
