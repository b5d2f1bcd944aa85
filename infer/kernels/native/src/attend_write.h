// New keys and values into the cache.
#pragma once

#include "attend_page.h"

namespace infer_native {
namespace {

constexpr float CODES = 127, SMALLEST_STEP = 1e-30f;

// The row becomes whole numbers in ±127 times the step that is returned; NaN where the row is not finite.
inline float to_codes(float* row, int64_t dim) {
  float most = 0, zero = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const float size = row[i] < 0 ? -row[i] : row[i];
    most = size > most ? size : most;
    zero += row[i] * 0;
  }
  const float step = most / CODES > SMALLEST_STEP ? most / CODES : SMALLEST_STEP;
  const bool finite = zero == 0;
  for (int64_t i = 0; i < dim; ++i) row[i] = finite ? std::nearbyint(row[i] / step) : 0;
  return finite ? step : std::numeric_limits<float>::quiet_NaN();
}

inline void write_cache(const AttendArgs& args, int64_t begin, int64_t end) {
  auto* const row = static_cast<float*>(attend_workspace(args.head_dim * 6 + 64));
  auto* const halves = reinterpret_cast<uint16_t*>(row + args.head_dim);
  const int64_t size = size_of(args.cache_type);
  int64_t token = begin / args.kv_heads, head = begin % args.kv_heads, slot = -1, block = 0, place = 0;
  const auto at_token = [&] {
    slot = args.slot_mapping[token];
    block = slot / args.page, place = slot - block * args.page;
  };
  if (begin < end) at_token();
  for (int64_t item = begin; item < end; ++item, ++head) {
    if (head == args.kv_heads) {
      head = 0, ++token;
      at_token();
    }
    if (slot < 0) continue;
    const PageHead page(args, block, head);
    for (const bool is_key : {true, false}) {
      read_row(is_key ? args.key : args.value, args.type, token, head, args.head_dim, row);
      if (is_key) rotate(args, token, row);
      if (args.cache_type == Number::INT8) {
        const float step = to_codes(row, args.head_dim);
        std::memcpy((is_key ? page.key_steps : page.value_steps) + place * 4, &step, 4);
      }
      uint8_t* const numbers = is_key ? page.keys : page.values;
      const KeyPlace at(args, place);
      const int64_t start = is_key ? at.start : place * args.head_dim, stride = is_key ? at.stride : 1;
      with_type(args.cache_type, [&](auto kind) {
        constexpr Number T = decltype(kind)::value;
        uint8_t* to = numbers + start * size;
        if (T == Number::FLOAT16 && args.head_dim % LANES == 0) {
          for (int64_t i = 0; i < args.head_dim; i += LANES) Lane::store_half(halves + i, load(row + i));
          if (!is_key) {
            std::memcpy(to, halves, static_cast<size_t>(args.head_dim) * 2);
            return;
          }
          for (int64_t i = 0; i < args.head_dim; ++i, to += stride * 2) std::memcpy(to, halves + i, 2);
          return;
        }
        for (int64_t i = 0; i < args.head_dim; ++i, to += stride * size) put_number(to, T, row[i]);
      });
    }
  }
}

}  // namespace
}  // namespace infer_native
