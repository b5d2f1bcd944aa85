// Search for codes and scales of table formats; infer/compress/calibration/group_scales.py is the slow reference, bit-equal:
// the same operations, sums in the order of the weights.
#pragma once

#include <cstdint>

#include "instruction_set.h"

namespace infer_native {

struct FitTask {
  const float* weight;      // [rows, columns], columns a multiple of the group
  const float* table;       // [tables, entries], ascending; tables is 1 or one for each 32 rows
  const float* bounds;      // [tables, entries - 1], the midpoints
  const float* importance;  // [columns]
  const float* inverses;    // [32], reciprocals of the candidate scales, signed fractions of a group's largest magnitude
  int64_t rows, columns, tables, entries, group;  // group: 64, or 16 with 16 entries
  uint8_t* codes;           // [rows, columns]
  int8_t* scale;            // [rows, columns / group]
  float* row_scale;         // [rows]
};

INFER_OF_SET void fit_avx2(const FitTask& task);    // x86-64 only
INFER_OF_SET void fit_avx512(const FitTask& task);  // x86-64 only

}  // namespace infer_native
