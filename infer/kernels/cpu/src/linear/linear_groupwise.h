// y = x @ weight.T where a weight is a code times a float scale of its group of columns, plus a minimum of that group.
//
// Codes are 4-bit indices into 16 int8 entries, laid out as those of lut4, or int8, laid out as those of int8. Activations
// become int8 for each 64 columns, as for lut4; a minimum meets the sum of the int8 activations of its group:
//   y = sum over groups of step * (scale * sum(q * code) + minimum * sum(q)) + bias, the sums exact in int32.
#pragma once

#include "linear/groupwise_weight.h"
#include "linear/parallel_linear.h"

namespace infer_native {
namespace {

// PARTS of 64 columns have a scale each: 1, 2 or 4.
struct GroupwiseActivations {
  int8_t* q;
  float* step;      // [tile][group][row of the tile]
  int32_t* offset;  // [tile][group][part][row of the tile]: what a sum starts with
  float* sum;       // the same: step times the sum of q
};

constexpr int64_t GROUPWISE_STEP = SUPER_COLUMNS / GROUP;  // groups whose scales are decoded at once

struct GroupwiseScales {
  alignas(64) float scale[GROUPWISE_STEP * 4][16], minimum[GROUPWISE_STEP * 4][16];
};

template <ScaleType TYPE>
inline Vector::Floats load_numbers(const uint8_t* from) {
  if constexpr (TYPE == ScaleType::INT8) return Vector::load_scale(reinterpret_cast<const int8_t*>(from));
  if constexpr (TYPE == ScaleType::FLOAT32) return Vector::load(reinterpret_cast<const float*>(from));
  if constexpr (TYPE == ScaleType::FLOAT16) return Vector::load_halves(reinterpret_cast<const uint16_t*>(from));
  uint16_t halves[16];
  std::memcpy(halves, from, sizeof halves);
  float values[16];
  for (int i = 0; i < 16; ++i) values[i] = float_of(static_cast<int32_t>(halves[i]) << 16);
  return Vector::load(values);
}

// Scales and minima of up to GROUPWISE_STEP groups of a block, from the group `first` on, one for each part.
template <int PARTS, ScaleType TYPE>
inline void decode_scales_of(const uint8_t* record, const GroupwiseLayout& layout, int64_t first, int64_t count,
                             GroupwiseScales& to) {
  constexpr int64_t BYTES = TYPE == ScaleType::FLOAT32 ? 64 : TYPE == ScaleType::INT8 ? 16 : 32;
  Vector::Floats scale_factor = Vector::load(reinterpret_cast<const float*>(record));
  Vector::Floats minimum_factor = Vector::broadcast(1.0f);
  if constexpr (TYPE == ScaleType::INT8) {
    const int64_t chunk = first / GROUPWISE_STEP * 64;
    scale_factor = Vector::mul(scale_factor, Vector::load(reinterpret_cast<const float*>(record + layout.super_scale + chunk)));
    if (layout.has_minimum)
      minimum_factor = Vector::load(reinterpret_cast<const float*>(record + layout.super_minimum + chunk));
  }
  // With several parts each has its number; a larger group has one for `shared` groups of 64 columns.
  const int64_t shared = PARTS > 1 ? 1 : layout.group / GROUP;
  int64_t number = PARTS > 1 || shared == 1 ? first * PARTS : first / shared, left = shared == 1 ? 1 : shared - first % shared;
  for (int64_t i = 0; i < count * PARTS; ++i) {
    const uint8_t* place = record + number * BYTES;
    Vector::store(to.scale[i], Vector::mul(load_numbers<TYPE>(place + layout.scale), scale_factor));
    if (layout.has_minimum)
      Vector::store(to.minimum[i], Vector::mul(load_numbers<TYPE>(place + layout.minimum), minimum_factor));
    if (--left == 0) ++number, left = shared;
  }
}

template <int PARTS>
inline void decode_scales(const uint8_t* record, const GroupwiseLayout& layout, int64_t first, int64_t count,
                          GroupwiseScales& to) {
  switch (layout.type) {
    case ScaleType::INT8: return decode_scales_of<PARTS, ScaleType::INT8>(record, layout, first, count, to);
    case ScaleType::FLOAT32: return decode_scales_of<PARTS, ScaleType::FLOAT32>(record, layout, first, count, to);
    case ScaleType::FLOAT16: return decode_scales_of<PARTS, ScaleType::FLOAT16>(record, layout, first, count, to);
    default: return decode_scales_of<PARTS, ScaleType::BFLOAT16>(record, layout, first, count, to);
  }
}

// Vector j of a group: columns 4j.. in `low`, 4j + 32.. in `high`.
template <bool BYTES>
inline __attribute__((always_inline)) void read_codes(const uint8_t* codes, int j, Vector::Table table, Vector::Quads& low,
                                                      Vector::Quads& high) {
  if constexpr (BYTES) {
    low = Vector::load_quads(codes + j * 64), high = Vector::load_quads(codes + (j + 8) * 64);
  } else {
    Vector::decode(codes + j * 64, table, low, high);
  }
}

template <int PARTS, bool BYTES, int HEIGHT>
void groupwise_direct(const GroupwiseWeight& weight, const GroupwiseLayout& layout, const GroupwiseActivations& x,
                      Range blocks, const float* bias, Rows y) {
  constexpr int HALVES = PARTS == 4 ? 2 : 1, VECTORS = 8 / HALVES, GROUP_BYTES = BYTES ? 1024 : 512;
  const int64_t groups = weight.columns / GROUP;
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
        for (int half = 0; half < HALVES; ++half) {
          Vector::Sums low_sum[HEIGHT], high_sum[HEIGHT];
          unroll<HEIGHT>([&](auto row) {
            low_sum[row] = Vector::broadcast(offset[half * HEIGHT + row]);
            high_sum[row] = Vector::broadcast(PARTS == 1 ? int32_t{0} : offset[(half + HALVES) * HEIGHT + row]);
          });
#pragma GCC unroll 1
          for (int j = half * VECTORS; j < (half + 1) * VECTORS; ++j) {
            __builtin_prefetch(codes + j * 64 + Vector::PREFETCH);
            if (BYTES) __builtin_prefetch(codes + (j + 8) * 64 + Vector::PREFETCH);
            Vector::Quads low, high;
            read_codes<BYTES>(codes, j, table, low, high);
            const int8_t* quads = q + j * HEIGHT * Vector::QUAD_BYTES;
            unroll<HEIGHT>([&](auto row) {
              low_sum[row] = Vector::dot_once(low_sum[row], low, quads + row * Vector::QUAD_BYTES);
              high_sum[row] = Vector::dot_once(high_sum[row], high, quads + (8 * HEIGHT + row) * Vector::QUAD_BYTES);
            });
          }
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
        }
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

// Activation groups of m rows, rounded up so that what follows them is aligned.
inline int64_t groupwise_steps(int64_t m, int64_t columns) { return (m * (columns / GROUP) + 15) / 16 * 16; }

inline Tiles groupwise_tiles(int64_t m) { return {m, Vector::DIRECT_TILE_ROWS}; }

template <int PARTS, bool BYTES>
void groupwise_rows(const GroupwiseWeight& weight, const GroupwiseActivations& x, const Tiles& tiles, Range mine,
                    Range blocks, const float* bias, Rows y) {
  const GroupwiseLayout layout(weight.layout, weight.columns);
  const int64_t groups = weight.columns / GROUP;
  // Of several tiles, the first brings a block to the cache for the others.
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
          groupwise_direct<PARTS, BYTES, rows>(weight, layout, from, {block, block + step}, bias, y.from(start));
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

// One row in groups of 64 columns, each with its own step, as `quantize_groups` has them, and the sums of its parts.
template <int PARTS>
inline void quantize_parts(const float* x, int64_t groups, int64_t height, int8_t* q, float* step, int32_t* offset,
                           float* sum) {
  const int64_t stride = height * Vector::QUAD_BYTES;
  for (int64_t group = 0; group < groups; ++group, x += GROUP, q += 16 * stride, step += height) {
    Vector::Floats part[4];
    Vector::Sums most = Vector::broadcast(int32_t{0}), total = most;
    for (int i = 0; i < 4; ++i) {
      part[i] = Vector::load(x + 16 * i);
      most = Vector::max(most, Vector::abs_bits(part[i]));
    }
    const int32_t largest = Vector::reduce_max(most);
    *step = largest < INFINITY_BITS ? at_least_tiny(float_of(largest) / LEVELS) : NOT_A_NUMBER;
    const Grid<Values::SYMMETRIC> grid(*step, 0);
    for (int i = 0; i < 4; ++i) {
      const Vector::Sums codes = grid(part[i]);
      total = i % (4 / PARTS) == 0 ? codes : Vector::add(total, codes);
      Vector::store_quads(q + 4 * i * stride, stride, codes);
      if ((i + 1) % (4 / PARTS) != 0) continue;
      const int32_t all = Vector::reduce_add(total);
      *offset = Vector::UNSIGNED ? -128 * all : 0;
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
  if (GroupwiseLayout(weight.layout, weight.columns).bytes)
    groupwise_rows<PARTS, true>(weight, x, tiles, mine, blocks, bias, y);
  else
    groupwise_rows<PARTS, false>(weight, x, tiles, mine, blocks, bias, y);
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
