// Decoding of the codes of 64 columns of 16 rows into vectors of quads, in registers; see groupwise_weight.h.
#pragma once

#include "linear/parallel_linear.h"

namespace infer_native {
namespace {

// Kinds of codes: 4-bit indices into a table, unsigned integers of 4 to 6 bits, and int8.
constexpr int LOOKUP = 0;
template <int CODES>
constexpr int CODE_BITS = CODES == LOOKUP ? 4 : CODES;
template <int CODES>
constexpr bool INTEGERS = CODES >= 4 && CODES <= 6;
template <int CODES>
constexpr bool PLANES = CODES == 5 || CODES == 6;

// Reader of 5- or 6-bit planes: one vector of high bits, then the VECTORS vectors of low nibbles that they belong to.
template <int BITS>
struct PlaneVectors {
  static constexpr int HIGH = BITS - 4, VECTORS = 4 / HIGH, BYTES = (1 + VECTORS) * 64;
  static constexpr int MASK = ((1 << HIGH) - 1) << 4;
  const uint8_t* codes;
  Vector::Quads high_bits;

  explicit PlaneVectors(const uint8_t* from) : codes(from), high_bits(Vector::load_quads(from)) {}

  // Vector V: `low` gets the integers of columns 4j.., `high` those of columns 4j + 32.. .
  template <int V>
  inline __attribute__((always_inline)) void read(Vector::Quads& low, Vector::Quads& high) const {
    const Vector::Quads nibbles = Vector::load_quads(codes + 64 + V * 64);
    const Vector::Quads low_bits = Vector::template shift_bits<4 - 2 * V * HIGH>(high_bits);
    const Vector::Quads top_bits = Vector::template shift_bits<4 - (2 * V + 1) * HIGH>(high_bits);
    low = Vector::join_bits(nibbles, 15, Vector::and_bits(low_bits, MASK));
    high = Vector::join_bits(Vector::template shift_bits<-4>(nibbles), 15, Vector::and_bits(top_bits, MASK));
  }
};

// Calls low_of(j, quads) with columns 4j.. and high_of(j, quads) with columns 4j + 32.., for vectors BEGIN to END of a group;
// prefetches `distance` bytes ahead.
template <int CODES, int BEGIN, int END, class Low, class High>
inline __attribute__((always_inline)) void each_vector(const uint8_t* codes, int64_t distance, Vector::Table table, Low low_of,
                                                       High high_of) {
  Vector::Quads low, high;
  if constexpr (PLANES<CODES>) {
    using Planes = PlaneVectors<CODES>;
#pragma GCC unroll 1
    for (int first = BEGIN; first < END; first += Planes::VECTORS) {
      const uint8_t* place = codes + first / Planes::VECTORS * Planes::BYTES;
      for (int line = 0; line < Planes::BYTES; line += 64) __builtin_prefetch(place + line + distance);
      const Planes planes(place);
      unroll<Planes::VECTORS>([&](auto v) __attribute__((always_inline)) {
        planes.template read<v>(low, high);
        low_of(first + v, low), high_of(first + v, high);
      });
    }
  } else {
    // Bytes in the order of memory: two streams 512 bytes apart are read at half of the bandwidth.
    constexpr int PASSES = CODES == 8 ? 2 : 1;
    unroll<PASSES>([&](auto pass) __attribute__((always_inline)) {
#pragma GCC unroll 1
      for (int j = BEGIN; j < END; ++j) {
        const uint8_t* place = codes + (j + 8 * pass) * 64;
        __builtin_prefetch(place + distance);
        if constexpr (CODES == LOOKUP) {
          Vector::decode(place, table, low, high);
          low_of(j, low), high_of(j, high);
        } else if constexpr (CODES == 4) {
          const Vector::Quads nibbles = Vector::load_quads(place);
          low_of(j, Vector::and_bits(nibbles, 15));
          high_of(j, Vector::and_bits(Vector::template shift_bits<-4>(nibbles), 15));
        } else if constexpr (pass == 0) {
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
