// Decoding of the codes of 64 columns of 16 rows into vectors of quads, in registers; see groupwise_weight.h.
#pragma once

#include "linear/parallel_linear.h"

namespace infer_native {
namespace {

// Kinds of codes: indices of 4 or 3 bits into a table, unsigned integers of 2 to 6 bits, and int8.
constexpr int LOOKUP = 0, LOOKUP_3_BITS = -3;
template <int CODES>
constexpr int CODE_BITS = CODES == LOOKUP ? 4 : CODES == LOOKUP_3_BITS ? 3 : CODES;
template <int CODES>
constexpr bool PLANES = CODES == 2 || CODES == 3 || CODES == 5 || CODES == 6;
template <int CODES>
constexpr bool NIBBLES = CODES >= 2 && CODES <= 4;  // integers below 16

// Reader of integers in planes: a vector of the high bits of VECTORS vectors (unless HIGH is 0), then those of their low bits,
// nibbles or, of 2- and 3-bit integers, pairs of bits.
template <int BITS>
struct PlaneVectors {
  static constexpr int LOW = BITS < 4 ? 2 : 4, HIGH = BITS - LOW, SHARED = 4 / LOW;  // SHARED: vectors in one vector of low bits
  static constexpr int VECTORS = HIGH == 2 ? 2 : 4, LOW_BYTES = (HIGH == 0 ? 0 : 64), BYTES = LOW_BYTES + VECTORS / SHARED * 64;
  static constexpr int LOW_MASK = (1 << LOW) - 1, HIGH_MASK = ((1 << HIGH) - 1) << LOW;
  const uint8_t* codes;
  Vector::Quads high_bits;

  explicit PlaneVectors(const uint8_t* from) : codes(from), high_bits(Vector::load_quads(from)) {}

  // Vector V: `low` gets the integers of columns 4j.., `high` those of columns 4j + 32.. . BESIDE_DOTS: as fast as possible beside
  // many products rather than alone.
  template <int V, bool BESIDE_DOTS = false>
  inline __attribute__((always_inline)) void read(Vector::Quads& low, Vector::Quads& high) const {
    const Vector::Quads low_bits = Vector::load_quads(codes + LOW_BYTES + V / SHARED * 64);
    low = integers<2 * V, BESIDE_DOTS>(low_bits);
    high = integers<2 * V + 1, BESIDE_DOTS>(low_bits);
  }

 private:
  // Returns integers N of the bytes: their low bits are number N modulo 2 SHARED, the high ones number N.
  template <int N, bool BESIDE_DOTS>
  inline __attribute__((always_inline)) Vector::Quads integers(Vector::Quads low_bits) const {
    const Vector::Quads low = Vector::template shift_bits<-LOW * (N % (2 * SHARED))>(low_bits);
    if constexpr (HIGH == 0) return Vector::and_bits(low, LOW_MASK);
    const Vector::Quads high = Vector::and_bits(Vector::template shift_bits<LOW - N * HIGH>(high_bits), HIGH_MASK);
    return BESIDE_DOTS ? Vector::add_bits(low, LOW_MASK, high) : Vector::join_bits(low, LOW_MASK, high);
  }
};

// Calls low_of(j, quads) with columns 4j.. and high_of(j, quads) with columns 4j + 32.., for vectors BEGIN to END of a group;
// prefetches `distance` bytes ahead. BESIDE_DOTS: see `PlaneVectors`.
template <int CODES, int BEGIN, int END, bool BESIDE_DOTS, class Low, class High>
inline __attribute__((always_inline)) void each_vector(const uint8_t* codes, int64_t distance, Vector::Table table, Low low_of,
                                                       High high_of) {
  Vector::Quads low, high;
  if constexpr (PLANES<CODES> || CODES == LOOKUP_3_BITS) {
    using Planes = PlaneVectors<CODE_BITS<CODES>>;
#pragma GCC unroll 1
    for (int first = BEGIN; first < END; first += Planes::VECTORS) {
      const uint8_t* place = codes + first / Planes::VECTORS * Planes::BYTES;
      for (int line = 0; line < Planes::BYTES; line += 64) __builtin_prefetch(place + line + distance);
      const Planes planes(place);
      unroll<Planes::VECTORS>([&](auto v) __attribute__((always_inline)) {
        planes.template read<v, BESIDE_DOTS>(low, high);
        if constexpr (CODES == LOOKUP_3_BITS) low = Vector::lookup(table, low), high = Vector::lookup(table, high);
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
