// y = x @ weight.T where a weight is a code times a float scale of its group of columns, plus a minimum of that group.
//
// Codes are indices of 3 or 4 bits into int8 entries, int8, or unsigned integers of 2 to 6 bits minus a zero point. Activations are
// quantized to int8 for each 64 columns, as for lut4, or for each 32 where the weight has a scale for 32; a minimum is multiplied by
// the sum of the int8 activations of its group:
//   y = sum over groups of step * (scale * sum(q * code) + minimum * sum(q)) + bias, the sums exact in int32,
// the minima of 256 columns after their codes.
#pragma once

#include "linear/groupwise_activations.h"
#include "linear/groupwise_scales.h"

namespace infer_native {
namespace {

template <int CODES>
inline __attribute__((always_inline)) Vector::Sums groupwise_dot(Vector::Sums sum, Vector::Quads weights, const int8_t* quad) {
  if constexpr (NIBBLES<CODES>) return Vector::dot_nibbles(sum, weights, quad);
  if constexpr (PLANES<CODES>) return Vector::dot_nonnegative(sum, weights, quad);
  return Vector::dot_from_memory(sum, weights, quad);
}

// Adds the sums of columns that share a step, times each row's step of activations, to the totals.
template <int HEIGHT>
inline __attribute__((always_inline)) void add_steps(const Vector::Floats (&sum)[HEIGHT], const float* step, Vector::Floats (&total)[HEIGHT]) {
  unroll<HEIGHT>([&](auto row) __attribute__((always_inline)) { total[row] = Vector::fma(sum[row], Vector::broadcast(step[row]), total[row]); });
}

// Adds the products of the 64 columns of one group, of 16 rows, to the totals of HEIGHT rows of activations.
template <int PARTS, int CODES, int HEIGHT, class Scales>
inline __attribute__((always_inline)) void groupwise_group(const uint8_t* codes, int64_t distance, Vector::Table table,
                                                           const int8_t* q, const int32_t* offset,
                                                           const float* step, const Scales& scales, int64_t place,
                                                           Vector::Floats (&total)[HEIGHT]) {
  constexpr int HALVES = PARTS == 4 ? 2 : 1, VECTORS = 8 / HALVES;
  constexpr bool SHORT = NIBBLES<CODES> && Vector::SHORT_NIBBLES;  // sums of nibbles are widened before the start is added
  Vector::Floats sum[HEIGHT], high_sums[HEIGHT];  // high_sums: of the columns that have a step of their own
  unroll<HALVES>([&](auto half) __attribute__((always_inline)) {
    const auto start = [&](int part, auto row) { return Vector::broadcast(offset[part * HEIGHT + row]); };
    Vector::Sums low_sum[HEIGHT], high_sum[HEIGHT];
    unroll<HEIGHT>([&](auto row) {
      if constexpr (SHORT)
        low_sum[row] = Vector::broadcast(int32_t{0});
      else
        low_sum[row] = start(half, row);
      if constexpr (SHORT || PARTS == 1)
        high_sum[row] = Vector::broadcast(int32_t{0});
      else
        high_sum[row] = start(half + HALVES, row);
    });
    const auto low_of = [&](int j, Vector::Quads codes) __attribute__((always_inline)) {
      const int8_t* quads = q + j * HEIGHT * Vector::QUAD_BYTES;
      unroll<HEIGHT>([&](auto row) {
        low_sum[row] = groupwise_dot<CODES>(low_sum[row], codes, quads + row * Vector::QUAD_BYTES);
      });
    };
    const auto high_of = [&](int j, Vector::Quads codes) __attribute__((always_inline)) {
      const int8_t* quads = q + (j + 8) * HEIGHT * Vector::QUAD_BYTES;
      unroll<HEIGHT>([&](auto row) {
        high_sum[row] = groupwise_dot<CODES>(high_sum[row], codes, quads + row * Vector::QUAD_BYTES);
      });
    };
    each_vector<CODES, half * VECTORS, (half + 1) * VECTORS, (HEIGHT > FEW_ROWS)>(codes, distance, table, low_of, high_of);
    const Vector::Floats low_scale = scales.scale(place + half), high_scale = scales.scale(place + (PARTS == 1 ? 0 : half + HALVES));
    unroll<HEIGHT>([&](auto row) {
      Vector::Sums low = low_sum[row], high = high_sum[row];
      if constexpr (SHORT) {
        low = Vector::add(Vector::widen(low), start(half, row));
        high = PARTS == 1 ? Vector::widen(high) : Vector::add(Vector::widen(high), start(half + HALVES, row));
      }
      if constexpr (PARTS == 1) low = Vector::add(low, high);
      const Vector::Floats of_low = Vector::to_float(low), of_high = Vector::to_float(high);
      sum[row] = half == 0 ? Vector::mul(of_low, low_scale) : Vector::fma(of_low, low_scale, sum[row]);
      if constexpr (STEPS<PARTS> == 2) high_sums[row] = Vector::mul(of_high, high_scale);
      if constexpr (PARTS == 4) sum[row] = Vector::fma(of_high, high_scale, sum[row]);
    });
  });
  add_steps(sum, step, total);
  if constexpr (STEPS<PARTS> == 2) add_steps(high_sums, step + HEIGHT, total);
}

// Adds the products of 64 columns with four scales to the totals of many rows, one part after the other: the sums of `HEIGHT` rows
// alone leave registers for what each row's parts add up to. Same bits as `groupwise_group`.
template <int CODES, int HEIGHT, class Scales>
inline __attribute__((always_inline)) void groupwise_quarters(const uint8_t* codes, int64_t distance, Vector::Table table, const int8_t* q,
                                                              const int32_t* offset, const float* step, const Scales& scales, int64_t place,
                                                              Vector::Floats (&total)[HEIGHT]) {
  constexpr bool SHORT = NIBBLES<CODES> && Vector::SHORT_NIBBLES;
  Vector::Floats sum[HEIGHT];
  unroll<4>([&](auto turn) __attribute__((always_inline)) {
    constexpr int HALF = turn / 2, PART = HALF + 2 * (turn % 2);
    const auto start = [&](auto row) __attribute__((always_inline)) { return Vector::broadcast(offset[PART * HEIGHT + row]); };
    Vector::Sums products[HEIGHT];
    unroll<HEIGHT>([&](auto row) __attribute__((always_inline)) { products[row] = SHORT ? Vector::broadcast(int32_t{0}) : start(row); });
    const auto multiply = [&](int j, Vector::Quads codes) __attribute__((always_inline)) {
      const int8_t* quads = q + (j + (PART < 2 ? 0 : 8)) * HEIGHT * Vector::QUAD_BYTES;
      unroll<HEIGHT>([&](auto row) __attribute__((always_inline)) {
        products[row] = groupwise_dot<CODES>(products[row], codes, quads + row * Vector::QUAD_BYTES);
      });
    };
    const auto skip = [](int, Vector::Quads) __attribute__((always_inline)) {};
    if constexpr (PART < 2)
      each_vector<CODES, HALF * 4, HALF * 4 + 4, true>(codes, distance, table, multiply, skip);
    else
      each_vector<CODES, HALF * 4, HALF * 4 + 4, true>(codes, distance, table, skip, multiply);
    const Vector::Floats scale = scales.scale(place + PART);
    unroll<HEIGHT>([&](auto row) __attribute__((always_inline)) {
      Vector::Sums exact = products[row];
      if constexpr (SHORT) exact = Vector::add(Vector::widen(exact), start(row));
      sum[row] = turn == 0 ? Vector::mul(Vector::to_float(exact), scale) : Vector::fma(Vector::to_float(exact), scale, sum[row]);
    });
  });
  add_steps(sum, step, total);
}

// Adds the products of `count` groups of 64 columns of a block, whose scales were decoded, and then their minima.
template <int PARTS, int CODES, int HEIGHT, class Scales>
inline __attribute__((always_inline)) void groupwise_step(const uint8_t* codes, int64_t distance, Vector::Table table, const Scales& scales,
                                                          bool has_minimum, const GroupwiseActivations& x, int64_t first, int64_t count,
                                                          Vector::Floats (&total)[HEIGHT]) {
  for (int64_t i = 0; i < count; ++i, codes += CODE_BITS<CODES> * 128) {
    const int64_t group = first + i;
    const int8_t* const q = x.q + group * 16 * HEIGHT * Vector::QUAD_BYTES;
    const int32_t* const offset = x.offset + group * PARTS * HEIGHT;
    const float* const step = x.step + group * STEPS<PARTS> * HEIGHT;
    if constexpr (PARTS == 4 && HEIGHT > FEW_ROWS)
      groupwise_quarters<CODES>(codes, distance, table, q, offset, step, scales, i * PARTS, total);
    else
      groupwise_group<PARTS, CODES>(codes, distance, table, q, offset, step, scales, i * PARTS, total);
  }
  if (!has_minimum) return;
  const float* sums = x.sum + first * PARTS * HEIGHT;
  for (int64_t i = 0; i < count * PARTS; ++i, sums += HEIGHT) {
    const Vector::Floats minimum = scales.minimum(i);
    unroll<HEIGHT>([&](auto row) { total[row] = Vector::fma(minimum, Vector::broadcast(sums[row]), total[row]); });
  }
}

// Computes blocks for one tile of rows. `kept`: decoded scales of these blocks, for all tiles of a chunk (null: decoded block by
// block), which are `decoded` already or else are written here. Not inlined: gcc 12 then has the sums in registers whatever calls it.
template <int PARTS, int CODES, int HEIGHT, class Scales>
__attribute__((noinline)) void groupwise_direct(const GroupwiseWeight& weight, const GroupwiseLayout& layout, const GroupwiseActivations& x,
                                                Range blocks, Scales* kept, bool decoded, const float* bias, Rows y) {
  constexpr int GROUP_BYTES = CODE_BITS<CODES> * 128;
  const int64_t groups = weight.columns / GROUP, distance = decoded ? 0 : stream_distance<HEIGHT>();
  Scales own;
  for (int64_t block = blocks.begin; block < blocks.end; ++block) {
    const uint8_t* codes = weight.codes + block * groups * GROUP_BYTES;
    const uint8_t* record = weight.scale + block * layout.record_bytes;
    const Vector::Table table = Vector::load_table(weight.table + block * 16);
    Vector::Floats total[HEIGHT];
    unroll<HEIGHT>([&](auto row) { total[row] = Vector::broadcast(0.0f); });
    for (int64_t first = 0; first < groups; first += GROUPWISE_STEP, codes += GROUPWISE_STEP * GROUP_BYTES) {
      const int64_t count = groups - first < GROUPWISE_STEP ? groups - first : GROUPWISE_STEP;
      Scales& scales = kept == nullptr ? own : *kept++;
      if (!decoded) decode_scales<PARTS>(record, layout, first, count, scales);
      groupwise_step<PARTS, CODES>(codes, distance, table, scales, layout.has_minimum, x, first, count, total);
    }
    const int64_t n = block * BLOCK_ROWS, left = weight.rows - n;
    unroll<HEIGHT>([&](auto row) {
      Vector::Floats value = total[row];
      if (bias != nullptr) value = Vector::add(value, read_row(bias + n, left));
      write_row(y.row(row) + n, left, value);
    });
  }
}

// Returns how many blocks a tile computes before the next one: their outputs, adjacent in each row, are written together (with
// 512 rows, one cache line at a time takes 8 % longer). Their codes and scales stay in the second-level cache.
template <int PARTS, int CODES>
inline int64_t blocks_together(int64_t groups) {
  constexpr int64_t KEPT_BYTES = 1 << 18;
  const int64_t fitting = KEPT_BYTES / (groups * (CODE_BITS<CODES> * 128 + PARTS * 64));
  return fitting < 1 ? 1 : fitting < STRIP_BLOCKS ? fitting : STRIP_BLOCKS;
}

// Computes blocks for a chunk of at least two tiles: the first reads codes from memory and decodes scales for all of them.
template <int PARTS, int CODES>
void groupwise_chunk(const GroupwiseWeight& weight, const GroupwiseLayout& layout, const GroupwiseActivations& x, const Tiles& tiles,
                     Range chunk, Range blocks, const float* bias, Rows y) {
  const int64_t groups = weight.columns / GROUP, steps = (groups + GROUPWISE_STEP - 1) / GROUPWISE_STEP;
  const int64_t together = blocks_together<PARTS, CODES>(groups);
  using Scales = FloatScales<PARTS>;
  Scales* const kept = static_cast<Scales*>(scale_scratch(together * steps * static_cast<int64_t>(sizeof(Scales))));
  for (int64_t block = blocks.begin; block < blocks.end; block += together) {
    const Range some{block, block + together < blocks.end ? block + together : blocks.end};
    for (int64_t tile = chunk.begin; tile < chunk.end; ++tile) {
      const int64_t start = tiles.start(tile);
      with_height<Vector::DIRECT_TILE_ROWS>(tiles.height(tile), [&](auto rows) {
        groupwise_direct<PARTS, CODES, rows>(weight, layout, x.from<PARTS>(start, groups), some, kept, tile > chunk.begin, bias, y.from(start));
      });
    }
  }
}

template <int PARTS, int CODES>
void groupwise_rows(const GroupwiseWeight& weight, const GroupwiseActivations& x, const Tiles& tiles, Range mine,
                    Range blocks, const float* bias, Rows y) {
  constexpr int64_t CHUNK = 192 / Vector::DIRECT_TILE_ROWS;
  const GroupwiseLayout layout(weight.layout, weight.columns);
  for (int64_t first = mine.begin; first < mine.end; first += CHUNK) {
    const Range chunk{first, first + CHUNK < mine.end ? first + CHUNK : mine.end};
    if (chunk.end - first > 1) {
      groupwise_chunk<PARTS, CODES>(weight, layout, x, tiles, chunk, blocks, bias, y);
      continue;
    }
    const int64_t start = tiles.start(first);
    const GroupwiseActivations from = x.from<PARTS>(start, weight.columns / GROUP);
    const auto direct = [&](auto rows, auto* own) {
      groupwise_direct<PARTS, CODES, rows>(weight, layout, from, blocks, own, false, bias, y.from(start));
    };
    with_height<Vector::DIRECT_TILE_ROWS>(tiles.height(first), [&](auto rows) {
      if constexpr (Vector::BYTE_SCALES && PARTS > 1 && rows <= FEW_ROWS)
        if (layout.integers()) return direct(rows, static_cast<ByteScales*>(nullptr));
      direct(rows, static_cast<FloatScales<PARTS>*>(nullptr));
    });
  }
}

template <int PARTS>
void groupwise_part(const GroupwiseWeight& weight, const GroupwiseActivations& x, const Tiles& tiles, Range mine,
                    Range blocks, const float* bias, Rows y) {
  const GroupwiseLayout layout(weight.layout, weight.columns);
  const int64_t bits = layout.code_bits;
  if constexpr (PARTS > 1)
    if (layout.lookup && bits == 3) return groupwise_rows<PARTS, LOOKUP_3_BITS>(weight, x, tiles, mine, blocks, bias, y);
  if (bits == 8) return groupwise_rows<PARTS, 8>(weight, x, tiles, mine, blocks, bias, y);
  if constexpr (PARTS == 2)
    if (bits == 5) return groupwise_rows<PARTS, 5>(weight, x, tiles, mine, blocks, bias, y);
  if constexpr (PARTS == 4)
    if (bits == 6) return groupwise_rows<PARTS, 6>(weight, x, tiles, mine, blocks, bias, y);
  if constexpr (PARTS != 2) {
    if (bits == 2) return groupwise_rows<PARTS, 2>(weight, x, tiles, mine, blocks, bias, y);
    if (bits == 3) return groupwise_rows<PARTS, 3>(weight, x, tiles, mine, blocks, bias, y);
  }
  if (layout.lookup) return groupwise_rows<PARTS, LOOKUP>(weight, x, tiles, mine, blocks, bias, y);
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
  const InputGrid grid{nullptr, nullptr, GroupwiseLayout(weight.layout, weight.columns).integer_zero()};
  const auto quantize = [&](int64_t part, int64_t parts) {
    quantize_groupwise<PARTS>(x, weight.columns, m, weight.columns, grid, part, parts, memory);
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
