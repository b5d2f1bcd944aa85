// State layers on 16 channels at a time, in compiler vectors; compiled for each instruction set.
//
// The recurrences run over time and are independent between the columns of a state, so that a block of 16 columns stays
// in the L1 cache for all tokens of all segments. Products are not fused: results are bit-equal on every CPU.
#include <cmath>
#include <cstring>

#include "state/state.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // no vector leaves its file

namespace infer_native {
namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

inline Floats load(const float* from, int64_t count) {
  Floats v = {};
  if (count == BLOCK) {
    std::memcpy(&v, from, sizeof v);
  } else {
    std::memcpy(&v, from, static_cast<size_t>(count) * sizeof(float));
  }
  return v;
}

inline void store(float* to, const Floats& v, int64_t count) {
  if (count == BLOCK) {
    std::memcpy(to, &v, sizeof v);
  } else {
    std::memcpy(to, &v, static_cast<size_t>(count) * sizeof(float));
  }
}

// Returns exp to a relative error of about 1e-7, NaN for NaN, and the smallest normal number below -87.
inline Floats exponential(Floats x) {
  x = x > 88.0f ? x - x + 88.0f : x;
  x = x < -87.0f ? x - x - 87.0f : x;
  const Floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;  // the polynomial of Cephes
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
}

inline int64_t width_of(int64_t block, int64_t width) {
  return width - block * BLOCK < BLOCK ? width - block * BLOCK : BLOCK;
}

// Loads and stores `rows` rows of a state, `stride` floats apart; a segment without a cache row starts at zero.
inline void fetch(Floats* state, const float* from, int64_t rows, int64_t stride, int64_t count) {
  for (int64_t n = 0; n < rows; ++n) state[n] = from ? load(from + n * stride, count) : Floats{};
}

inline void keep(const Floats* state, float* to, int64_t rows, int64_t stride, int64_t count) {
  if (to)
    for (int64_t n = 0; n < rows; ++n) store(to + n * stride, state[n], count);
}

inline const float* moved(const float* from, int64_t by) { return from ? from + by : nullptr; }
inline float* moved(float* from, int64_t by) { return from ? from + by : nullptr; }

// Returns term(0) + … + term(count - 1), in four independent sums.
template <class Term>
inline __attribute__((always_inline)) Floats sum_of(int64_t count, Term term) {
  Floats sums[4] = {};
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    sums[0] += term(k);
    sums[1] += term(k + 1);
    sums[2] += term(k + 2);
    sums[3] += term(k + 3);
  }
  for (; k < count; ++k) sums[0] += term(k);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void conv_block(const ConvArgs& args, int64_t block) {
  const int64_t first = block * BLOCK, count = width_of(block, args.channels), taps = args.taps;
  Floats weight[MAX_TAPS], window[MAX_TAPS];
  for (int64_t k = 0; k < taps; ++k) {
    weight[k] = Floats{};
    for (int64_t i = 0; i < count; ++i) weight[k][i] = args.weight[(first + i) * taps + k];
  }
  const Floats bias = args.bias ? load(args.bias + first, count) : Floats{};
  for (int64_t s = 0; s < args.state.count; ++s) {
    fetch(window, moved(args.state.read(s), first), taps - 1, args.channels, count);
    for (int64_t t = args.state.first(s); t < args.state.end(s); ++t) {
      window[taps - 1] = load(args.x + t * args.channels + first, count);
      Floats y = window[0] * weight[0];
      for (int64_t k = 1; k < taps; ++k) y += window[k] * weight[k];
      y += bias;
      if (args.silu) y /= exponential(-y) + 1.0f;
      store(args.out + t * args.channels + first, y, count);
      for (int64_t k = 1; k < taps; ++k) window[k - 1] = window[k];
    }
    keep(window, moved(args.state.written(s), first), taps - 1, args.channels, count);
  }
}

void delta_block(const DeltaArgs& args, int64_t head, int64_t block) {
  const int64_t first = block * BLOCK, count = width_of(block, args.width), rows = args.key_width;
  const int64_t place = head * rows * args.width + first, key_head = head / (args.heads / args.key_heads);
  Floats state[MAX_STATES];
  for (int64_t s = 0; s < args.state.count; ++s) {
    fetch(state, moved(args.state.read(s), place), rows, args.width, count);
    for (int64_t t = args.state.first(s); t < args.state.end(s); ++t) {
      const float* key = args.key + (t * args.key_heads + key_head) * rows;
      const float* query = args.query + (t * args.key_heads + key_head) * rows;
      const int64_t at = (t * args.heads + head) * args.width + first;
      const float decay = std::exp(args.decay[t * args.heads + head]);
      const Floats seen = sum_of(rows, [&](int64_t k) { return (state[k] *= decay) * key[k]; });
      const Floats delta = (load(args.value + at, count) - seen) * args.beta[t * args.heads + head];
      const Floats out = sum_of(rows, [&](int64_t k) { return (state[k] += delta * key[k]) * query[k]; });
      store(args.out + at, out, count);
    }
    keep(state, moved(args.state.written(s), place), rows, args.width, count);
  }
}

void ssd_block(const ScanArgs& args, int64_t head, int64_t block) {
  const int64_t first = block * BLOCK, count = width_of(block, args.width), rows = args.states;
  const int64_t place = head * rows * args.width + first, group = head / (args.heads / args.groups);
  Floats state[MAX_STATES];
  for (int64_t s = 0; s < args.state.count; ++s) {
    fetch(state, moved(args.state.read(s), place), rows, args.width, count);
    for (int64_t t = args.state.first(s); t < args.state.end(s); ++t) {
      const float *b = args.b + (t * args.groups + group) * rows, *c = args.c + (t * args.groups + group) * rows;
      const int64_t at = (t * args.heads + head) * args.width + first;
      const float step = args.step[t * args.heads + head], decay = std::exp(step * args.a[head]);
      const Floats x = load(args.x + at, count) * step;
      const Floats out = sum_of(rows, [&](int64_t n) { return (state[n] = state[n] * decay + x * b[n]) * c[n]; });
      store(args.out + at, out, count);
    }
    keep(state, moved(args.state.written(s), place), rows, args.width, count);
  }
}

void selective_block(const ScanArgs& args, int64_t group, int64_t block) {
  const int64_t channels = args.groups * args.width, first = group * args.width + block * BLOCK;
  const int64_t count = width_of(block, args.width), rows = args.states;
  Floats state[MAX_STATES];
  for (int64_t s = 0; s < args.state.count; ++s) {
    fetch(state, moved(args.state.read(s), first), rows, channels, count);
    for (int64_t t = args.state.first(s); t < args.state.end(s); ++t) {
      const float *b = args.b + (t * args.groups + group) * rows, *c = args.c + (t * args.groups + group) * rows;
      const Floats step = load(args.step + t * channels + first, count);
      const Floats x = load(args.x + t * channels + first, count) * step;
      Floats out = {};
      for (int64_t n = 0; n < rows; ++n) {
        state[n] = state[n] * exponential(step * load(args.a + n * channels + first, count)) + x * b[n];
        out += state[n] * c[n];
      }
      store(args.out + t * channels + first, out, count);
    }
    keep(state, moved(args.state.written(s), first), rows, channels, count);
  }
}

void linear_block(const LinearScanArgs& args, int64_t block) {
  const int64_t first = block * BLOCK, count = width_of(block, args.channels);
  Floats state;
  for (int64_t s = 0; s < args.state.count; ++s) {
    fetch(&state, moved(args.state.read(s), first), 1, 0, count);
    for (int64_t t = args.state.first(s); t < args.state.end(s); ++t) {
      const int64_t at = t * args.channels + first;
      state = state * load(args.decay + at, count) + load(args.x + at, count);
      store(args.out + at, state, count);
    }
    keep(&state, moved(args.state.written(s), first), 1, 0, count);
  }
}

}  // namespace
}  // namespace infer_native
