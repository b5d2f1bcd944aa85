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

// low_of(j, quads) of columns 4j.. and high_of(j, quads) of columns 4j + 32.., for the vectors of a group from BEGIN to END.
template <int BITS, int BEGIN, int END, class Low, class High>
inline __attribute__((always_inline)) void each_vector(const uint8_t* codes, Vector::Table table, Low low_of, High high_of) {
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
        low_of(first + v, low), high_of(first + v, high);
      });
    }
  } else {
    // Bytes in the order in which they lie: two streams 512 bytes apart come from memory at half of the speed.
    constexpr int RUNS = BITS == 8 ? 2 : 1;
    unroll<RUNS>([&](auto run) {
#pragma GCC unroll 1
      for (int j = BEGIN; j < END; ++j) {
        const uint8_t* place = codes + (j + 8 * run) * 64;
        __builtin_prefetch(place + Vector::PREFETCH);
        if constexpr (BITS == 4) {
          Vector::decode(place, table, low, high);
          low_of(j, low), high_of(j, high);
        } else if constexpr (run == 0) {
          low_of(j, Vector::load_quads(place));
        } else {
          high_of(j, Vector::load_quads(place));
        }
      }
    });
  }
}

}  // namespace
}  // namespace infer_native
