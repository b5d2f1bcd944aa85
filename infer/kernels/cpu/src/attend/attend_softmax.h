// The softmax of a row of decoding over one chunk of an INT8 cache: products of whole numbers become logits, and those
// become weights that are whole numbers again. Three passes over the logits, of which each does all it can.
#pragma once

#include "attend/attend_page.h"

namespace infer_native {
namespace {

constexpr int MAX_SEGMENTS = CHUNK / KEY_GROUP + 1;

// Tokens of a chunk that lie together.
struct Segment {
  PageHead page;
  int64_t place, offset, count;  // in the page, in the chunk

  const uint8_t* key_steps(int64_t t) const { return page.key_steps + (place + t) * 4; }
  const uint8_t* value_steps(int64_t t) const { return page.value_steps + (place + t) * 4; }
};

// Products of that with codes, `count` of them added up, stay within 32 bits.
inline float most_whole(int64_t count) {
  const int64_t most = std::numeric_limits<int32_t>::max() / (127 * count);
  return static_cast<float>(most < 32767 ? most : 32767);
}

// Prefetches what `scale_row` and `weigh_row` read of a segment.
inline void prefetch_steps(const Segment& segment) {
  const uint8_t *keys = segment.key_steps(0), *values = segment.value_steps(0);
  for (int64_t line = 0; line * 16 <= segment.count; ++line) {
    __builtin_prefetch(keys + 64 * line);
    __builtin_prefetch(values + 64 * line);
  }
}

// int32 sums times `step` and the steps of the keys, in place, as floats; the largest. Whole registers are read: where the
// last tokens do not fill one, neither what is beyond them nor the result means anything.
inline float scale_row(const Segment* segments, int64_t count, float step, float* logits) {
  Floats most = broadcast(NONE);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t t = 0; t < segments[i].count; t += LANES) {
      float* const at = logits + segments[i].offset + t;
      const Floats x = __builtin_convertvector(load_as<Ints>(at), Floats) * load(segments[i].key_steps(t)) * broadcast(step);
      store(at, x);
      most = Lane::max(most, x);
    }
  return Lane::reduce_max(most);
}

struct RowWeights {
  float total, step;  // the sum of the exponentials; NaN where an exponential or a step of a value is not finite
};

// Exponentials of the logits less `most`, times the steps of the values, as int16 in units of the step that is returned,
// two tokens in the place of each float. 64 bytes from `ahead` on are prefetched for every 16 tokens.
inline RowWeights weigh_row(const Segment* segments, int64_t count, float most, float* logits, const uint8_t* ahead) {
  Floats sum = {}, top = {}, zero = {};
  const Floats shift = broadcast(most);
  const auto weigh = [&](float* at, Floats steps) {
    const Floats e = exponential(load(at) - shift), weight = e * steps;
    sum += e;
    top = Lane::max(top, weight);
    zero = Lane::fma(weight, broadcast(0.0f), zero);
    store(at, weight);
  };
  int64_t end = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Segment& segment = segments[i];
    float* const row = logits + segment.offset;
    int64_t t = 0;
    for (; t + LANES <= segment.count; t += LANES, ahead += 4 * LANES) {
      __builtin_prefetch(ahead);
      weigh(row + t, load(segment.value_steps(t)));
    }
    if (t < segment.count) {
      float steps[LANES] = {};
      std::memcpy(steps, segment.value_steps(t), static_cast<size_t>(segment.count - t) * sizeof(float));
      weigh(row + t, load(steps));
      t += LANES;
    }
    end = segment.offset + t;
  }
  const float largest = Lane::reduce_max(top), whole = most_whole(CHUNK), total = reduce_add(sum);
  auto* const codes = reinterpret_cast<uint8_t*>(logits);
  if (reduce_add(zero) != 0) {
    std::memset(codes, 0, static_cast<size_t>(end) * 2);
    return {total, std::numeric_limits<float>::quiet_NaN()};
  }
  const Floats factor = broadcast(largest > 0 ? whole / largest : 0);
  for (int64_t t = segments[0].offset; t < end; t += LANES) {
    const Ints rounded = __builtin_convertvector(Lane::fma(load(logits + t), factor, broadcast(0.5f)), Ints);
    const Shorts narrow = __builtin_convertvector(rounded, Shorts);
    std::memcpy(codes + t * 2, &narrow, sizeof narrow);
  }
  return {total, largest / whole};
}

}  // namespace
}  // namespace infer_native
