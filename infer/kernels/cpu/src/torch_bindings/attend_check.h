// Validation of the arguments of attention calls from torch.
#pragma once

#include "attend/attend.h"
#include "torch_bindings/torch_view.h"

namespace infer_native {

// Raises unless every page of a sequence is within the cache.
inline void check_pages(const AttendArgs& args, int64_t pages) {
  for (int64_t t = 0; t < args.tokens; ++t)
    STD_TORCH_CHECK(args.slot_mapping[t] < pages * args.page, "slot_mapping[", t, "] is beyond the cache");
  STD_TORCH_CHECK(args.query_start[0] >= 0 && args.query_start[args.sequences] <= args.tokens, "query_start is beyond the tokens");
  for (int64_t b = 0; b < args.sequences; ++b) {
    const int64_t count = args.query_start[b + 1] - args.query_start[b], length = args.seq_lens[b];
    STD_TORCH_CHECK(count >= 0 && (count == 0 || length >= count), "sequence ", b, " has ", count, " new tokens of ", length);
    if (count == 0) continue;
    const int64_t needed = (length + args.page - 1) / args.page;
    STD_TORCH_CHECK(needed <= args.blocks, "block_table has ", args.blocks, " blocks, sequence ", b, " needs ", needed);
    const int64_t seen = first_seen(args, length - count);
    const int32_t* const row = args.block_table + b * args.blocks;
    uint32_t most = 0;
    for (int64_t i = seen / args.page; i < needed; ++i) most = most > uint32_t(row[i]) ? most : uint32_t(row[i]);
    STD_TORCH_CHECK(most < pages, "block_table[", b, "] names a page beyond the cache");
  }
}

}  // namespace infer_native
