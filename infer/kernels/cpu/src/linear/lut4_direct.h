// Few rows times a 4-bit weight: codes are decoded in registers, once for all rows.
#pragma once

#include "linear/int8_tile.h"

namespace infer_native {
namespace {

constexpr float TABLE_STEP = 1 / (LEVELS * LEVELS);

struct Lut4Activations {
  int8_t* q;
  float* step;       // [tile][group][row of the tile]
  int32_t* offset;   // [tile][group][scale][row of the tile]
};

// Writes 16 outputs of one row from the float sums over all groups.
inline void finish_lut4(Vector::Floats total, const Lut4Weight& weight, int64_t block, const float* bias, float* y) {
  const int64_t n = block * BLOCK_ROWS, count = weight.rows - n;
  const Vector::Floats factor = Vector::mul(Vector::load(weight.row_scale + n), Vector::broadcast(TABLE_STEP));
  total = Vector::mul(total, factor);
  if (bias != nullptr) total = Vector::add(total, read_row(bias + n, count));
  write_row(y + n, count, total);
}

// Returns the prefetch distance, in bytes, of each of BLOCKS streams at `place` bytes of a block of `stride`: at its end the
// stream continues BLOCKS blocks on.
template <int HEIGHT, int BLOCKS>
inline __attribute__((always_inline)) int64_t lut4_distance(int64_t place, int64_t stride) {
  const int64_t distance = BLOCKS > 1 ? stream_distance<HEIGHT>() / 2 : stream_distance<HEIGHT>();
  return place + distance < stride ? distance : distance + (BLOCKS - 1) * stride;
}

// Multiplies one vector of each block by every row.
template <int HEIGHT, int BLOCKS, class Sum>
inline __attribute__((always_inline)) void dot_rows(const Vector::Quads (&codes)[BLOCKS], const int8_t* quads, Sum sum) {
  unroll<HEIGHT>([&](auto row) {
    unroll<BLOCKS>([&](auto b) {
      sum(row, b) = dot_shared<BLOCKS>(sum(row, b), codes[b], quads + row * Vector::QUAD_BYTES);
    });
  });
}

// Computes BLOCKS blocks at a time, which share the quads of the activations.
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
      const int64_t distance = lut4_distance<HEIGHT, BLOCKS>(group * 512, stride);
#pragma GCC unroll 1
      for (int j = 0; j < 8; ++j) {
        const int8_t* low_quads = q + j * HEIGHT * Vector::QUAD_BYTES;
        const int8_t* high_quads = low_quads + 8 * HEIGHT * Vector::QUAD_BYTES;
        Vector::Quads low[BLOCKS], high[BLOCKS];
        unroll<BLOCKS>([&](auto b) {
          const uint8_t* place = codes + b * stride + j * 64;
          __builtin_prefetch(place + distance);
          Vector::decode(place, table[b], low[b], high[b]);
        });
        dot_rows<HEIGHT, BLOCKS>(low, low_quads, [&](auto row, auto b) -> Vector::Sums& { return sum[b][row][0]; });
        dot_rows<HEIGHT, BLOCKS>(high, high_quads, [&](auto row, auto b) -> Vector::Sums& { return sum[b][row][SPLIT - 1]; });
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

// Computes BLOCKS blocks at a time with a scale for each 16 columns: vectors 0..3, low and high nibbles, then vectors 4..7.
template <int HEIGHT, int BLOCKS>
void lut4_direct_fine(const Lut4Weight& weight, const Lut4Activations& x, Range blocks, const float* bias, Rows y) {
  const int64_t groups = weight.columns / GROUP, stride = groups * 512, scale_stride = groups * FINE_SCALES * 16;
  for (int64_t block = blocks.begin; block < blocks.end; block += BLOCKS) {
    const uint8_t* codes = weight.codes + block * stride;
    const int8_t *scale = weight.scale + block * scale_stride, *q = x.q;
    const int32_t* offset = x.offset;
    Vector::Table table[BLOCKS];
    Vector::Floats total[BLOCKS][HEIGHT];
    unroll<BLOCKS>([&](auto b) {
      table[b] = Vector::load_table(weight.table + (block + b) * 16);
      unroll<HEIGHT>([&](auto row) { total[b][row] = Vector::broadcast(0.0f); });
    });
    for (int64_t part = 0; part < 2 * groups; ++part, codes += 256) {
      const int64_t group = part / 2;
      const int64_t distance = lut4_distance<HEIGHT, BLOCKS>(group * 512, stride);
      Vector::Sums low_sum[BLOCKS][HEIGHT], high_sum[BLOCKS][HEIGHT];
      unroll<HEIGHT>([&](auto row) {
        unroll<BLOCKS>([&](auto b) {
          low_sum[b][row] = Vector::broadcast(offset[row]);
          high_sum[b][row] = Vector::broadcast(offset[2 * HEIGHT + row]);
        });
      });
#pragma GCC unroll 1
      for (int j = 0; j < 4; ++j, q += HEIGHT * Vector::QUAD_BYTES) {
        const int8_t* high_quads = q + 8 * HEIGHT * Vector::QUAD_BYTES;
        unroll<BLOCKS>([&](auto b) {
          const uint8_t* place = codes + b * stride + j * 64;
          __builtin_prefetch(place + distance);
          Vector::Quads low, high;
          Vector::decode(place, table[b], low, high);
          unroll<HEIGHT>([&](auto row) {
            low_sum[b][row] = Vector::dot_from_memory(low_sum[b][row], low, q + row * Vector::QUAD_BYTES);
            high_sum[b][row] = Vector::dot_from_memory(high_sum[b][row], high, high_quads + row * Vector::QUAD_BYTES);
          });
        });
      }
      unroll<BLOCKS>([&](auto b) {
        const Vector::Floats low_scale = Vector::load_scale(scale + b * scale_stride);
        const Vector::Floats high_scale = Vector::load_scale(scale + b * scale_stride + 32);
        unroll<HEIGHT>([&](auto row) {
          Vector::Floats pair = Vector::mul(Vector::to_float(low_sum[b][row]), low_scale);
          pair = Vector::fma(Vector::to_float(high_sum[b][row]), high_scale, pair);
          total[b][row] = Vector::fma(pair, Vector::broadcast(x.step[group * HEIGHT + row]), total[b][row]);
        });
      });
      // Moves from the first half of a group to the second, then over the high nibbles of both to the next group.
      const int64_t past = part % 2;
      q += past * 8 * HEIGHT * Vector::QUAD_BYTES;
      offset += HEIGHT + past * 2 * HEIGHT;
      scale += 16 + past * 32;
    }
    unroll<BLOCKS>([&](auto b) {
      unroll<HEIGHT>([&](auto row) {
        finish_lut4(total[b][row], weight, block + b, bias, y.row(row));
      });
    });
  }
}

}  // namespace
}  // namespace infer_native
