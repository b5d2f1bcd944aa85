// Packed weights of codes with a float scale, and optionally a minimum, for each group of columns.
//
// codes uint8 [NB, G, bits * 128], G = columns / 64: those of int8 ([NB, 16 G, 16, 4], 8 bits), or of lut4 (4 bits), indices
//   into `table` or, like 2, 3, 5 and 6 bits, unsigned integers minus `zero`; 3 bits may be indices too. Codes of 5 and 6 bits have
//   low nibbles in the order of lut4, before each 4 (5 bits) or 2 (6 bits) vectors one of their high bits, from bit 0 on: low and
//   high columns of the first, the second, ... Of 2 and 3 bits the low ones are pairs, of two vectors in one in the same order, and one vector of the high bits of
//   3-bit integers is before each 4.
// table int8 [NB, 16], of indices; scale uint8 [NB, record]: of each block of 16 rows
//   float [16]          factor from table entries to weights
//   super [C, 16]       where scales are integers: super-scales, one for each 256 columns; then those of the minima
//   number [S, 16]      scales of groups of columns, S = columns / group, each with its minimum [16] after it where `layout` has
//                       them: one stream, as two that start anew in each record leave the CPU's prefetchers behind
// Integer scales and minima of 4 and 6 bits are stored together. For 256 columns: [256] bytes of 16 groups of 16 columns, the
// scale in the low nibble, the minimum in the high one; or [3, 64] of 8 groups of 32, like 6-bit codes, minima as high columns.
// `layout` is group + (codes are bytes) << 32 + type of the numbers << 33 + (there are minima) << 36
//   + (minima are int8 steps of the scale) << 37 + (super-scales are float16) << 38 + (bits of integers, 2 to 6, else 0) << 39 + zero << 42
//   + (codes of 3 bits are indices) << 48.
#pragma once

#include <cstdint>

#include "linear/linear.h"

namespace infer_native {

constexpr int64_t SUPER_COLUMNS = 256;

enum class ScaleType : int64_t { FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8, INT6, INT4 };

struct GroupwiseWeight {
  const uint8_t* codes;
  const uint8_t* scale;
  const int8_t* table;
  int64_t rows, columns;  // columns is a multiple of GROUP
  int64_t layout;
};

// Layout code, decoded; offsets are bytes within the record of a block.
struct GroupwiseLayout {
  int64_t group;
  bool has_minimum, minimum_steps, float16_supers, lookup;  // lookup: codes are indices into a table
  ScaleType type;
  int64_t code_bits, zero;
  int64_t super_scale, super_minimum, scale, stride, record_bytes;  // stride: bytes from a number to the next

  GroupwiseLayout(int64_t layout, int64_t columns)
      : group(layout & 0xffffffff), has_minimum(layout >> 36 & 1), minimum_steps(layout >> 37 & 1),
        float16_supers(layout >> 38 & 1), lookup((layout >> 48 & 1) != 0 || ((layout >> 32 & 1) == 0 && (layout >> 39 & 7) == 0)),
        type(static_cast<ScaleType>(layout >> 33 & 7)),
        code_bits(layout >> 32 & 1 ? 8 : (layout >> 39 & 7) != 0 ? layout >> 39 & 7 : 4), zero(layout >> 42 & 63) {
    const int64_t kinds = has_minimum ? 2 : 1, chunks = (columns + SUPER_COLUMNS - 1) / SUPER_COLUMNS;
    const int64_t supers = integers() ? chunks * super_bytes() : 0, numbers = columns / group * 16;
    super_scale = 64;
    super_minimum = super_scale + supers;
    scale = super_scale + supers * kinds;
    stride = 16 * (number_bytes() + (!has_minimum ? 0 : minimum_steps ? 1 : number_bytes()));
    const int64_t each = type == ScaleType::INT6 ? 24 : type == ScaleType::INT4 ? 16 : stride, end = scale + numbers / 16 * each;
    record_bytes = (end + 63) / 64 * 64;
  }

  // Zero point of codes that are unsigned integers, -1 of others.
  int64_t integer_zero() const { return code_bits == 8 || lookup ? -1 : zero; }
  bool integers() const { return type == ScaleType::INT8 || type >= ScaleType::INT6; }
  int64_t super_bytes() const { return float16_supers ? 32 : 64; }  // of 16 rows
  int64_t number_bytes() const {
    return type == ScaleType::FLOAT32 ? 4 : type == ScaleType::FLOAT16 || type == ScaleType::BFLOAT16 ? 2 : 1;
  }
  // Scales for each 64 columns.
  int parts() const { return group == 16 ? 4 : group == 32 ? 2 : 1; }
  int64_t group_bytes() const { return code_bits * 128; }  // of the codes of 16 rows and 64 columns
};

// Returns whether the kernels support a layout: groups of 16, 32 or a multiple of 64 columns that divide `columns`.
inline bool known_layout(int64_t layout, int64_t columns) {
  const int64_t group = layout & 0xffffffff;
  if (group <= 0 || columns % GROUP != 0 || columns % group != 0 || (group != 16 && group != 32 && group % GROUP != 0)) return false;
  const GroupwiseLayout given(layout, columns);
  const int64_t code = given.code_bits;
  const bool integers = code == 4 || code == 8 || (code == 5 && group == 32) || (code == 6 && group == 16) || ((code == 2 || code == 3) && group != 32);
  const bool bits = given.lookup ? code == 4 || (code == 3 && group <= 32) : integers;
  if (given.type <= ScaleType::FLOAT8) return bits && !(given.minimum_steps && given.integers());
  const int64_t wanted = given.type == ScaleType::INT6 ? 32 : 16;
  return bits && given.type <= ScaleType::INT4 && group == wanted && given.has_minimum && columns % SUPER_COLUMNS == 0;
}

// Packs codes [rows, columns] into planes of `planes` bits, `add` added to each; `bits` 2, 3, 5 and 6 are little-endian bit streams, 8 int8.
void pack_planes(const uint8_t* codes, int bits, int add, int planes, int64_t rows, int64_t columns, uint8_t* out);

// Computes the layer with activations quantized to int8 for each 64 columns; see linear_groupwise.h.
void linear_groupwise(const float* x, int64_t m, const GroupwiseWeight& weight, const float* bias, float* y);

}  // namespace infer_native
