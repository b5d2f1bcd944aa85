// Layout of one call of a fused program: bytes of memory, offset of each value, number of threads worth starting.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "fused_program/fused_program.h"
#include "isa.h"
#include "threads/team.h"

namespace infer_native {
namespace {

constexpr int64_t LINE = 64;
constexpr int64_t SERIAL_PRODUCTS = 1 << 18;  // of a linear layer per thread, below which starting a thread does not pay

inline int64_t aligned(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

inline const Staged& staged(int64_t kind) {
  const Isa& isa = active_isa();
  if (is_groupwise(kind)) return isa.staged_groupwise.of(GroupwiseLayout(layout_of(kind), GROUP).parts());
  switch (kind) {
    case LUT4: return isa.staged_lut4;
    case LUT4_FINE: return isa.staged_lut4_fine;
    case INT8_WEIGHT: return isa.staged_int8_weight;
    default: return isa.staged_int8;
  }
}

// Arguments of one operation, without the addresses of its values.
inline AttendArgs attend_args(const ProgramCall& call, const AttendOp& op, const AttendOtherOp* other) {
  AttendArgs args = call.attention;
  if (other != nullptr) {
    args.slot_mapping = static_cast<const int64_t*>(call.operands[other->slots]);
    args.block_table = static_cast<const int32_t*>(call.operands[other->table]);
    args.query_start = static_cast<const int32_t*>(call.operands[other->starts]);
    args.seq_lens = static_cast<const int32_t*>(call.operands[other->lengths]);
    args.sequences = call.numel[other->lengths];
    args.blocks = args.sequences ? call.numel[other->table] / args.sequences : 0;
  }
  args.query_heads = op.query_heads, args.kv_heads = op.kv_heads, args.head_dim = op.head_dim;
  args.pages += op.layer * call.layer_bytes;
  args.sinks = op.sinks < 0 ? nullptr : static_cast<const float*>(call.operands[op.sinks]);
  args.window = op.window;
  args.scale = static_cast<float>(call.numbers[op.scale]), args.softcap = static_cast<float>(call.numbers[op.softcap]);
  return args;
}

// Packed codes of a linear layer.
struct WeightRange {
  const char* codes;
  int64_t blocks, block_bytes;
};

inline WeightRange weight_range(const ProgramCall& call, const LinearOp& op) {
  const bool nibbles = op.kind == LUT4 || op.kind == LUT4_FINE;
  const int64_t lines = is_groupwise(op.kind) ? op.columns / GROUP * GroupwiseLayout(layout_of(op.kind), op.columns).group_bytes() / LINE
                        : nibbles             ? op.columns / GROUP * 8
                                              : (op.columns + 3) / 4;
  return {static_cast<const char*>(call.operands[op.weight[0]]), packed_blocks(op.features), lines * LINE};
}

struct Layout {
  const int64_t* slots;  // (kind, domain, width)
  const int64_t* operations;
  int64_t count;
  std::vector<int64_t> offset;  // of each slot
  std::vector<WeightRange> weights;  // of the linear layers, in order
  int64_t shared_bytes = 0, own_bytes = 0, shared_activations = 0, own_activations = 0;
  bool is_one_row;  // then every thread computes the row operations for itself
  int64_t products = 0, layers = 0, shares = 0, counters = 0, attention = 0, attention_bytes = 0, barrier = 0;

  explicit Layout(const ProgramCall& call)
      : slots(call.program + 3), operations(slots + 3 * call.program[2]), count(call.program[2]), offset(count), is_one_row(call.rows[0] == 1) {
    int64_t activations = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (slots[3 * i] == RESULT_SLOT) continue;
      int64_t& size = is_one_row && slots[3 * i] == ROW_SLOT ? own_bytes : shared_bytes;
      offset[i] = size;
      size += aligned(call.rows[slots[3 * i + 1]] * slots[3 * i + 2] * static_cast<int64_t>(sizeof(float)));
    }
    for (const int64_t* op = operations; *op != END; op += op_length(*op)) {
      shares += *op == LINEAR || *op == ATTEND || *op == ATTEND_ALL || *op == ATTEND_OTHER;
      if (*op != LINEAR) continue;
      const LinearOp& linear = fields<LinearOp>(op);
      weights.push_back(weight_range(call, linear));
      const int64_t rows = call.rows[slots[3 * linear.y.slot + 1]];
      activations = std::max(activations, staged(linear.kind).bytes(rows, linear.columns));
      products += linear.features * linear.columns;
      layers += 1;
    }
    int64_t& size = is_one_row ? own_bytes : shared_bytes;
    (is_one_row ? own_activations : shared_activations) = size;
    size += aligned(activations);
    counters = shared_bytes;
    shared_bytes += shares * LINE;
  }

  // Adds room for the barrier and the partial results of attention by `threads` threads, after all that is shared.
  void make_room(const ProgramCall& call, int64_t threads) {
    each_attention(call.program, [&](const AttendOp& op, const AttendOtherOp* other) {
      attention_bytes = std::max(attention_bytes, aligned(attend_scratch_bytes(attend_args(call, op, other), threads)));
    });
    attention = shared_bytes;
    barrier = attention + attention_bytes;
    shared_bytes = barrier + Barrier::bytes(threads);
  }

  int64_t threads(int64_t rows) const {
    const int64_t worth = layers ? (rows + 3) * (products / layers) / SERIAL_PRODUCTS : 1;
    return std::max<int64_t>(1, std::min<int64_t>(omp_get_max_threads(), worth));
  }
};

}  // namespace
}  // namespace infer_native
