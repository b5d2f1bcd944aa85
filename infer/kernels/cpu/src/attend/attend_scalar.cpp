// Any CPU: four numbers at a time, as the compiler sees fit, with one rounding more where there is no fused product.
#include <cstring>

#include "attend/attend_kernel.h"

namespace infer_native {
namespace {

struct Lane {
  static constexpr int COUNT = 4, ROWS = 3, GROUPS = 1, SUMS = 8, TILE_ROWS = 3, TILE_VECTORS = 4;
  typedef float Four __attribute__((vector_size(16)));

  static Four fma(Four a, Four b, Four c) { return a * b + c; }
  static Four max(Four a, Four b) { return a > b ? a : b; }
  static Four load_half(const void* p) {
    uint16_t halves[4];
    std::memcpy(halves, p, sizeof halves);
    return Four{half_to_float(halves[0]), half_to_float(halves[1]), half_to_float(halves[2]), half_to_float(halves[3])};
  }
  static Four load_bytes(const void* p) {
    int8_t codes[4];
    std::memcpy(codes, p, sizeof codes);
    return Four{float(codes[0]), float(codes[1]), float(codes[2]), float(codes[3])};
  }
  static Four load_bfloat(const void* p) {
    uint16_t halves[4];
    std::memcpy(halves, p, sizeof halves);
    const uint32_t bits[4] = {uint32_t(halves[0]) << 16, uint32_t(halves[1]) << 16, uint32_t(halves[2]) << 16,
                              uint32_t(halves[3]) << 16};
    Four v;
    std::memcpy(&v, bits, sizeof v);
    return v;
  }
  static void store_half(void* p, Four v) {
    const uint16_t halves[4] = {float_to_half(v[0]), float_to_half(v[1]), float_to_half(v[2]), float_to_half(v[3])};
    std::memcpy(p, halves, sizeof halves);
  }
  typedef int32_t Whole __attribute__((vector_size(16)));
  static Whole load_pairs(const void* p) {
    int8_t codes[8];
    std::memcpy(codes, p, sizeof codes);
    int16_t wide[8];
    for (int i = 0; i < 8; ++i) wide[i] = codes[i];
    Whole v;
    std::memcpy(&v, wide, sizeof v);
    return v;
  }
  static Whole dot_pairs(Whole sum, Whole a, int32_t pair) {
    int16_t codes[8], factors[2];
    std::memcpy(codes, &a, sizeof codes);
    std::memcpy(factors, &pair, sizeof factors);
    for (int i = 0; i < 4; ++i) sum[i] += codes[2 * i] * factors[0] + codes[2 * i + 1] * factors[1];
    return sum;
  }
  static float reduce_max(Four v) {
    const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
  }
  // IEEE 754 binary16, halves to even; too large becomes infinite.
  static uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (size >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
    if (size < 0x38800000) {  // below 2^-14: adding 0.5 puts multiples of 2^-24 into the low bits
      float small;
      std::memcpy(&small, &size, 4);
      small += 0.5f;
      std::memcpy(&bits, &small, 4);
      return static_cast<uint16_t>(sign | (bits - 0x3f000000));
    }
    return static_cast<uint16_t>(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
  }
  static float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, size = static_cast<uint32_t>(half & 0x7fff) << 13;
    float value;
    if (size >= 0x0f800000) {  // infinite or NaN
      const uint32_t bits = size | 0x70000000;
      std::memcpy(&value, &bits, 4);
    } else {
      std::memcpy(&value, &size, 4);
      value *= 5.192296858534828e33f;  // 2^112
    }
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

}  // namespace
}  // namespace infer_native

#include "attend/attend_decode.h"
#include "attend/attend_encoder_tile.h"
#include "attend/attend_tile.h"
#include "attend/attend_write.h"

namespace infer_native {
const AttendKernel ATTEND_SCALAR = {decodes, write_cache, decode, merge, attend_tile, 16 * Lane::TILE_ROWS, attend_all_tile};
}
