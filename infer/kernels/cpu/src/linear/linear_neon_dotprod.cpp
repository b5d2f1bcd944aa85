// Linear layers with the dot-product instructions of ARM: 16 rows are four registers.
#include <arm_neon.h>

#include "isa.h"

namespace infer_native {
namespace {

struct Vector {
  struct Floats {
    float32x4_t lane[4];
  };
  struct Sums {
    int32x4_t lane[4];
  };
  struct Quads {
    int8x16_t lane[4];
  };
  using Table = int8x16_t;
  static constexpr bool UNSIGNED = false, PANELS = true;
  static constexpr int QUAD_BYTES = 4, TILE_ROWS = 5, TILE_BLOCKS = 1, STREAM_ROWS = 5, STREAM_TILE_ROWS = 5, DOT_CHAINS = 2, FLOAT_CHAINS = 2, PREFETCH = 1024;
  static constexpr bool BYTE_SCALES = false;  // of groupwise weights: converted where they are used, for few rows
  static constexpr int DIRECT_ROWS = 4, DIRECT_TILE_ROWS = 4, DIRECT_BLOCKS = 2;
  static constexpr int direct_blocks(int rows) { return rows <= 2 ? DIRECT_BLOCKS : 1; }

  template <class T, class F>
  static T each(F function) {
    T v;
    for (int i = 0; i < 4; ++i) v.lane[i] = function(i);
    return v;
  }
  static Floats load(const float* p) {
    return each<Floats>([&](int i) { return vld1q_f32(p + 4 * i); });
  }
  static void store(float* p, Floats v) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v.lane[i]);
  }
  static Floats broadcast(float v) {
    return each<Floats>([&](int) { return vdupq_n_f32(v); });
  }
  static Floats add(Floats a, Floats b) {
    return each<Floats>([&](int i) { return vaddq_f32(a.lane[i], b.lane[i]); });
  }
  static Floats mul(Floats a, Floats b) {
    return each<Floats>([&](int i) { return vmulq_f32(a.lane[i], b.lane[i]); });
  }
  static Floats div(Floats a, Floats b) {
    return each<Floats>([&](int i) { return vdivq_f32(a.lane[i], b.lane[i]); });
  }
  static Floats fma(Floats a, Floats b, Floats c) {
    return each<Floats>([&](int i) { return vfmaq_f32(c.lane[i], a.lane[i], b.lane[i]); });
  }
  static Floats fnma(Floats a, Floats b, Floats c) {
    return each<Floats>([&](int i) { return vfmsq_f32(c.lane[i], a.lane[i], b.lane[i]); });
  }
  static Floats negate(Floats v) {
    return each<Floats>([&](int i) { return vnegq_f32(v.lane[i]); });
  }
  static Floats min(Floats a, Floats b) {
    return each<Floats>([&](int i) { return vminq_f32(a.lane[i], b.lane[i]); });
  }
  static Floats max(Floats a, Floats b) {
    return each<Floats>([&](int i) { return vmaxq_f32(a.lane[i], b.lane[i]); });
  }
  static Floats clamp(Floats v, Floats low, Floats high) { return max(min(v, high), low); }
  static Floats to_float(Sums v) {
    return each<Floats>([&](int i) { return vcvtq_f32_s32(v.lane[i]); });
  }
  static Floats load_scale(const int8_t* p) {
    const int8x16_t codes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_s8(vget_high_s8(codes));
    return to_float({{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
                      vmovl_s16(vget_high_s16(high))}});
  }
  static Floats load_float16(const uint16_t* p) {
    return each<Floats>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
  }

