// Scales and minima of 16 rows, decoded to float for 256 columns at a time; see groupwise_weight.h.
#pragma once

#include "linear/groupwise_codes.h"
#include "linear/groupwise_weight.h"

namespace infer_native {
namespace {

constexpr int64_t GROUPWISE_STEP = SUPER_COLUMNS / GROUP;  // groups of 64 columns whose scales are decoded at once

// Scales and minima of 256 columns: `scale(i)` and `minimum(i)` of part i.
template <int PARTS>
struct FloatScales {
  alignas(64) float scales[GROUPWISE_STEP * PARTS][16], minima[GROUPWISE_STEP * PARTS][16];
  Vector::Floats scale(int64_t i) const { return Vector::load(scales[i]); }
  Vector::Floats minimum(int64_t i) const { return Vector::load(minima[i]); }
};

// What the numbers of 256 columns are multiplied by: super-scales, or else the value of one step of the codes, and 1.
struct ScaleFactors {
  Vector::Floats scale, minimum;
};

// Scales and minima that are bytes, converted where they are used. With AVX-512 one row of Q4_K is 1.25 times as fast in the cache
// and 1.2 times from memory; with AVX2 Q5_K and Q6_K are slower from memory (.7 and .85), Q4_K as fast.
struct ByteScales {
  ScaleFactors factors;
  alignas(64) uint8_t scales[GROUPWISE_STEP * 4 * 16], minima[GROUPWISE_STEP * 4 * 16];  // [part][16]
  Vector::Floats scale(int64_t i) const { return Vector::mul(at(scales + i * 16), factors.scale); }
  Vector::Floats minimum(int64_t i) const { return Vector::mul(at(minima + i * 16), factors.minimum); }
  static Vector::Floats at(const uint8_t* numbers) { return Vector::load_scale(reinterpret_cast<const int8_t*>(numbers)); }
};

// Returns float8 (e4m3) values divided by 2^8: its bits are those of a float16 whose exponent is 8 less.
inline Vector::Floats load_float8(const uint8_t* from) {
  uint16_t halves[16];
  for (int i = 0; i < 16; ++i) halves[i] = static_cast<uint16_t>((from[i] & 0x80) << 8 | (from[i] & 0x7f) << 7);
  return Vector::load_float16(halves);
}

template <ScaleType TYPE>
inline Vector::Floats load_numbers(const uint8_t* from) {
  if constexpr (TYPE == ScaleType::INT8) return Vector::load_scale(reinterpret_cast<const int8_t*>(from));
  if constexpr (TYPE == ScaleType::FLOAT32) return Vector::load(reinterpret_cast<const float*>(from));
  if constexpr (TYPE == ScaleType::FLOAT16) return Vector::load_float16(reinterpret_cast<const uint16_t*>(from));
  if constexpr (TYPE == ScaleType::FLOAT8) return Vector::mul(load_float8(from), Vector::broadcast(256.0f));
  uint16_t halves[16];
  std::memcpy(halves, from, sizeof halves);
  float values[16];
  for (int i = 0; i < 16; ++i) values[i] = float_of(static_cast<int32_t>(halves[i]) << 16);
  return Vector::load(values);
}

inline Vector::Floats load_supers(const uint8_t* from, const GroupwiseLayout& layout) {
  return layout.float16_supers ? load_numbers<ScaleType::FLOAT16>(from) : load_numbers<ScaleType::FLOAT32>(from);
}

// Returns the factors of the 256 columns from group `first` on.
inline ScaleFactors scale_factors(const uint8_t* record, const GroupwiseLayout& layout, int64_t first) {
  ScaleFactors factors{Vector::load(reinterpret_cast<const float*>(record)), Vector::broadcast(1.0f)};
  if (!layout.integers()) return factors;
  const int64_t chunk = first / GROUPWISE_STEP * layout.super_bytes();
  factors.scale = Vector::mul(factors.scale, load_supers(record + layout.super_scale + chunk, layout));
  if (layout.has_minimum) factors.minimum = load_supers(record + layout.super_minimum + chunk, layout);
  return factors;
}

// Unpacks integer scales and minima of up to GROUPWISE_STEP groups of a block, from group `first` on. Bytes are copied: where
// each is first read where it is used, one miss follows the other (Q6_K from memory .6 to .85 times as fast).
template <int PARTS>
inline void decode_scales(const uint8_t* record, const GroupwiseLayout& layout, int64_t first, int64_t count, ByteScales& to) {
  to.factors = scale_factors(record, layout, first);
  if (layout.type == ScaleType::INT8) {
    const uint8_t* at = record + layout.scale + first * PARTS * layout.stride;
    if (!layout.has_minimum) {
      for (int64_t i = 0; i < count; ++i) std::memcpy(to.scales + i * PARTS * 16, at + i * PARTS * 16, PARTS * 16);
      return;
    }
    for (int64_t i = 0; i < count * PARTS; ++i, at += layout.stride)
      std::memcpy(to.scales + i * 16, at, 16), std::memcpy(to.minima + i * 16, at + 16, 16);
    return;
  }
  const uint8_t* at = record + layout.scale + first / GROUPWISE_STEP * (PARTS == 2 ? 192 : 256);
  if constexpr (PARTS == 2) {
    const PlaneVectors<6> both(at);
    unroll<2>([&](auto v) {
      Vector::Quads low, high;
      both.template read<v>(low, high);
      Vector::store_quads(to.scales + v * 64, low), Vector::store_quads(to.minima + v * 64, high);
    });
  } else {
    for (int v = 0; v < 4; ++v) {
      const Vector::Quads both = Vector::load_quads(at + v * 64);
      Vector::store_quads(to.scales + v * 64, Vector::and_bits(both, 15));
      Vector::store_quads(to.minima + v * 64, Vector::and_bits(Vector::template shift_bits<-4>(both), 15));
    }
  }
}

// Decodes `count` parts; `scales` and `minima` point to the numbers of group `first`, `stride` bytes apart.
template <int PARTS, ScaleType TYPE>
inline void decode_numbers(const uint8_t* scales, const uint8_t* minima, int64_t stride, const GroupwiseLayout& layout, const ScaleFactors& factors,
                           int64_t first, int64_t count, FloatScales<PARTS>& to) {
  // Several parts have a number each; a group of more than 64 columns has one number for `shared` groups of 64.
  const int64_t shared = PARTS > 1 ? 1 : layout.group / GROUP;
  int64_t number = 0, left = shared == 1 ? 1 : shared - first % shared;
  for (int64_t i = 0; i < count; ++i) {
    const Vector::Floats step = load_numbers<TYPE>(scales + number * stride);
    Vector::store(to.scales[i], Vector::mul(step, factors.scale));
    if (layout.has_minimum && TYPE != ScaleType::INT8 && layout.minimum_steps)
      Vector::store(to.minima[i], Vector::mul(load_numbers<ScaleType::INT8>(minima + number * stride), step));
    else if (layout.has_minimum)
      Vector::store(to.minima[i], Vector::mul(load_numbers<TYPE>(minima + number * stride), factors.minimum));
    if (--left == 0) ++number, left = shared;
  }
}

template <int PARTS, ScaleType TYPE>
inline void decode_scales_of(const uint8_t* record, const GroupwiseLayout& layout, int64_t first, int64_t count, FloatScales<PARTS>& to) {
  const int64_t number = PARTS > 1 ? first * PARTS : first / (layout.group / GROUP);
  const uint8_t* const at = record + layout.scale + number * layout.stride;
  decode_numbers<PARTS, TYPE>(at, at + 16 * layout.number_bytes(), layout.stride, layout,
                              scale_factors(record, layout, first), first, count * PARTS, to);
}

// Decodes those of any type to float.
template <int PARTS>
inline void decode_scales(const uint8_t* record, const GroupwiseLayout& layout, int64_t first, int64_t count, FloatScales<PARTS>& to) {
  if constexpr (PARTS > 1)
    if (layout.integers()) {
      ByteScales bytes;
      decode_scales<PARTS>(record, layout, first, count, bytes);
      return decode_numbers<PARTS, ScaleType::INT8>(bytes.scales, bytes.minima, 16, layout, bytes.factors, first, count * PARTS, to);
    }
  switch (layout.type) {
    case ScaleType::INT8: return decode_scales_of<PARTS, ScaleType::INT8>(record, layout, first, count, to);
    case ScaleType::FLOAT32: return decode_scales_of<PARTS, ScaleType::FLOAT32>(record, layout, first, count, to);
    case ScaleType::FLOAT16: return decode_scales_of<PARTS, ScaleType::FLOAT16>(record, layout, first, count, to);
    case ScaleType::FLOAT8: return decode_scales_of<PARTS, ScaleType::FLOAT8>(record, layout, first, count, to);
    default: return decode_scales_of<PARTS, ScaleType::BFLOAT16>(record, layout, first, count, to);
  }
}

}  // namespace
}  // namespace infer_native
