// Packed weights of codes with a float scale, and perhaps a minimum, for each group of columns.
//
// codes as those of lut4 (uint8 [NB, G, 512]) or of int8 ([NB, 16 G, 16, 4]), G = columns / 64; table int8 [NB, 16], of the
// former; scale uint8 [NB, record]: of each block of 16 rows
//   float [16]          what 1 of the table stands for
//   float [C, 16]       super-scales of 256 columns each, C of them, where scales are int8; then those of the minima
//   number [S, 16]      scales of groups of columns, S = columns / group; then, where there are any, the minima
// `layout` is group + (codes are bytes) << 32 + type of the numbers << 33 + (there are minima) << 36.
#pragma once

#include <cstdint>

#include "linear/linear.h"

namespace infer_native {

constexpr int64_t SUPER_COLUMNS = 256;

enum class ScaleType : int64_t { FLOAT32, FLOAT16, BFLOAT16, INT8 };

struct GroupwiseWeight {
  const uint8_t* codes;
  const uint8_t* scale;
  const int8_t* table;
  int64_t rows, columns;  // columns is a multiple of GROUP
  int64_t layout;
};

// Offsets, in bytes, within the record of a block.
struct GroupwiseLayout {
  int64_t group;
  bool bytes, has_minimum;
  ScaleType type;
  int64_t super_scale, super_minimum, scale, minimum, record_bytes;

  GroupwiseLayout(int64_t layout, int64_t columns)
      : group(layout & 0xffffffff), bytes(layout >> 32 & 1), has_minimum(layout >> 36 & 1),
        type(static_cast<ScaleType>(layout >> 33 & 3)) {
    const int64_t kinds = has_minimum ? 2 : 1, chunks = (columns + SUPER_COLUMNS - 1) / SUPER_COLUMNS;
    const int64_t numbers = columns / group * 16 * number_bytes();
    super_scale = 64;
    super_minimum = super_scale + chunks * 64;
    scale = type == ScaleType::INT8 ? super_scale + chunks * 64 * kinds : 64;
    minimum = scale + numbers;
    record_bytes = (scale + numbers * kinds + 63) / 64 * 64;
  }

  int64_t number_bytes() const { return type == ScaleType::FLOAT32 ? 4 : type == ScaleType::INT8 ? 1 : 2; }
  // Scales of 64 columns.
  int parts() const { return group == 16 ? 4 : group == 32 ? 2 : 1; }
};

// Whether infer can compute with it: a group of 16, 32 or a multiple of 64 columns that divides them.
inline bool known_layout(int64_t layout, int64_t columns) {
  const int64_t group = layout & 0xffffffff;
  return group > 0 && columns % GROUP == 0 && columns % group == 0 && (group == 16 || group == 32 || group % GROUP == 0);
}

// Activations become int8 for each 64 columns; see linear_groupwise.h.
void linear_groupwise(const float* x, int64_t m, const GroupwiseWeight& weight, const float* bias, float* y);

}  // namespace infer_native
