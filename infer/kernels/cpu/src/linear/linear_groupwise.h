// y = x @ weight.T where a weight is a code times a float scale of its group of columns, plus a minimum of that group.
//
// Codes are 4-bit indices into 16 int8 entries, int8, or unsigned 5- and 6-bit integers minus a zero point. Activations are
// quantized to int8 for each 64 columns, as for lut4; a minimum is multiplied by the sum of the int8 activations of its group:
//   y = sum over groups of step * (scale * sum(q * code) + minimum * sum(q)) + bias, the sums exact in int32.
#pragma once

#include "linear/groupwise_scales.h"

namespace infer_native {
namespace {

// Quantized activations; each of the PARTS (1, 2 or 4) of 64 columns has a weight scale.
struct GroupwiseActivations {
  int8_t* q;
  float* step;      // [tile][group][row of the tile]
  int32_t* offset;  // [tile][group][part][row of the tile]: -128 times the sum of q
  float* sum;       // [tile][group][part][row of the tile]: step times the sum of q
};

// Returns the initial accumulator of a part; `offset` is -128 times the sum of its activations.
template <int BITS>
inline int32_t groupwise_start(int32_t offset, int64_t zero) {
  if constexpr (PLANES<BITS>) return (offset >> 7) * static_cast<int32_t>(zero);
  return Vector::UNSIGNED ? offset : 0;
}

template <int BITS>
inline __attribute__((always_inline)) Vector::Sums groupwise_dot(Vector::Sums sum, Vector::Quads weights, const int8_t* quad) {
  if constexpr (PLANES<BITS>) return Vector::dot_nonnegative(sum, weights, quad);
  return Vector::dot_from_memory(sum, weights, quad);
}

template <int PARTS, int BITS, int HEIGHT>
void groupwise_direct(const GroupwiseWeight& weight, const GroupwiseLayout& layout, const GroupwiseActivations& x,
                      Range blocks, const float* bias, Rows y) {
  constexpr int HALVES = PARTS == 4 ? 2 : 1, VECTORS = 8 / HALVES, GROUP_BYTES = BITS * 128;
  const int64_t groups = weight.columns / GROUP, distance = stream_distance<HEIGHT>();
  GroupwiseScales scales;
  for (int64_t block = blocks.begin; block < blocks.end; ++block) {
    const uint8_t* codes = weight.codes + block * groups * GROUP_BYTES;
    const uint8_t* record = weight.scale + block * layout.record_bytes;
    const Vector::Table table = Vector::load_table(weight.table + block * 16);
    Vector::Floats total[HEIGHT];
    unroll<HEIGHT>([&](auto row) { total[row] = Vector::broadcast(0.0f); });
    for (int64_t first = 0; first < groups; first += GROUPWISE_STEP) {
      const int64_t count = groups - first < GROUPWISE_STEP ? groups - first : GROUPWISE_STEP;
      decode_scales<PARTS>(record, layout, first, count, scales);
      for (int64_t i = 0; i < count; ++i, codes += GROUP_BYTES) {
        const int64_t group = first + i;
        const int8_t* q = x.q + group * 16 * HEIGHT * Vector::QUAD_BYTES;
        const int32_t* offset = x.offset + group * PARTS * HEIGHT;
        unroll<HALVES>([&](auto half) {
          const auto start = [&](int part, auto row) { return groupwise_start<BITS>(offset[part * HEIGHT + row], layout.zero); };
          Vector::Sums low_sum[HEIGHT], high_sum[HEIGHT];
          unroll<HEIGHT>([&](auto row) {
            low_sum[row] = Vector::broadcast(start(half, row));
            high_sum[row] = Vector::broadcast(PARTS == 1 ? int32_t{0} : start(half + HALVES, row));
          });
          const auto low_of = [&](int j, Vector::Quads codes) __attribute__((always_inline)) {
            const int8_t* quads = q + j * HEIGHT * Vector::QUAD_BYTES;
            unroll<HEIGHT>([&](auto row) {
              low_sum[row] = groupwise_dot<BITS>(low_sum[row], codes, quads + row * Vector::QUAD_BYTES);
            });
          };
          const auto high_of = [&](int j, Vector::Quads codes) __attribute__((always_inline)) {
            const int8_t* quads = q + (j + 8) * HEIGHT * Vector::QUAD_BYTES;
            unroll<HEIGHT>([&](auto row) {
              high_sum[row] = groupwise_dot<BITS>(high_sum[row], codes, quads + row * Vector::QUAD_BYTES);
            });
          };
          each_vector<BITS, half * VECTORS, (half + 1) * VECTORS>(codes, distance, table, low_of, high_of);
          const Vector::Floats low_scale = Vector::load(scales.scale[i * PARTS + half]);
          const Vector::Floats high_scale = Vector::load(scales.scale[i * PARTS + (PARTS == 1 ? 0 : half + HALVES)]);
          unroll<HEIGHT>([&](auto row) {
            const Vector::Floats step = Vector::broadcast(x.step[group * HEIGHT + row]);
            Vector::Floats pair;
            if constexpr (PARTS == 1) {
              pair = Vector::mul(Vector::to_float(Vector::add(low_sum[row], high_sum[row])), low_scale);
            } else {
              pair = Vector::mul(Vector::to_float(low_sum[row]), low_scale);
              pair = Vector::fma(Vector::to_float(high_sum[row]), high_scale, pair);
            }
            total[row] = Vector::fma(pair, step, total[row]);
          });
        });
        if (!layout.has_minimum) continue;
        const float* sum = x.sum + group * PARTS * HEIGHT;
        for (int part = 0; part < PARTS; ++part) {
          const Vector::Floats minimum = Vector::load(scales.minimum[i * PARTS + part]);
          unroll<HEIGHT>([&](auto row) {
            total[row] = Vector::fma(minimum, Vector::broadcast(sum[part * HEIGHT + row]), total[row]);
          });
        }
      }
    }
    const int64_t n = block * BLOCK_ROWS, left = weight.rows - n;
    unroll<HEIGHT>([&](auto row) {
      Vector::Floats value = total[row];
      if (bias != nullptr) value = Vector::add(value, read_row(bias + n, left));
      write_row(y.row(row) + n, left, value);
    });
  }
}

// Returns the number of activation steps of m rows, rounded up so that the next array is 64-byte aligned.
inline int64_t groupwise_steps(int64_t m, int64_t columns) { return (m * (columns / GROUP) + 15) / 16 * 16; }

inline Tiles groupwise_tiles(int64_t m) { return {m, Vector::DIRECT_TILE_ROWS}; }

template <int PARTS, int BITS>
void groupwise_rows(const GroupwiseWeight& weight, const GroupwiseActivations& x, const Tiles& tiles, Range mine,
                    Range blocks, const float* bias, Rows y) {
  const GroupwiseLayout layout(weight.layout, weight.columns);
  const int64_t groups = weight.columns / GROUP;
  // With several tiles, the first reads a block into the cache for the others.
  const int64_t step = mine.end - mine.begin > 1 ? 1 : blocks.end - blocks.begin;
  constexpr int64_t CHUNK = 192 / Vector::DIRECT_TILE_ROWS;
  for (int64_t chunk = mine.begin; chunk < mine.end; chunk += CHUNK) {
    const int64_t end = chunk + CHUNK < mine.end ? chunk + CHUNK : mine.end;
    for (int64_t block = blocks.begin; block < blocks.end; block += step)
      for (int64_t tile = chunk; tile < end; ++tile) {
        const int64_t start = tiles.start(tile), place = start * groups;
        const GroupwiseActivations from{x.q + place * 16 * Vector::QUAD_BYTES, x.step + place, x.offset + place * PARTS,
                                        x.sum + place * PARTS};
        with_height<Vector::DIRECT_TILE_ROWS>(tiles.height(tile), [&](auto rows) {
          groupwise_direct<PARTS, BITS, rows>(weight, layout, from, {block, block + step}, bias, y.from(start));
        });
      }
  }
}

template <int PARTS>
int64_t groupwise_bytes(int64_t m, int64_t columns) {
  return m * columns / 4 * Vector::QUAD_BYTES + groupwise_steps(m, columns) * 4 * (1 + 2 * PARTS);
}

template <int PARTS>
GroupwiseActivations groupwise_activations(const void* memory, int64_t m, int64_t columns) {
  const int64_t steps = groupwise_steps(m, columns);
  char* place = static_cast<char*>(const_cast<void*>(memory));
  return {reinterpret_cast<int8_t*>(place + steps * 4 * (1 + 2 * PARTS)), reinterpret_cast<float*>(place),
          reinterpret_cast<int32_t*>(place + steps * 4), reinterpret_cast<float*>(place + steps * 4 * (1 + PARTS))};
}

// Quantizes one row with a step for each 64 columns, as `quantize_groups` does, and sums its parts.
template <int PARTS>
inline void quantize_parts(const float* x, int64_t groups, int64_t height, int8_t* q, float* step, int32_t* offset,
                           float* sum) {
  const int64_t stride = height * Vector::QUAD_BYTES;
  for (int64_t group = 0; group < groups; ++group, x += GROUP, q += 16 * stride, step += height) {
    Vector::Floats part[4];
    Vector::Sums max_bits = Vector::broadcast(int32_t{0}), total = max_bits;
    for (int i = 0; i < 4; ++i) {
      part[i] = Vector::load(x + 16 * i);
      max_bits = Vector::max(max_bits, Vector::abs_bits(part[i]));
    }
    const int32_t largest = Vector::reduce_max(max_bits);
    *step = largest < INFINITY_BITS ? at_least_normal(float_of(largest) / LEVELS) : NOT_A_NUMBER;
    const Grid<ValueRange::SYMMETRIC> grid(*step, 0);
    for (int i = 0; i < 4; ++i) {
      const Vector::Sums codes = grid(part[i]);
      total = i % (4 / PARTS) == 0 ? codes : Vector::add(total, codes);
      Vector::store_quads(q + 4 * i * stride, stride, codes);
      if ((i + 1) % (4 / PARTS) != 0) continue;
      const int32_t all = Vector::reduce_add(total);
      *offset = -128 * all;
      *sum = *step * static_cast<float>(all);
      offset += height, sum += height;
    }
  }
}

template <int PARTS>
void quantize_groupwise(const float* x, int64_t stride, int64_t m, int64_t columns, InputGrid, int64_t part, int64_t parts,
                        void* memory) {
  const int64_t groups = columns / GROUP;
  const GroupwiseActivations to = groupwise_activations<PARTS>(memory, m, columns);
  each_slice(groupwise_tiles(m), groups, part, parts, [&](int64_t start, int64_t height, Range rows, Range mine) {
    const int64_t place = start * groups + mine.begin * height, count = mine.end - mine.begin;
    for (int64_t row = rows.begin; row < rows.end; ++row)
      quantize_parts<PARTS>(x + (start + row) * stride + mine.begin * GROUP, count, height,
                            to.q + (place * 16 + row) * Vector::QUAD_BYTES, to.step + place + row,
                            to.offset + place * PARTS + row, to.sum + place * PARTS + row);
  });
}

template <int PARTS>
void groupwise_part(const GroupwiseWeight& weight, const GroupwiseActivations& x, const Tiles& tiles, Range mine,
                    Range blocks, const float* bias, Rows y) {
  const int64_t bits = GroupwiseLayout(weight.layout, weight.columns).code_bits;
  if (bits == 8) return groupwise_rows<PARTS, 8>(weight, x, tiles, mine, blocks, bias, y);
  if constexpr (PARTS == 2)
    if (bits == 5) return groupwise_rows<PARTS, 5>(weight, x, tiles, mine, blocks, bias, y);
  if constexpr (PARTS == 4)
    if (bits == 6) return groupwise_rows<PARTS, 6>(weight, x, tiles, mine, blocks, bias, y);
  groupwise_rows<PARTS, 4>(weight, x, tiles, mine, blocks, bias, y);
}

template <int PARTS>
void multiply_groupwise(const void* packed, const void* memory, int64_t m, const float* bias, Rows y, Share mine) {
  const GroupwiseWeight& weight = *static_cast<const GroupwiseWeight*>(packed);
  const GroupwiseActivations x = groupwise_activations<PARTS>(memory, m, weight.columns);
  const Tiles tiles = groupwise_tiles(m);
  multiply_part(tiles, packed_blocks(weight.rows), mine, [&](Range my_tiles, Range my_blocks) {
    groupwise_part<PARTS>(weight, x, tiles, my_tiles, my_blocks, bias, y);
  });
}

template <int PARTS>
void run_groupwise_of(const float* x, int64_t m, const GroupwiseWeight& weight, const float* bias, float* y) {
  void* memory = scratch(groupwise_bytes<PARTS>(m, weight.columns));
  const GroupwiseActivations activations = groupwise_activations<PARTS>(memory, m, weight.columns);
  const Tiles tiles = groupwise_tiles(m);
  const auto quantize = [&](int64_t part, int64_t parts) {
    quantize_groupwise<PARTS>(x, weight.columns, m, weight.columns, {}, part, parts, memory);
  };
  parallel(tiles, weight.columns, packed_blocks(weight.rows), quantize, [&](Range my_tiles, Range my_blocks) {
    groupwise_part<PARTS>(weight, activations, tiles, my_tiles, my_blocks, bias, {y, weight.rows});
  });
}

void run_groupwise(const float* x, int64_t m, const GroupwiseWeight& weight, const float* bias, float* y) {
  if (m == 0 || weight.rows == 0) return;
  switch (GroupwiseLayout(weight.layout, weight.columns).parts()) {
    case 1: return run_groupwise_of<1>(x, m, weight, bias, y);
    case 2: return run_groupwise_of<2>(x, m, weight, bias, y);
    default: return run_groupwise_of<4>(x, m, weight, bias, y);
  }
}

template <int PARTS>
constexpr Staged STAGED_GROUPWISE_OF = {groupwise_bytes<PARTS>, quantize_groupwise<PARTS>, multiply_groupwise<PARTS>};

constexpr StagedGroupwise STAGED_GROUPWISE = {STAGED_GROUPWISE_OF<1>, STAGED_GROUPWISE_OF<2>, STAGED_GROUPWISE_OF<4>};

}  // namespace
}  // namespace infer_native
