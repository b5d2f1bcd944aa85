// New keys and values into the cache.
#pragma once

#include "attend/attend_page.h"

namespace infer_native {
namespace {

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
        const float step = to_whole(row, args.head_dim, CODES);
        std::memcpy((is_key ? page.key_steps : page.value_steps) + place * 4, &step, 4);
      }
      uint8_t* const numbers = is_key ? page.keys : page.values;
      const Place at = is_key ? Place::of_key(args, place) : Place::of_value(args, place);
      with_type(args.cache_type, [&](auto kind) {
        constexpr Number T = decltype(kind)::value;
        uint8_t* to = numbers + at.start * size;
        if (T == Number::FLOAT16 && args.head_dim % LANES == 0) {
          for (int64_t i = 0; i < args.head_dim; i += LANES) Lane::store_half(halves + i, load(row + i));
          if (!is_key) {
            std::memcpy(to, halves, static_cast<size_t>(args.head_dim) * 2);
            return;
          }
          for (int64_t i = 0; i < args.head_dim; ++i, to += at.stride * 2) std::memcpy(to, halves + i, 2);
          return;
        }
        for (int64_t i = 0; i < args.head_dim; ++i) put_number(numbers + at.at(i) * size, T, row[i]);
      });
    }
  }
}

}  // namespace
}  // namespace infer_native
