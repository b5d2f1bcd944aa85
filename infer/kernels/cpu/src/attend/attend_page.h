// Numbers of the cache as registers of floats, and where they lie in a page. Included by each instruction set after its
// `Lane`, which says how wide a register is.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "attend/attend_kernel.h"

namespace infer_native {
namespace {

constexpr int LANES = Lane::COUNT;
constexpr int GROUP_VECTORS = KEY_GROUP / LANES;
constexpr float NONE = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));

// function(0), …, function(N - 1) with constant arguments: arrays indexed by them stay in registers.
template <class Function, int... I>
inline __attribute__((always_inline)) void unroll(Function function, std::integer_sequence<int, I...>) {
  (function(std::integral_constant<int, I>()), ...);
}

template <int N, class Function>
inline __attribute__((always_inline)) void unroll(Function function) {
  unroll(function, std::make_integer_sequence<int, N>());
}

template <class T>
inline T load_as(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Floats load(const void* p) { return load_as<Floats>(p); }
inline void store(void* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline Floats broadcast(float v) { return v - Floats{}; }

inline float reduce_add(Floats v) {
  float part[LANES];
  store(part, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  return part[0];
}

template <Number T>
constexpr int64_t SIZE = T == Number::FLOAT32 ? 4 : T == Number::INT8 ? 1 : 2;

inline int64_t size_of(Number type) { return type == Number::FLOAT32 ? 4 : type == Number::INT8 ? 1 : 2; }

template <Number T>
inline Floats load_numbers(const uint8_t* p) {
  if constexpr (T == Number::FLOAT32) return load(p);
  if constexpr (T == Number::FLOAT16) return Lane::load_half(p);
  if constexpr (T == Number::BFLOAT16) return Lane::load_bfloat(p);
  if constexpr (T == Number::INT8) return Lane::load_bytes(p);
}

// function(constant) for the type at hand.
template <class Function>
inline void with_type(Number type, Function function) {
  switch (type) {
    case Number::FLOAT32: return function(std::integral_constant<Number, Number::FLOAT32>());
    case Number::FLOAT16: return function(std::integral_constant<Number, Number::FLOAT16>());
    case Number::BFLOAT16: return function(std::integral_constant<Number, Number::BFLOAT16>());
    case Number::INT8: return function(std::integral_constant<Number, Number::INT8>());
  }
}

template <int MAX, class Function>
inline void with_height(int height, Function function) {
  if constexpr (MAX > 1) {
    if (height < MAX) return with_height<MAX - 1>(height, function);
  }
  function(std::integral_constant<int, MAX>());
}

inline uint16_t bfloat_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float number_at(const uint8_t* p, Number type) {
  switch (type) {
    case Number::FLOAT32: return load_as<float>(p);
    case Number::FLOAT16: return Lane::half_to_float(load_as<uint16_t>(p));
    case Number::BFLOAT16: {
      const uint32_t bits = static_cast<uint32_t>(load_as<uint16_t>(p)) << 16;
      return load_as<float>(&bits);
    }
    case Number::INT8: break;
  }
  return static_cast<int8_t>(*p);
}

// Returns the code of an INT8 page as a float.
inline void put_number(uint8_t* p, Number type, float value) {
  switch (type) {
    case Number::FLOAT32: std::memcpy(p, &value, 4); return;
    case Number::FLOAT16: {
      const uint16_t half = Lane::float_to_half(value);
      std::memcpy(p, &half, 2);
      return;
    }
    case Number::BFLOAT16: {
      const uint16_t half = bfloat_of(value);
      std::memcpy(p, &half, 2);
      return;
    }
    case Number::INT8: *p = static_cast<uint8_t>(static_cast<int8_t>(value));
  }
}

inline void read_row(const Heads& heads, Number type, int64_t token, int64_t head, int64_t dim, float* out) {
  const auto* row = static_cast<const uint8_t*>(heads.data) +
                    (token * heads.token_stride + head * heads.head_stride) * size_of(type);
  with_type(type, [&](auto kind) {
    constexpr Number T = decltype(kind)::value;
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store(out + i, load_numbers<T>(row + i * SIZE<T>));
    for (; i < dim; ++i) out[i] = number_at(row + i * SIZE<T>, T);
  });
}

inline void write_row(const Heads& heads, Number type, int64_t token, int64_t head, int64_t dim, const float* row) {
  const int64_t at = token * heads.token_stride + head * heads.head_stride;
  auto* out = static_cast<uint8_t*>(heads.data) + at * size_of(type);
  if (type == Number::FLOAT32) {
    std::memcpy(out, row, static_cast<size_t>(dim) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < dim; ++i) put_number(out + i * size_of(type), type, row[i]);
}

constexpr float CODES = 127, SMALLEST_STEP = 1e-30f;

// Rounds the row to integers in ±limit and returns the step; NaN where the row is not finite.
inline float to_whole(float* row, int64_t dim, float limit) {
  const int64_t whole = dim / LANES * LANES;
  Floats tops = {}, zeros = {};
  for (int64_t i = 0; i < whole; i += LANES) {
    const Floats x = load(row + i);
    tops = Lane::max(tops, Lane::max(x, -x));
    zeros += x * broadcast(0.0f);
  }
  float most = Lane::reduce_max(tops), zero = reduce_add(zeros);
  for (int64_t i = whole; i < dim; ++i) {
    const float size = row[i] < 0 ? -row[i] : row[i];
    most = size > most ? size : most;
    zero += row[i] * 0;
  }
  if (zero != 0) {
    std::memset(row, 0, static_cast<size_t>(dim) * sizeof(float));
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float step = most / limit > SMALLEST_STEP ? most / limit : SMALLEST_STEP;
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, halves to even
  for (int64_t i = 0; i < whole; i += LANES) store(row + i, load(row + i) / broadcast(step) + magic - magic);
  for (int64_t i = whole; i < dim; ++i) row[i] = std::nearbyint(row[i] / step);
  return step;
}

inline void rotate(const AttendArgs& args, int64_t token, float* row) {
  if (args.cos == nullptr) return;
  const float *cos = args.cos + token * args.rotary_dim, *sin = args.sin + token * args.rotary_dim;
  const int64_t half = args.rotary_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = row[i], b = row[i + half];
    row[i] = a * cos[i] - b * sin[i];
    row[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

// Addresses of one KV head of a page.
struct PageHead {
  uint8_t *keys, *values;
  uint8_t *key_steps, *value_steps;  // floats, perhaps not aligned; of INT8 only

  PageHead() = default;
  PageHead(const AttendArgs& args, int64_t page, int64_t head) {
    const int64_t half = args.page * args.head_dim * size_of(args.cache_type), steps = args.page * 4;
    const bool stepped = args.cache_type == Number::INT8;
    keys = args.pages + page * args.page_bytes + head * 2 * (half + (stepped ? steps : 0));
    values = keys + half;
    key_steps = values + half;
    value_steps = key_steps + steps;
  }
};

// Interleaving depth: consecutive elements of a key, or consecutive tokens of a value, that one instruction multiplies.
template <Number T>
constexpr int DEPTH = T == Number::INT8 ? 2 : 1;

// Returns whether pages have the layout of the decoding path: keys [page / KEY_GROUP][dim / DEPTH][KEY_GROUP][DEPTH], values
// [page / DEPTH][dim][DEPTH]. Else both are [page][dim].
inline bool grouped(const AttendArgs& args) {
  return args.page % KEY_GROUP == 0 && (args.cache_type != Number::INT8 || args.head_dim % DEPTH<Number::INT8> == 0);
}

// Location of element i of a token: start + i / depth * stride + i % depth, `depth` being 1 or 2.
struct Place {
  int64_t start, stride, depth = 1;

  static Place of_key(const AttendArgs& args, int64_t place) {
    if (!grouped(args)) return {place * args.head_dim, 1};
    const int64_t depth = args.cache_type == Number::INT8 ? DEPTH<Number::INT8> : 1;
    return {place / KEY_GROUP * KEY_GROUP * args.head_dim + place % KEY_GROUP * depth, KEY_GROUP * depth, depth};
  }
  static Place of_value(const AttendArgs& args, int64_t place) {
    if (!grouped(args) || args.cache_type != Number::INT8) return {place * args.head_dim, 1};
    constexpr int64_t depth = DEPTH<Number::INT8>;
    return {place / depth * depth * args.head_dim + place % depth, depth};
  }
  int64_t at(int64_t i) const { return start + (i >> (depth - 1)) * stride + (i & (depth - 1)); }
};

// Operand and accumulator types of keys and values: floats, or for INT8 pairs of int16 and int32.
template <Number T>
struct Products {
  using Sum = Floats;
  using Factor = float;
  static Floats load(const uint8_t* p) { return load_numbers<T>(p); }
  static Floats add(Floats sum, Floats x, float factor) { return Lane::fma(broadcast(factor), x, sum); }
};

template <>
struct Products<Number::INT8> {
  using Sum = Ints;
  using Factor = int32_t;
  static Ints load(const uint8_t* p) { return (Ints)Lane::load_pairs(p); }
  static Ints add(Ints sum, Ints x, int32_t factor) {
    return (Ints)Lane::dot_pairs((decltype(Lane::load_pairs(nullptr)))sum, (decltype(Lane::load_pairs(nullptr)))x, factor);
  }
};

inline Floats first_of(Ints pairs) { return __builtin_convertvector((pairs << 16) >> 16, Floats); }
inline Floats second_of(Ints pairs) { return __builtin_convertvector(pairs >> 16, Floats); }

// e^x for x <= 0: Cody and Waite's reduction, a polynomial of degree 6 (Cephes expf), 1 ulp; 0 below -87.
inline Floats exponential(Floats x) {
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Floats rounded = Lane::fma(x, broadcast(1.44269504088896341f), magic);
  const Floats n = rounded - magic;
  Floats r = Lane::fma(n, broadcast(-0.693359375f), x);
  r = Lane::fma(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = Lane::fma(p, r, broadcast(1.3981999507e-3f));
  p = Lane::fma(p, r, broadcast(8.3334519073e-3f));
  p = Lane::fma(p, r, broadcast(4.1665795894e-2f));
  p = Lane::fma(p, r, broadcast(1.6666665459e-1f));
  p = Lane::fma(p, r, broadcast(5.0000001201e-1f));
  p = Lane::fma(p * r, r, r) + broadcast(1.0f);
  const Ints power = ((Ints)rounded << 23) + (Ints)broadcast(1.0f);
  return x < broadcast(-87.0f) ? Floats{} : p * (Floats)power;
}

inline float exponential(float x) { return exponential(broadcast(x))[0]; }

// cap * tanh(x / cap), by e^-2|x/cap|.
inline Floats capped(Floats x, float cap) {
  const Floats y = x * broadcast(1 / cap), size = y < Floats{} ? -y : y;
  const Floats e = exponential(size * broadcast(-2.0f));
  const Floats t = (broadcast(1.0f) - e) / (broadcast(1.0f) + e) * broadcast(cap);
  return y < Floats{} ? -t : t;
}

// Places in the cache that a new token sees.
struct Seen {
  int64_t low, high, own;  // the last: the token's own place

  Seen(const AttendArgs& args, const Span& span, int64_t token) : own(span.position(token)) {
    high = own + 1;
    low = first_seen(args, own);
    if (high < low) high = low;
  }
};

// The exponentials of logits [begin, end), multiples of LANES, less `most`, in place; their sum is returned, by lanes.
// 64 bytes from `ahead` on are prefetched for every 16.
inline Floats exponentials(float* logits, int64_t begin, int64_t end, float most, const uint8_t* ahead = nullptr) {
  Floats sum = {};
  for (int64_t t = begin; t < end; t += LANES) {
    if (ahead != nullptr) __builtin_prefetch(ahead + 4 * (t - begin));
    const Floats e = exponential(load(logits + t) - broadcast(most));
    store(logits + t, e);
    sum += e;
  }
  return sum;
}

// The nearest bfloat16, halves to even, of finite numbers.
inline Floats to_bfloat(Floats x) {
  const Ints bits = (Ints)x;
  return (Floats)((bits + 0x7fff + ((bits >> 16) & 1)) & ~0xffff);
}

// Adds ALiBi to the logits of a row at [begin, end), counted from `origin`; 0 at the token's own place.
inline void add_alibi(const AttendArgs& args, int64_t head, int64_t own, float* logits, int64_t begin, int64_t end, int64_t origin) {
  Floats lanes;
  for (int64_t i = 0; i < LANES; ++i) lanes[i] = static_cast<float>(i);
  const Floats slope = broadcast(args.slopes[head]);
  const auto rounded = [&](Floats place) { return to_bfloat(slope * to_bfloat(place)); };
  const Floats shift = rounded(broadcast(static_cast<float>(own)));
  for (int64_t t = begin; t < end; t += LANES) {
    if (args.rounded) {
      store(logits + t, load(logits + t) + rounded(lanes + broadcast(static_cast<float>(origin + t))) - shift);
    } else {
      store(logits + t, Lane::fma(slope, lanes + broadcast(static_cast<float>(origin + t - own)), load(logits + t)));
    }
  }
}

// Adds the bias by distance to the logits of a row at [begin, end), counted from `origin`.
inline void add_bias(const AttendArgs& args, int64_t head, int64_t own, float* logits, int64_t begin, int64_t end, int64_t origin) {
  const float* const table = args.bias + head * args.distances;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t distance = own - origin - t;  // below 0: hidden later
    logits[t] += table[distance < 0 ? 0 : distance < args.distances ? distance : args.distances - 1];
  }
}

// Caps the logits of a head's row at [begin, end), adds ALiBi or a bias by distance, hides those outside `seen`, counted from `origin`, and gives
// the largest.
inline float finish_logits(const AttendArgs& args, int64_t head, float* logits, int64_t begin, int64_t end, Seen seen,
                           int64_t origin) {
  if (args.softcap != 0)
    for (int64_t t = begin; t < end; t += LANES) store(logits + t, capped(load(logits + t), args.softcap));
  if (args.slopes != nullptr) add_alibi(args, head, seen.own, logits, begin, end, origin);
  if (args.bias != nullptr) add_bias(args, head, seen.own, logits, begin, end, origin);
  const int64_t low = seen.low - origin, high = seen.high - origin;
  for (int64_t t = begin; t < end && t < low; ++t) logits[t] = NONE;
  for (int64_t t = high > begin ? high : begin; t < end; ++t) logits[t] = NONE;
  Floats most = broadcast(NONE);
  for (int64_t t = begin; t < end; t += LANES) most = Lane::max(most, load(logits + t));
  return Lane::reduce_max(most);
}

// The weighted values of a row become its result: divided by the sum, in which the sink takes part.
inline void write_result(const AttendArgs& args, int64_t token, int64_t head, float most, float sum, float* row) {
  float scale = 1;
  if (args.sinks != nullptr) {
    const float sink = args.sinks[head], top = most > sink ? most : sink;
    scale = most == NONE ? 0 : exponential(most - top);
    sum = sum * scale + exponential(sink - top);
  }
  const float factor = sum == 0 ? 0 : scale / sum;  // a NaN stays
  for (int64_t i = 0; i < args.head_dim; i += LANES) store(row + i, load(row + i) * broadcast(factor));
  write_row(args.out, args.type, token, head, args.head_dim, row);
}

}  // namespace
}  // namespace infer_native
