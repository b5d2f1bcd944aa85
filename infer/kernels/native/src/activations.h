// float rows to int8, laid out for the kernels. Included by each instruction set after its `Vector`.
//
// Rows are cut into tiles of nearly equal height; within a tile the quads (4 columns) of its rows lie next to each
// other: quad k of row r of a tile of h rows is at (k * h + r) * 4, so that a kernel reads one stream.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

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

// x / step to the last bit, by two Newton corrections (Markstein 1990) where no intermediate can leave the normal
// range; the hardware division costs several times as much.
struct Divider {
  Vector::Floats step, inverse, limit;
  bool fast;

  explicit Divider(float s)
      : step(Vector::broadcast(s)),
        inverse(Vector::broadcast(1 / s)),
        limit(Vector::broadcast(200 * s)),
        fast(s > 1e-20f && s < 1e20f) {}

  Vector::Floats operator()(Vector::Floats x) const {
    if (!fast) return Vector::div(x, step);
    x = Vector::clamp(x, limit);
    Vector::Floats q = Vector::mul(x, inverse);
    q = Vector::fma(Vector::fnma(q, step, x), inverse, q);
    return Vector::fma(Vector::fnma(q, step, x), inverse, q);
  }
};

inline Vector::Sums to_grid(Vector::Floats quotient) {
  return Vector::round(Vector::clamp(quotient, Vector::broadcast(LEVELS)));
}

// The last columns, fewer than 16, as a whole vector.
inline Vector::Floats load_tail(const float* x, int64_t count) {
  alignas(64) float padded[16] = {};
  std::memcpy(padded, x, count * sizeof(float));
  return Vector::load(padded);
}

inline int32_t abs_max_bits(const float* x, int64_t columns) {
  Vector::Sums most = Vector::broadcast(int32_t{0}), other = most;
  int64_t k = 0;
  for (; k + 32 <= columns; k += 32) {
    most = Vector::max(most, Vector::abs_bits(Vector::load(x + k)));
    other = Vector::max(other, Vector::abs_bits(Vector::load(x + k + 16)));
  }
  for (; k + 16 <= columns; k += 16) most = Vector::max(most, Vector::abs_bits(Vector::load(x + k)));
  if (k < columns) most = Vector::max(most, Vector::abs_bits(load_tail(x + k, columns - k)));
  return Vector::reduce_max(Vector::max(most, other));
}

inline float step_of(int32_t abs_max) {
  const float step = float_of(abs_max) / LEVELS;
  return step > std::numeric_limits<float>::min() ? step : std::numeric_limits<float>::min();
}

// One row. `offset` is what an accumulator starts with: -128 * sum(q) where weights are stored as code + 128.
inline void quantize_row(const float* x, int64_t columns, const float* x_scale, int64_t stride, int8_t* q, float* step,
                         int32_t* offset) {
  const int32_t abs_max = abs_max_bits(x, columns);
  const bool valid = x_scale != nullptr ? abs_max <= INFINITY_BITS : abs_max < INFINITY_BITS;
  *step = valid ? (x_scale != nullptr ? *x_scale : step_of(abs_max)) : NOT_A_NUMBER;
  const Divider divide(*step);
  Vector::Sums total = Vector::broadcast(int32_t{0});
  int64_t k = 0;
  for (; k + 16 <= columns; k += 16) {
    const Vector::Sums codes = to_grid(divide(Vector::load(x + k)));
    total = Vector::add(total, codes);
    Vector::store_quads(q + k / 4 * stride, stride, codes);
  }
  if (k < columns) {
    alignas(64) int8_t tail[16];
    const Vector::Sums codes = to_grid(divide(load_tail(x + k, columns - k)));
    total = Vector::add(total, codes);
    Vector::store_quads(tail, 4, codes);
    for (int64_t quad = 0; k + 4 * quad < columns; ++quad)
      std::memcpy(q + (k / 4 + quad) * stride, tail + quad * 4, 4);
  }
  *offset = Vector::UNSIGNED ? -128 * Vector::reduce_add(total) : 0;
}

// One row in groups of 64 columns, each with its own step; `step` and `offset` advance by `height` per group.
inline void quantize_groups(const float* x, int64_t groups, int64_t height, int8_t* q, float* step, int32_t* offset) {
  const int64_t stride = height * 4;
  for (int64_t group = 0; group < groups; ++group, x += GROUP, q += 16 * stride, step += height, offset += height) {
    Vector::Floats part[4];
    Vector::Sums most = Vector::broadcast(int32_t{0}), total = most;
    for (int i = 0; i < 4; ++i) {
      part[i] = Vector::load(x + 16 * i);
      most = Vector::max(most, Vector::abs_bits(part[i]));
    }
    const int32_t abs_max = Vector::reduce_max(most);
    *step = abs_max < INFINITY_BITS ? step_of(abs_max) : NOT_A_NUMBER;
    const Divider divide(*step);
    for (int i = 0; i < 4; ++i) {
      const Vector::Sums codes = to_grid(divide(part[i]));
      total = Vector::add(total, codes);
      Vector::store_quads(q + 4 * i * stride, stride, codes);
    }
    *offset = Vector::UNSIGNED ? -128 * Vector::reduce_add(total) : 0;
  }
}

}  // namespace
}  // namespace infer_native
