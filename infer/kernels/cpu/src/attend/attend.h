// Attention over a paged KV cache for CPUs: the new keys and values are written, then every query attends to its past.
// `infer.attention` defines what is computed; this is flash-decoding (Dao et al. 2023) where queries are few, and tiles
// of queries with an online softmax where they are many.
//
// A page holds, for each KV head, H = page_bytes / kv_heads bytes: keys, values, and of INT8 the steps of the keys and of
// the values, float [page] each. Values are [page, head_dim]. Keys are in groups of 16 tokens, [page / 16, head_dim, 16],
// where the page is a multiple of 16, else [page, head_dim].
//
// A row of the result is bit-equal whatever the number of threads and the other sequences of the batch. It depends on how
// many tokens of its own sequence are new: few take the decoding path, which sums in another order.
#pragma once

#include "linear/linear.h"
#include "threads/team.h"

namespace infer_native {

enum class Number : int32_t { FLOAT32, FLOAT16, BFLOAT16, INT8 };  // the order of `infer.attention.KV_DTYPES`

struct Heads {  // [tokens, heads, head_dim], the last dimension dense; strides in elements
  void* data;
  int64_t token_stride, head_stride;
};

struct AttendArgs {
  Heads query, key, value, out;  // the last is written; it may be the memory of `query`
  Number type;                   // of those four, not INT8
  uint8_t* pages;                // of this layer
  int64_t page_bytes;            // from one page to the next
  Number cache_type;
  const int64_t* slot_mapping;  // [tokens]: page * tokens of a page + place, or -1: not kept
  const int32_t* block_table;   // [sequences, blocks]
  const int32_t* query_start;   // [sequences + 1]
  const int32_t* seq_lens;      // [sequences], the new tokens included
  int64_t tokens, sequences, blocks, query_heads, kv_heads, head_dim, page;
  float scale;
  int64_t window = 0;            // 0: all; else a query sees its own token and the window - 1 before it
  float softcap = 0;             // 0: none
  const float* sinks = nullptr;  // [query_heads]
  int64_t chunk = 0;             // 0: all; else a query sees nothing before the last multiple of it up to its own token
  // ALiBi, [query_heads]: slope times the place of the key is added to the logits; `rounded`: place and product as bfloat16.
  const float* slopes = nullptr;
  bool rounded = false;
  // Bias by distance, [query_heads, distances]: the entry min(place of the query - place of the key, distances - 1) is added.
  const float* bias = nullptr;
  int64_t distances = 0;
  // Rotary positions, applied to query and key on the way where given: [tokens, rotary_dim], x * cos + rotate_half(x) * sin
  // over the first rotary_dim columns, rotate_half(a, b) = (-b, a).
  const float* cos = nullptr;
  const float* sin = nullptr;
  int64_t rotary_dim = 0;
  void* scratch = nullptr;  // attend_scratch_bytes(args, parts) bytes at a multiple of 64, shared by the team
};

// The first place that the token at `position` sees.
inline int64_t first_seen(const AttendArgs& args, int64_t position) {
  const int64_t start = args.chunk && position > 0 ? position / args.chunk * args.chunk : 0;
  return args.window && position + 1 - args.window > start ? position + 1 - args.window : start;
}

// Opens its own parallel region; `scratch` is not read.
void attend(const AttendArgs& args);

// Attention inside a parallel region: every thread of the team calls it; `next` is 0 and used by this call only. The team
// synchronizes between writing and reading where needed. The result is complete, and the scratch reusable, after the
// caller's next barrier.
void attend_in_team(const AttendArgs& args, Team& team, std::atomic<int64_t>& next);

int64_t attend_scratch_bytes(const AttendArgs& args, int64_t parts);

// Returns at least `bytes` bytes of the calling thread, 64-byte aligned, valid until its next call; apart from `scratch()`.
void* attend_scratch(int64_t bytes);

}  // namespace infer_native
