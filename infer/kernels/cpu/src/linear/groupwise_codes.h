// Codes of 64 columns of 16 rows as vectors of quads, decoded in registers; see groupwise_weight.h.
#pragma once

#include "linear/parallel_linear.h"

namespace infer_native {
namespace {

// Of planes of 5 or 6 bits: VECTORS vectors of low nibbles behind the vector of their high bits.
template <int BITS>
struct PlaneVectors {
  static constexpr int HIGH = BITS - 4, VECTORS = 4 / HIGH, BYTES = (1 + VECTORS) * 64;
  static constexpr int MASK = ((1 << HIGH) - 1) << 4;
  const uint8_t* codes;
  Vector::Quads high_bits;

  explicit PlaneVectors(const uint8_t* from) : codes(from), high_bits(Vector::load_quads(from)) {}

  // Vector V: the integers of columns 4j.. and 4j + 32.. .
  template <int V>
  inline __attribute__((always_inline)) void read(Vector::Quads& low, Vector::Quads& high) const {
    const Vector::Quads nibbles = Vector::load_quads(codes + 64 + V * 64);
    const Vector::Quads low_bits = Vector::template shifted<4 - 2 * V * HIGH>(high_bits);
    const Vector::Quads top_bits = Vector::template shifted<4 - (2 * V + 1) * HIGH>(high_bits);
    low = Vector::either(Vector::masked(nibbles, 15), Vector::masked(low_bits, MASK));
    high = Vector::either(Vector::masked(Vector::template shifted<-4>(nibbles), 15), Vector::masked(top_bits, MASK));
  }
};

template <int BITS>
constexpr bool PLANES = BITS == 5 || BITS == 6;

// function(j, low, high) for the vectors of a group from BEGIN to END: columns 4j.. in `low`, 4j + 32.. in `high`.
template <int BITS, int BEGIN, int END, class Function>
inline __attribute__((always_inline)) void each_vector(const uint8_t* codes, Vector::Table table, Function function) {
  Vector::Quads low, high;
  if constexpr (PLANES<BITS>) {
    using Planes = PlaneVectors<BITS>;
#pragma GCC unroll 1
    for (int first = BEGIN; first < END; first += Planes::VECTORS) {
      const uint8_t* place = codes + first / Planes::VECTORS * Planes::BYTES;
      for (int line = 0; line < Planes::BYTES; line += 64) __builtin_prefetch(place + line + Vector::PREFETCH);
      const Planes planes(place);
      unroll<Planes::VECTORS>([&](auto v) {
        planes.template read<v>(low, high);
        function(first + v, low, high);
      });
    }
  } else {
#pragma GCC unroll 1
    for (int j = BEGIN; j < END; ++j) {
      __builtin_prefetch(codes + j * 64 + Vector::PREFETCH);
      if constexpr (BITS == 8) {
        __builtin_prefetch(codes + (j + 8) * 64 + Vector::PREFETCH);
        low = Vector::load_quads(codes + j * 64), high = Vector::load_quads(codes + (j + 8) * 64);
      } else {
        Vector::decode(codes + j * 64, table, low, high);
      }
      function(j, low, high);
    }
  }
}

}  // namespace
}  // namespace infer_native
