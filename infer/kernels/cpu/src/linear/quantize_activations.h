// Quantization of float rows to int8 in the layout of the kernels. Included by each instruction set after its `Vector`.
//
// Rows are cut into tiles of nearly equal height, whose rows are interleaved by quads (4 columns): quad k of row r of a tile of
// h rows is at (k * h + r) * QUAD_BYTES, so that a kernel reads one stream.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "isa.h"

namespace infer_native {
namespace {

struct Tiles {
  int64_t rows, count;

  Tiles(int64_t rows, int64_t max_height) : rows(rows), count((rows + max_height - 1) / max_height) {}
  int64_t start(int64_t tile) const { return tile * (rows / count) + (tile < rows % count ? tile : rows % count); }
  int height(int64_t tile) const { return static_cast<int>(start(tile + 1) - start(tile)); }
};

struct Range {
  int64_t begin, end;
};

inline Range share(int64_t count, int64_t part, int64_t parts) {
  return {count * part / parts, count * (part + 1) / parts};
}

constexpr float LEVELS = 127;
constexpr int32_t INFINITY_BITS = 0x7f800000;
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

inline float float_of(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Bound of the values of a row: |x| <= 127 step; |x| <= 254 step; none.
enum class ValueRange { SYMMETRIC, ASYMMETRIC, UNBOUNDED };

// Quantizer: the integers nearest to x / step, halves to even, plus `zero`, clamped to ±127. The quotient is bit-equal to a
// division, by two Newton corrections (Markstein 1990) where no intermediate can leave the normal range: the division
// instruction costs several times as much.
template <ValueRange RANGE>
struct Grid {
  Vector::Floats step, inverse, limit, low, high;
  Vector::Sums zero;
  bool fast;

  Grid(float s, int32_t z)
      : step(Vector::broadcast(s)),
        inverse(Vector::broadcast(1 / s)),
        limit(Vector::broadcast(300 * s)),
        low(Vector::broadcast(-LEVELS - z)),
        high(Vector::broadcast(LEVELS - z)),
        zero(Vector::broadcast(z)),
        fast(s > 1e-20f && s < 1e20f) {}

  Vector::Floats divide(Vector::Floats x) const {
    if (!fast) return Vector::div(x, step);
    if (RANGE == ValueRange::UNBOUNDED) x = Vector::clamp(x, Vector::negate(limit), limit);
    Vector::Floats q = Vector::mul(x, inverse);
    q = Vector::fma(Vector::fnma(q, step, x), inverse, q);
    return Vector::fma(Vector::fnma(q, step, x), inverse, q);
  }

  Vector::Sums operator()(Vector::Floats x) const {
    if (RANGE == ValueRange::SYMMETRIC) return Vector::round(divide(x));
    return Vector::add(Vector::round(Vector::clamp(divide(x), low, high)), zero);
  }
};

// Loads the last columns, fewer than 16, padded with zeros.
inline Vector::Floats load_tail(const float* x, int64_t count) {
  alignas(64) float padded[16] = {};
  std::memcpy(padded, x, count * sizeof(float));
  return Vector::load(padded);
}

// Row of activations.
struct PlainRow {
  const float* x;
  Vector::Floats at(int64_t k) const { return Vector::load(x + k); }
  Vector::Floats tail(int64_t k, int64_t count) const { return load_tail(x + k, count); }
};

// Row of activations whose columns are multiplied by `multiplier` (SmoothQuant).
struct ScaledRow {
  const float *x, *multiplier;
  Vector::Floats at(int64_t k) const { return Vector::mul(Vector::load(x + k), Vector::load(multiplier + k)); }
  Vector::Floats tail(int64_t k, int64_t count) const {
    return Vector::mul(load_tail(x + k, count), load_tail(multiplier + k, count));
  }
};

struct MinMax {
  float low, high;  // of the row and zero
  bool finite;
};

template <class Row>
inline MinMax min_max_of(Row x, int64_t columns) {
  const Vector::Floats none = Vector::broadcast(0.0f);
  Vector::Floats low[4], high[4], zero[4];  // zero: 0 * x is NaN where x is not finite
  for (int i = 0; i < 4; ++i) low[i] = high[i] = zero[i] = none;
  const auto extend = [&](int i, Vector::Floats v) {
    low[i] = Vector::min(low[i], v);
    high[i] = Vector::max(high[i], v);
    zero[i] = Vector::fma(v, none, zero[i]);
  };
  int64_t k = 0;
  for (; k + 64 <= columns; k += 64) {
    extend(0, x.at(k));
    extend(1, x.at(k + 16));
    extend(2, x.at(k + 32));
    extend(3, x.at(k + 48));
  }
  for (; k + 16 <= columns; k += 16) extend(0, x.at(k));
  if (k < columns) extend(0, x.tail(k, columns - k));
  alignas(64) float lows[16], highs[16], zeros[16];
  Vector::store(lows, Vector::min(Vector::min(low[0], low[1]), Vector::min(low[2], low[3])));
  Vector::store(highs, Vector::max(Vector::max(high[0], high[1]), Vector::max(high[2], high[3])));
  Vector::store(zeros, Vector::add(Vector::add(zero[0], zero[1]), Vector::add(zero[2], zero[3])));
  MinMax result{0, 0, true};
  for (int i = 0; i < 16; ++i) {
    result.low = lows[i] < result.low ? lows[i] : result.low;
    result.high = highs[i] > result.high ? highs[i] : result.high;
    result.finite = result.finite && zeros[i] == 0;
  }
  return result;
}

inline bool any_nan(const float* x, int64_t columns) {
  Vector::Sums max_bits = Vector::broadcast(int32_t{0});
  int64_t k = 0;
  for (; k + 16 <= columns; k += 16) max_bits = Vector::max(max_bits, Vector::abs_bits(Vector::load(x + k)));
  if (k < columns) max_bits = Vector::max(max_bits, Vector::abs_bits(load_tail(x + k, columns - k)));
  return Vector::reduce_max(max_bits) > INFINITY_BITS;
}

inline float at_least_normal(float step) {
  constexpr float MIN_NORMAL = std::numeric_limits<float>::min();
  return step > MIN_NORMAL ? step : MIN_NORMAL;
}

struct RowGrid {
  float step;
  int32_t zero;
};

// Grids of `linear_int8` (linear.h). The step is NaN where the result of the row is NaN.
inline RowGrid static_grid(const float* x, int64_t columns, float x_scale) {
  return {any_nan(x, columns) ? NOT_A_NUMBER : x_scale, 0};
}

template <class Row>
inline RowGrid row_grid(Row x, int64_t columns) {
  const MinMax range = min_max_of(x, columns);
  const float step = at_least_normal((range.high - range.low) / (2 * LEVELS));
  if (!range.finite || step > std::numeric_limits<float>::max()) return {NOT_A_NUMBER, 0};
  const float zero = std::nearbyint(-LEVELS - range.low / step);
  return {step, static_cast<int32_t>(zero < LEVELS ? (zero > -LEVELS ? zero : -LEVELS) : LEVELS)};
}

// Quantizes one row, 16 columns at a time, and stores those in `mine`: columns from 16 i on at place(i), quads `stride` bytes
// apart. Returns the initial accumulator: -128 * sum(q) where weights are stored as code + 128.
template <ValueRange RANGE, class Row, class Place>
inline int32_t quantize_row(Row x, int64_t columns, RowGrid row, int64_t stride, Range mine, Place place) {
  const Grid<RANGE> grid(row.step, row.zero);
  Vector::Sums total = Vector::broadcast(int32_t{0});
  const int64_t whole = columns / 16, begin = mine.begin < whole ? mine.begin : whole, end = mine.end < whole ? mine.end : whole;
  if (Vector::UNSIGNED)
    for (int64_t i = 0; i < begin; ++i) total = Vector::add(total, grid(x.at(16 * i)));
  for (int64_t i = begin; i < end; ++i) {
    const Vector::Sums codes = grid(x.at(16 * i));
    total = Vector::add(total, codes);
    Vector::store_quads(place(i), stride, codes);
  }
  if (Vector::UNSIGNED)
    for (int64_t i = end; i < whole; ++i) total = Vector::add(total, grid(x.at(16 * i)));
  int32_t sum = Vector::reduce_add(total);
  if (16 * whole < columns) {
    alignas(64) int8_t tail[4 * Vector::QUAD_BYTES];
    Vector::store_quads(tail, Vector::QUAD_BYTES, grid(x.tail(16 * whole, columns - 16 * whole)));
    for (int64_t quad = 0; 16 * whole + 4 * quad < columns; ++quad) {  // padded weights are 0: the padding of q is arbitrary
      if (mine.end > whole) std::memcpy(place(whole) + quad * stride, tail + quad * Vector::QUAD_BYTES, Vector::QUAD_BYTES);
      for (int i = 0; i < 4; ++i) sum += tail[quad * Vector::QUAD_BYTES + i];
    }
  }
  return Vector::UNSIGNED ? -128 * sum : 0;
}

// Calls take(value range, row, grid of the row) for a row of `columns` floats, quantized as `given` says.
template <class Take>
inline void with_grid(const float* values, int64_t columns, InputGrid given, Take take) {
  if (given.multiplier != nullptr) {
    const ScaledRow row{values, given.multiplier};
    take(std::integral_constant<ValueRange, ValueRange::ASYMMETRIC>(), row, row_grid(row, columns));
  } else if (given.step == nullptr) {
    const PlainRow row{values};
    take(std::integral_constant<ValueRange, ValueRange::ASYMMETRIC>(), row, row_grid(row, columns));
  } else {
    take(std::integral_constant<ValueRange, ValueRange::UNBOUNDED>(), PlainRow{values}, static_grid(values, columns, *given.step));
  }
}

// Loads columns that share a step and returns it: NaN where a column is not finite.
template <int VECTORS>
inline float load_group(const float* x, Vector::Floats (&part)[VECTORS]) {
  Vector::Sums max_bits = Vector::broadcast(int32_t{0});
  for (int i = 0; i < VECTORS; ++i) {
    part[i] = Vector::load(x + 16 * i);
    max_bits = Vector::max(max_bits, Vector::abs_bits(part[i]));
  }
  const int32_t largest = Vector::reduce_max(max_bits);
  return largest < INFINITY_BITS ? at_least_normal(float_of(largest) / LEVELS) : NOT_A_NUMBER;
}

// Quantizes one row with a step for each 64 columns; `step` advances by `height` per group, `offset`, where it is not null,
// for each of its `SCALES` parts. Quads of a group are `stride` bytes apart.
template <int SCALES>
inline void quantize_groups(const float* x, int64_t groups, int64_t height, int64_t stride, int8_t* q, float* step,
                            int32_t* offset) {
  for (int64_t group = 0; group < groups; ++group, x += GROUP, q += 16 * height * Vector::QUAD_BYTES, step += height) {
    Vector::Floats part[4];
    *step = load_group(x, part);
    Vector::Sums total = Vector::broadcast(int32_t{0});
    const Grid<ValueRange::SYMMETRIC> grid(*step, 0);
    for (int i = 0; i < 4; ++i) {
      const Vector::Sums codes = grid(part[i]);
      total = SCALES > 1 ? codes : Vector::add(total, codes);
      Vector::store_quads(q + 4 * i * stride, stride, codes);
      if (offset == nullptr || (SCALES == 1 && i < 3)) continue;
      *offset = Vector::UNSIGNED ? -128 * Vector::reduce_add(total) : 0;
      offset += height;
    }
  }
}

}  // namespace
}  // namespace infer_native
