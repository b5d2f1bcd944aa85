// Loops of scale_search.h. Each lane of a register tries another scale, so that sums need no shuffles and have the order of the
// weights on every machine. The including file defines the width of a register.
#pragma once

#include <cmath>

#include "isa.h"
#include "scale_search/scale_search.h"

#ifndef REGISTER_BYTES
#define REGISTER_BYTES 16
#endif

namespace infer_native {
namespace {

constexpr int64_t FIT_TABLE_ROWS = 32;
constexpr int FIT_SHARES = 32, FIT_STEPS = 16;  // candidate scales: fractions of the largest, then int8 levels
constexpr int FIT_LANES = REGISTER_BYTES / sizeof(float);
constexpr float FIT_LEVELS = 127;

typedef float Lanes __attribute__((vector_size(REGISTER_BYTES)));
typedef int32_t IntLanes __attribute__((vector_size(REGISTER_BYTES)));

inline Lanes load_lanes(const float* p) {
  Lanes v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

inline void store_lanes(float* p, Lanes v) { __builtin_memcpy(p, &v, sizeof v); }

inline float larger(float a, float b) { return a > b ? a : b; }

inline float clamp_level(float level) { return level > FIT_LEVELS ? FIT_LEVELS : larger(level, -FIT_LEVELS); }

inline float inverse_of(float scale) { return 1 / (scale != 0 ? scale : 1); }

template <int ENTRIES>
struct Codebook {
  float values[ENTRIES], bounds[ENTRIES];

  Codebook(const float* table, const float* midpoints) {
    for (int i = 0; i < ENTRIES; ++i) values[i] = table[i];
    for (int i = 0; i + 1 < ENTRIES; ++i) bounds[i] = midpoints[i];
  }
  Lanes nearest(Lanes v) const {
    Lanes found = values[0] - Lanes{};
    for (int i = 0; i + 1 < ENTRIES; ++i) found = v > bounds[i] ? values[i + 1] - Lanes{} : found;
    return found;
  }
  IntLanes code(Lanes v) const {
    IntLanes found = {};
    for (int i = 0; i + 1 < ENTRIES; ++i) found -= v > bounds[i];  // true is -1
    return found;
  }
};

template <int SIZE>
struct Group {
  float unit[SIZE], largest;

  explicit Group(const float* weight) {
    largest = 0;
    for (int i = 0; i < SIZE; ++i) largest = larger(largest, std::fabs(weight[i]));
    const float divisor = largest > 0 ? largest : 1;
    for (int i = 0; i < SIZE; ++i) unit[i] = weight[i] / divisor;
  }
};

// Returns the signed fraction of the largest magnitude with the least error, after rounding codes and least squares.
template <int SIZE, int ENTRIES>
inline float best_share(const Group<SIZE>& group, const Codebook<ENTRIES>& book, const float* importance,
                        const float* inverses) {
  alignas(64) float along[FIT_SHARES], square[FIT_SHARES];
  for (int lane = 0; lane < FIT_SHARES; lane += FIT_LANES) {
    const Lanes inverse = load_lanes(inverses + lane);
    Lanes along_sum = {}, square_sum = {};
    for (int i = 0; i < SIZE; ++i) {
      const Lanes fitted = book.nearest(group.unit[i] * inverse), weighted = importance[i] * fitted;
      along_sum += weighted * group.unit[i];
      square_sum += weighted * fitted;
    }
    store_lanes(along + lane, along_sum);
    store_lanes(square + lane, square_sum);
  }
  float best = 0, saved = 0;
  for (int lane = 0; lane < FIT_SHARES; ++lane) {
    const float divisor = square[lane] > 0 ? square[lane] : 1;
    const float gain = along[lane] * along[lane] / divisor;
    if (gain > saved) saved = gain, best = along[lane] / divisor;
  }
  return best;
}

// Returns the int8 level in start - 8 … start + 7 with the smallest error; `level` is the size of one step.
template <int SIZE, int ENTRIES>
inline float best_level(const Group<SIZE>& group, const Codebook<ENTRIES>& book, const float* importance, float start,
                        float level) {
  alignas(64) float levels[FIT_STEPS], sizes[FIT_STEPS], inverses[FIT_STEPS], errors[FIT_STEPS];
  for (int lane = 0; lane < FIT_STEPS; ++lane) {
    levels[lane] = clamp_level(start + static_cast<float>(lane - FIT_STEPS / 2));
    sizes[lane] = levels[lane] * level;
    inverses[lane] = inverse_of(sizes[lane]);
  }
  for (int lane = 0; lane < FIT_STEPS; lane += FIT_LANES) {
    const Lanes size = load_lanes(sizes + lane), inverse = load_lanes(inverses + lane);
    Lanes error = {};
    for (int i = 0; i < SIZE; ++i) {
      const Lanes missed = group.unit[i] - book.nearest(group.unit[i] * inverse) * size;
      error += importance[i] * missed * missed;
    }
    store_lanes(errors + lane, error);
  }
  int best = 0;
  for (int lane = 1; lane < FIT_STEPS; ++lane)
    if (errors[lane] < errors[best]) best = lane;
  return levels[best];
}

template <int ENTRIES, int SIZE>
inline void fit_row(const FitTask& task, int64_t row, float* shares) {
  const int64_t groups = task.columns / SIZE, which = task.tables == 1 ? 0 : row / FIT_TABLE_ROWS;
  const Codebook<ENTRIES> book(task.table + which * ENTRIES, task.bounds + which * (ENTRIES - 1));
  const float* weight = task.weight + row * task.columns;
  float row_scale = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const Group<SIZE> group(weight + g * SIZE);
    shares[g] = best_share(group, book, task.importance + g * SIZE, task.inverses);
    row_scale = larger(row_scale, std::fabs(shares[g] * group.largest));
  }
  task.row_scale[row] = row_scale;
  for (int64_t g = 0; g < groups; ++g) {
    const Group<SIZE> group(weight + g * SIZE);
    const float level = group.largest > 0 ? row_scale / FIT_LEVELS / group.largest : 0;
    const float start = level > 0 ? std::nearbyint(shares[g] / level) : 0;
    const float scale = best_level(group, book, task.importance + g * SIZE, start, level);
    task.scale[row * groups + g] = static_cast<int8_t>(scale);
    uint8_t* codes = task.codes + row * task.columns + g * SIZE;
    for (int i = 0; i < SIZE; i += FIT_LANES) {
      const IntLanes code = book.code(load_lanes(group.unit + i) * inverse_of(scale * level));
      for (int j = 0; j < FIT_LANES; ++j) codes[i + j] = static_cast<uint8_t>(code[j]);
    }
  }
}

template <int ENTRIES, int SIZE>
void fit_rows(const FitTask& task) {
  const int64_t bytes = task.columns / SIZE * static_cast<int64_t>(sizeof(float));
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < task.rows; ++row) fit_row<ENTRIES, SIZE>(task, row, static_cast<float*>(scratch(bytes)));
}

inline void fit_any(const FitTask& task) {
  if (task.group == 16) return fit_rows<16, 16>(task);
  switch (task.entries) {
    case 4: return fit_rows<4, 64>(task);
    case 8: return fit_rows<8, 64>(task);
    case 16: return fit_rows<16, 64>(task);
    case 64: return fit_rows<64, 64>(task);
  }
}

}  // namespace
}  // namespace infer_native
