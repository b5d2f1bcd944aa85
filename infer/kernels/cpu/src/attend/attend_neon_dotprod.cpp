// ARM: 16 tokens are four registers.
#include <arm_neon.h>

#include <cstring>

#include "attend/attend_kernel.h"

namespace infer_native {
namespace {

struct Lane {
  static constexpr int COUNT = 4, ROWS = 5, GROUPS = 1, SUMS = 20, TILE_ROWS = 5, TILE_VECTORS = 4;

  static float32x4_t fma(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
  static float32x4_t max(float32x4_t a, float32x4_t b) { return vmaxq_f32(a, b); }
  static float32x4_t load_half(const void* p) {
    float16x4_t halves;
    std::memcpy(&halves, p, sizeof halves);
    return vcvt_f32_f16(halves);
  }
  static float32x4_t load_bytes(const void* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(static_cast<uint32_t>(four))))));
  }
  static float32x4_t load_bfloat(const void* p) {
    uint16x4_t halves;
    std::memcpy(&halves, p, sizeof halves);
    return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
  }
  static void store_half(void* p, float32x4_t v) {
    const float16x4_t halves = vcvt_f16_f32(v);
    std::memcpy(p, &halves, sizeof halves);
  }
  static int32x4_t load_pairs(const void* p) {
    return vreinterpretq_s32_s16(vmovl_s8(vld1_s8(static_cast<const int8_t*>(p))));
  }
  static int32x4_t dot_pairs(int32x4_t sum, int32x4_t a, int32_t pair) {
    const int16x8_t codes = vreinterpretq_s16_s32(a), factors = vreinterpretq_s16_s32(vdupq_n_s32(pair));
    const int32x4_t low = vmull_s16(vget_low_s16(codes), vget_low_s16(factors));
    return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(codes, factors)));
  }
  static float reduce_max(float32x4_t v) { return vmaxvq_f32(v); }
  static uint16_t float_to_half(float value) {
    const __fp16 half = static_cast<__fp16>(value);
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
  }
  static float half_to_float(uint16_t bits) {
    __fp16 half;
    std::memcpy(&half, &bits, sizeof half);
    return half;
  }
};

}  // namespace
}  // namespace infer_native

#include "attend/attend_decode.h"
#include "attend/attend_encoder_tile.h"
#include "attend/attend_tile.h"
#include "attend/attend_write.h"

namespace infer_native {
const AttendKernel ATTEND_NEON_DOTPROD = {decodes, write_cache, decode, merge, attend_tile, 18 * Lane::TILE_ROWS, attend_all_tile};
}
