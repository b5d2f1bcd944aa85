// Attention of every token of a sequence to every other, as encoders have it: no cache, nothing kept.
#pragma once

#include <atomic>

#include "attend/attend.h"

namespace infer_native {

// Attention mask. `data` is bool (true: attend) or float (added to the logit), [batches or 1, tokens or 1, tokens].
struct Mask {
  const void* data = nullptr;  // null: everything
  bool is_float = false;
  int64_t batch_stride = 0, row_stride = 0;  // in elements
};

struct AttendAllArgs {
  Heads query, key, value, out;  // float32; token `t` of sequence `b` is row b * tokens + t
  int64_t batches, tokens, query_heads, kv_heads, head_dim;
  float scale;
  bool causal = false;
  Mask mask;
  // Where the sequences are packed without padding: sequence `b` is the rows starts[b] to starts[b + 1], `tokens` is the
  // longest, and there is no mask.
  const int64_t* starts = nullptr;

  int64_t first(int64_t batch) const { return starts == nullptr ? batch * tokens : starts[batch]; }
  int64_t length(int64_t batch) const { return starts == nullptr ? tokens : starts[batch + 1] - starts[batch]; }
};

// Computes the share of one thread of a team; `next`, 0 at the start, counts the claimed pieces. The result is complete
// after the caller's next barrier. A row that attends to nothing becomes zeros. A row is bit-equal whatever the number of
// threads and the other sequences.
void attend_all_in_team(const AttendAllArgs& args, std::atomic<int64_t>& next);

}  // namespace infer_native
