// Linear layers in plain C++: the reference of every other instruction set, and the fallback of CPUs without one.
#include <cmath>

#include "isa.h"

namespace infer_native {
namespace {

struct Vector {
  struct Floats {
    float lane[16];
  };
  struct Sums {
    int32_t lane[16];
  };
  struct Quads {
    int8_t byte[64];
  };
  struct Table {
    int8_t entry[16];
  };
  static constexpr bool UNSIGNED = false, PANELS = true;
  static constexpr int QUAD_BYTES = 4, TILE_ROWS = 2, TILE_BLOCKS = 1, STREAM_ROWS = 2, STREAM_TILE_ROWS = 2, DOT_CHAINS = 1, FLOAT_CHAINS = 1, PREFETCH = 256;
  static constexpr bool BYTE_SCALES = false;  // of groupwise weights: converted where they are used, for few rows
  static constexpr int DIRECT_ROWS = 1, DIRECT_TILE_ROWS = 1, DIRECT_BLOCKS = 1;
  static constexpr int direct_blocks(int) { return DIRECT_BLOCKS; }

  template <class T, class F>
  static T each(F function) {
    T v;
    for (int i = 0; i < 16; ++i) v.lane[i] = function(i);
    return v;
  }
  static Floats load(const float* p) {
    return each<Floats>([&](int i) { return p[i]; });
  }
  static void store(float* p, Floats v) { __builtin_memcpy(p, v.lane, sizeof v.lane); }
  static Floats broadcast(float v) {
    return each<Floats>([&](int) { return v; });
  }
  static Floats add(Floats a, Floats b) {
    return each<Floats>([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Floats mul(Floats a, Floats b) {
    return each<Floats>([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static Floats div(Floats a, Floats b) {
    return each<Floats>([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  static Floats fma(Floats a, Floats b, Floats c) {
    return each<Floats>([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
  }
  static Floats fnma(Floats a, Floats b, Floats c) {
    return each<Floats>([&](int i) { return std::fma(-a.lane[i], b.lane[i], c.lane[i]); });
  }
  static Floats negate(Floats v) {
    return each<Floats>([&](int i) { return -v.lane[i]; });
  }
  static Floats min(Floats a, Floats b) {
    return each<Floats>([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static Floats max(Floats a, Floats b) {
    return each<Floats>([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static Floats clamp(Floats v, Floats low, Floats high) { return max(min(v, high), low); }
  static Floats to_float(Sums v) {
    return each<Floats>([&](int i) { return static_cast<float>(v.lane[i]); });
  }
  static Floats load_scale(const int8_t* p) {
    return each<Floats>([&](int i) { return static_cast<float>(p[i]); });
  }
  static Floats load_float16(const uint16_t* p) {  // the sign as a factor, without a branch, so that compilers vectorize
    return each<Floats>([&](int i) {
      const float sign = float_of_bits((p[i] & 0x8000) << 16 | 0x3f800000);
      const float value = float_of_bits((p[i] & 0x7fff) << 13) * 0x1p112f;
      const bool finite = (p[i] & 0x7c00) != 0x7c00;
      return (finite ? value : float_of_bits((p[i] & 0x3ff) << 13 | 0x7f800000)) * sign;
    });
  }
  static float float_of_bits(int32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  }

  static Sums broadcast(int32_t v) {
    return each<Sums>([&](int) { return v; });
  }
  static Sums load_sums(const int32_t* p) {
    return each<Sums>([&](int i) { return p[i]; });
  }
  static void store_sums(int32_t* p, Sums v) { __builtin_memcpy(p, v.lane, sizeof v.lane); }
  static Sums add(Sums a, Sums b) {
    return each<Sums>([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Sums sub_product(Sums a, Sums b, Sums c) {
    return each<Sums>([&](int i) { return a.lane[i] - b.lane[i] * c.lane[i]; });
  }
  static Sums max(Sums a, Sums b) {
    return each<Sums>([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static Sums abs_bits(Floats v) {
    Sums bits;
    __builtin_memcpy(bits.lane, v.lane, sizeof bits.lane);
    return each<Sums>([&](int i) { return bits.lane[i] & 0x7fffffff; });
  }
  static Sums round(Floats v) {
    return each<Sums>([&](int i) { return std::isnan(v.lane[i]) ? 0 : static_cast<int32_t>(std::nearbyint(v.lane[i])); });
  }
  // Returns 2 to the power of each integer, -126..127.
  static Floats pow2(Sums v) {
    return each<Floats>([&](int i) {
      const int32_t bits = (v.lane[i] + 127) << 23;
      float power;
      __builtin_memcpy(&power, &bits, sizeof power);
      return power;
    });
  }
  static int32_t reduce_max(Sums v) {
    int32_t most = v.lane[0];
    for (int i = 1; i < 16; ++i) most = v.lane[i] > most ? v.lane[i] : most;
    return most;
  }
  static int32_t reduce_add(Sums v) {
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) total += v.lane[i];
    return total;
  }
  static void store_quads(int8_t* q, int64_t stride, Sums v) {
    for (int i = 0; i < 16; ++i) q[i / 4 * stride + i % 4] = static_cast<int8_t>(v.lane[i]);
  }

  static Quads load_quads(const void* p) {
    Quads v;
    __builtin_memcpy(v.byte, p, sizeof v.byte);
    return v;
  }
  static void store_quads(void* p, Quads v) { __builtin_memcpy(p, v.byte, sizeof v.byte); }
  static Sums dot(Sums sum, Quads weights, const int8_t* quad) {
    return each<Sums>([&](int i) {
      const int8_t* w = weights.byte + 4 * i;
      return sum.lane[i] + w[0] * quad[0] + w[1] * quad[1] + w[2] * quad[2] + w[3] * quad[3];
    });
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
    for (int8_t& byte : v.byte) {
      const unsigned bits = static_cast<uint8_t>(byte);
      byte = static_cast<int8_t>(SHIFT > 0 ? bits << (SHIFT > 0 ? SHIFT : 0) : bits >> (SHIFT < 0 ? -SHIFT : 0));
    }
    return v;
  }
  static Quads and_bits(Quads v, int bits) {
    for (int8_t& byte : v.byte) byte = static_cast<int8_t>(byte & bits);
    return v;
  }
  // (a & bits) | b
  static Quads join_bits(Quads a, int bits, Quads b) {
    for (int i = 0; i < 64; ++i) a.byte[i] = static_cast<int8_t>((a.byte[i] & bits) | b.byte[i]);
    return a;
  }
  static Quads add_bits(Quads a, int bits, Quads b) { return join_bits(a, bits, b); }
  static Table load_table(const int8_t* p) {
    Table table;
    __builtin_memcpy(table.entry, p, sizeof table.entry);
    return table;
  }
  // Returns the entries of indices below 16.
  static Quads lookup(Table table, Quads index) {
    for (int8_t& byte : index.byte) byte = table.entry[byte];
    return index;
  }
  static void decode(const uint8_t* p, Table table, Quads& low, Quads& high) {
    for (int i = 0; i < 64; ++i) {
      low.byte[i] = table.entry[p[i] & 15];
      high.byte[i] = table.entry[p[i] >> 4];
    }
  }
  // Widens the four columns of a quad to 16 floats each.
  static void widen_columns(const int8_t* p, Floats (&column)[4]) {
    for (int i = 0; i < 4; ++i) column[i] = each<Floats>([&](int row) { return static_cast<float>(p[4 * row + i]); });
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
const Isa SCALAR = {"scalar", Vector::UNSIGNED, run_lut4, run_int8, run_int8_weight,
    run_groupwise, STAGED_LUT4, STAGED_LUT4_FINE, STAGED_INT8, STAGED_INT8_WEIGHT, STAGED_GROUPWISE, ROWS};
}