  static Sums broadcast(int32_t v) {
    return each<Sums>([&](int) { return vdupq_n_s32(v); });
  }
  static Sums load_sums(const int32_t* p) {
    return each<Sums>([&](int i) { return vld1q_s32(p + 4 * i); });
  }
  static void store_sums(int32_t* p, Sums v) {
    for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, v.lane[i]);
  }
  static Sums add(Sums a, Sums b) {
    return each<Sums>([&](int i) { return vaddq_s32(a.lane[i], b.lane[i]); });
  }
  static Sums sub_product(Sums a, Sums b, Sums c) {
    return each<Sums>([&](int i) { return vmlsq_s32(a.lane[i], b.lane[i], c.lane[i]); });
  }
  static Sums max(Sums a, Sums b) {
    return each<Sums>([&](int i) { return vmaxq_s32(a.lane[i], b.lane[i]); });
  }
  static Sums abs_bits(Floats v) {
    return each<Sums>([&](int i) { return vreinterpretq_s32_f32(vabsq_f32(v.lane[i])); });
  }
  static Sums round(Floats v) {
    return each<Sums>([&](int i) { return vcvtnq_s32_f32(v.lane[i]); });
  }
  // Returns 2 to the power of each integer, -126..127.
  static Floats pow2(Sums v) {
    return each<Floats>([&](int i) {
      return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(v.lane[i], vdupq_n_s32(127)), 23));
    });
  }
  static int32_t reduce_max(Sums v) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(v.lane[0], v.lane[1]), vmaxq_s32(v.lane[2], v.lane[3])));
  }
  static int32_t reduce_add(Sums v) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(v.lane[0], v.lane[1]), vaddq_s32(v.lane[2], v.lane[3])));
  }
  static void store_quads(int8_t* q, int64_t stride, Sums v) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(v.lane[0]), vqmovn_s32(v.lane[1]));
    const int16x8_t high = vcombine_s16(vqmovn_s32(v.lane[2]), vqmovn_s32(v.lane[3]));
    int8_t codes[16];
    vst1q_s8(codes, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
    for (int i = 0; i < 4; ++i) __builtin_memcpy(q + i * stride, codes + 4 * i, 4);
  }

  static Quads load_quads(const void* p) {
    return each<Quads>([&](int i) { return vld1q_s8(static_cast<const int8_t*>(p) + 16 * i); });
  }
  static void store_quads(void* p, Quads v) {
    for (int i = 0; i < 4; ++i) vst1q_s8(static_cast<int8_t*>(p) + 16 * i, v.lane[i]);
  }
  static Sums dot(Sums sum, Quads weights, const int8_t* quad) {
    int32_t four;
    __builtin_memcpy(&four, quad, 4);
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
    return each<Sums>([&](int i) { return vdotq_s32(sum.lane[i], weights.lane[i], x); });
  }
  static Sums dot_from_memory(Sums sum, Quads weights, const int8_t* quad) { return dot(sum, weights, quad); }
  // Dot product with weights in 0..127.
  static Sums dot_nonnegative(Sums sum, Quads weights, const int8_t* quad) { return dot(sum, weights, quad); }
  // The same with weights in 0..15.
  static constexpr bool SHORT_NIBBLES = false;
  static Sums dot_nibbles(Sums sum, Quads weights, const int8_t* quad) { return dot(sum, weights, quad); }
  static Sums widen(Sums v) { return v; }
  // Shifts each byte to higher (SHIFT > 0) or lower bits.
  template <int SHIFT>
  static Quads shift_bits(Quads v) {
    return each<Quads>([&](int i) {
      const uint8x16_t bytes = vreinterpretq_u8_s8(v.lane[i]);
      if constexpr (SHIFT > 0) return vreinterpretq_s8_u8(vshlq_n_u8(bytes, SHIFT));
      if constexpr (SHIFT < 0) return vreinterpretq_s8_u8(vshrq_n_u8(bytes, -SHIFT));
      return v.lane[i];
    });
  }
  static Quads and_bits(Quads v, int bits) {
    return each<Quads>([&](int i) { return vandq_s8(v.lane[i], vdupq_n_s8(static_cast<int8_t>(bits))); });
  }
  // (a & bits) | b
  static Quads join_bits(Quads a, int bits, Quads b) {
    return each<Quads>([&](int i) { return vorrq_s8(vandq_s8(a.lane[i], vdupq_n_s8(static_cast<int8_t>(bits))), b.lane[i]); });
  }
  static Quads add_bits(Quads a, int bits, Quads b) { return join_bits(a, bits, b); }
  static Table load_table(const int8_t* p) { return vld1q_s8(p); }
  // Returns the entries of indices below 16.
  static Quads lookup(Table table, Quads index) {
    return each<Quads>([&](int i) { return vqtbl1q_s8(table, vreinterpretq_u8_s8(index.lane[i])); });
  }
  static void decode(const uint8_t* p, Table table, Quads& low, Quads& high) {
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t codes = vld1q_u8(p + 16 * i);
      low.lane[i] = vqtbl1q_s8(table, vandq_u8(codes, vdupq_n_u8(15)));
      high.lane[i] = vqtbl1q_s8(table, vshrq_n_u8(codes, 4));
    }
  }
  // Widens the four columns of a quad to 16 floats each.
  static void widen_columns(const int8_t* p, Floats (&column)[4]) {
    const Sums codes = load_sums_of_bytes(p);
    column[0] = to_float(each<Sums>([&](int i) { return vshrq_n_s32(vshlq_n_s32(codes.lane[i], 24), 24); }));
    column[1] = to_float(each<Sums>([&](int i) { return vshrq_n_s32(vshlq_n_s32(codes.lane[i], 16), 24); }));
    column[2] = to_float(each<Sums>([&](int i) { return vshrq_n_s32(vshlq_n_s32(codes.lane[i], 8), 24); }));
    column[3] = to_float(each<Sums>([&](int i) { return vshrq_n_s32(codes.lane[i], 24); }));
  }

 private:
  static Sums load_sums_of_bytes(const int8_t* p) {
    return each<Sums>([&](int i) { return vreinterpretq_s32_s8(vld1q_s8(p + 16 * i)); });
  }
};

}  // namespace
}  // namespace infer_native

#include "linear/linear_groupwise.h"
#include "linear/linear_int8.h"
#include "linear/linear_lut4.h"
#include "linear/linear_w8a32.h"
#include "row_ops.h"

namespace infer_native {
const Isa NEON_DOTPROD = {"neon_dotprod", Vector::UNSIGNED, run_lut4, run_int8, run_int8_weight,
    run_groupwise, STAGED_LUT4, STAGED_LUT4_FINE, STAGED_INT8, STAGED_INT8_WEIGHT, STAGED_GROUPWISE, ROWS};
}
