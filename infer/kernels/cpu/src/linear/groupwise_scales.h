// Scales and minima of 16 rows, decoded to float for 256 columns at a time; see groupwise_weight.h.
#pragma once

#include "linear/groupwise_codes.h"
#include "linear/groupwise_weight.h"

namespace infer_native {
namespace {

constexpr int64_t GROUPWISE_STEP = SUPER_COLUMNS / GROUP;  // groups of 64 columns whose scales are decoded at once

struct GroupwiseScales {
  alignas(64) float scale[GROUPWISE_STEP * 4][16], minimum[GROUPWISE_STEP * 4][16];
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

// Decodes scales and minima of up to GROUPWISE_STEP groups of a block, from group `first` on, one for each part; `scales`
// and `minima` point to the numbers of group `first`.
template <int PARTS, ScaleType TYPE>
inline void decode_numbers(const uint8_t* record, const uint8_t* scales, const uint8_t* minima, const GroupwiseLayout& layout,
                           int64_t first, int64_t count, GroupwiseScales& to) {
  constexpr int64_t BYTES = TYPE == ScaleType::FLOAT32 ? 64 : TYPE == ScaleType::INT8 || TYPE == ScaleType::FLOAT8 ? 16 : 32;
  Vector::Floats scale_factor = Vector::load(reinterpret_cast<const float*>(record));
  Vector::Floats minimum_factor = Vector::broadcast(1.0f);
  if constexpr (TYPE == ScaleType::INT8) {
    const int64_t chunk = first / GROUPWISE_STEP * layout.super_bytes();
    scale_factor = Vector::mul(scale_factor, load_supers(record + layout.super_scale + chunk, layout));
    if (layout.has_minimum) minimum_factor = load_supers(record + layout.super_minimum + chunk, layout);
  }
  // Several parts have a number each; a group of more than 64 columns has one number for `shared` groups of 64.
  const int64_t shared = PARTS > 1 ? 1 : layout.group / GROUP;
  int64_t number = 0, left = shared == 1 ? 1 : shared - first % shared;
  for (int64_t i = 0; i < count * PARTS; ++i) {
    const Vector::Floats step = load_numbers<TYPE>(scales + number * BYTES);
    Vector::store(to.scale[i], Vector::mul(step, scale_factor));
    if (layout.has_minimum && TYPE != ScaleType::INT8 && layout.minimum_steps)
      Vector::store(to.minimum[i], Vector::mul(load_numbers<ScaleType::INT8>(minima + number * 16), step));
    else if (layout.has_minimum)
      Vector::store(to.minimum[i], Vector::mul(load_numbers<TYPE>(minima + number * BYTES), minimum_factor));
    if (--left == 0) ++number, left = shared;
  }
}

template <int PARTS, ScaleType TYPE>
inline void decode_scales_of(const uint8_t* record, const GroupwiseLayout& layout, int64_t first, int64_t count,
                             GroupwiseScales& to) {
  const int64_t number = PARTS > 1 ? first * PARTS : first / (layout.group / GROUP), each = 16 * layout.number_bytes();
  const int64_t minimum_each = layout.minimum_steps ? 16 : each;
  decode_numbers<PARTS, TYPE>(record, record + layout.scale + number * each, record + layout.minimum + number * minimum_each,
                              layout, first, count, to);
}

// Decodes 4-bit (groups of 16) or 6-bit (groups of 32) scales and minima of 256 columns.
template <int PARTS>
inline void decode_packed_scales(const uint8_t* record, const GroupwiseLayout& layout, int64_t first, int64_t count,
                                 GroupwiseScales& to) {
  alignas(64) uint8_t scales[16 * 16], minima[16 * 16];
  const uint8_t* at = record + layout.scale + first / GROUPWISE_STEP * (PARTS == 2 ? 192 : 256);
  if constexpr (PARTS == 2) {
    PlaneVectors<6> both(at);
    unroll<2>([&](auto v) {
      Vector::Quads low, high;
      both.template read<v>(low, high);
      Vector::store_quads(scales + v * 64, low), Vector::store_quads(minima + v * 64, high);
    });
  } else {
    for (int v = 0; v < 4; ++v) {
      const Vector::Quads both = Vector::load_quads(at + v * 64);
      Vector::store_quads(scales + v * 64, Vector::and_bits(both, 15));
      Vector::store_quads(minima + v * 64, Vector::and_bits(Vector::template shift_bits<-4>(both), 15));
    }
  }
  decode_numbers<PARTS, ScaleType::INT8>(record, scales, minima, layout, first, count, to);
}

template <int PARTS>
inline void decode_scales(const uint8_t* record, const GroupwiseLayout& layout, int64_t first, int64_t count,
                          GroupwiseScales& to) {
  if constexpr (PARTS > 1)
    if (layout.type >= ScaleType::INT6) return decode_packed_scales<PARTS>(record, layout, first, count, to);
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
