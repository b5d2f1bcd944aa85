// One thread of a fused program: runs the operations in order and times its phases.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "fused_program/fused_program_layout.h"

namespace infer_native {
namespace {

constexpr int64_t STRIP_ROWS = 16;  // as in parallel_linear.h: with fewer the partition is static

// Seconds of the first thread by phase, while profiling.
enum Phase { IN_QUANTIZE, IN_MULTIPLY, IN_ROWS, IN_WAIT, IN_ATTENTION, PHASES };
bool profiling = false;
double seconds[PHASES] = {};

class PhaseTimer {
 public:
  explicit PhaseTimer(bool on) : on_(on) {
    if (on_) last_ = std::chrono::steady_clock::now();
  }
  void lap(Phase phase) {
    if (!on_) return;
    const auto now = std::chrono::steady_clock::now();
    seconds[phase] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  bool on_;
  std::chrono::steady_clock::time_point last_;
};

class Worker {
 public:
  Worker(const ProgramCall& call, const Layout& layout, char* shared, char* own, int64_t part, int64_t parts)
      : call_(call), layout_(layout), kernels_(active_isa().rows), team_(shared + layout.barrier, part, parts),
        timer_(profiling && omp_get_thread_num() == 0), slots_(layout.count) {
    for (int64_t i = 0; i < layout.count; ++i) {
      const int64_t kind = layout.slots[3 * i];
      char* place = layout.is_one_row && kind == ROW_SLOT ? own : shared;
      slots_[i] = kind == RESULT_SLOT ? call.result : reinterpret_cast<float*>(place + layout.offset[i]);
    }
    attention_ = shared + layout.attention, counters_ = shared + layout.counters;
    activations_ = layout.is_one_row ? own + layout.own_activations : shared + layout.shared_activations;
    set_prefetch_range();
  }

  void run() {
    for (const int64_t* op = layout_.operations; *op != END; op += op_length(*op)) {
      team_.prefetcher.fetch(Team::BURST);
      switch (*op) {
        case LINEAR: linear(fields<LinearOp>(op)); break;
        case GATHER: gather(fields<GatherOp>(op)); break;
        case ATTEND: attend(fields<AttendOp>(op), nullptr); break;
        case ATTEND_OTHER: attend(fields<AttendOtherOp>(op).attend, &fields<AttendOtherOp>(op)); break;
        case ATTEND_ALL: attend_all(fields<AttendAllOp>(op)); break;
        default: row_work(op);
      }
    }
  }

  bool oversubscribed() const { return team_.oversubscribed(); }

 private:
  Rows rows_at(const Place& place) const {
    if (place.slot >= 0) return {slots_[place.slot] + place.offset, place.stride};
    const int64_t index = -1 - place.slot;
    const bool wider = place.stride >= 0 && call_.strides[index] != 0;
    const int64_t stride = wider ? call_.strides[index] : place.stride;
    return {static_cast<float*>(call_.operands[index]) + place.offset + call_.first_row * std::max<int64_t>(stride, 0), stride};
  }
  Heads heads(const HeadsPlace& place) const {
    const Rows rows = rows_at(place.rows);
    return {rows.data, rows.stride, place.head_stride};
  }
  template <class T>
  const T* operand(int64_t index) const {
    return index < 0 ? nullptr : static_cast<const T*>(call_.operands[index]);
  }
  float number(int64_t index) const { return static_cast<float>(call_.numbers[index]); }

  // Counter of the next operation whose work is claimed piece by piece; threads take counters in the same order.
  std::atomic<int64_t>& counter() { return *reinterpret_cast<std::atomic<int64_t>*>(counters_ + LINE * shared_++); }

  void synchronize() {
    timer_.lap(IN_ROWS);
    team_.synchronize();
    timer_.lap(IN_WAIT);
  }

  // Prefetch the weights that this thread multiplies next, where these are known.
  void set_prefetch_range() {
    if (layers_ == static_cast<int64_t>(layout_.weights.size()) || call_.rows[0] >= STRIP_ROWS) return team_.prefetcher.set_range(nullptr, 0);
    const WeightRange& next = layout_.weights[layers_++];
    const int64_t begin = next.blocks * team_.part / team_.parts, end = next.blocks * (team_.part + 1) / team_.parts;
    team_.prefetcher.set_range(next.codes + begin * next.block_bytes, (end - begin) * next.block_bytes);
  }

  // Rows of a slot's domain that this thread computes, maybe all of them.
  struct Span {
    int64_t begin, end;
  };
  Span my_rows(int64_t slot) const {
    const int64_t rows = call_.rows[layout_.slots[3 * slot + 1]];
    if (layout_.is_one_row) return {0, rows};
    return {rows * team_.part / team_.parts, rows * (team_.part + 1) / team_.parts};
  }

  void linear(const LinearOp& op) {
    const Rows x = rows_at(op.x), y = rows_at(op.y);
    const int64_t features = op.features, columns = op.columns, m = call_.rows[layout_.slots[3 * op.y.slot + 1]];
    if (m == 0) return;
    const Staged& layer = staged(op.kind);
    InputGrid grid;
    if (op.kind == INT8) grid.step = operand<float>(op.weight[3]);
    if (op.kind == INT8_BALANCED) grid.multiplier = operand<float>(op.weight[3]);
    if (is_groupwise(op.kind)) grid.zero = GroupwiseLayout(layout_of(op.kind), columns).integer_zero();
    // Threads work on rows, but quantize columns of all rows where these are few.
    if (!layout_.is_one_row && !by_rows(m, team_.parts) && op.x.slot >= 0 && layout_.slots[3 * op.x.slot] != TEAM_SLOT) synchronize();
    timer_.lap(IN_ROWS);
    layer.quantize(x.data, x.stride, m, columns, grid, layout_.is_one_row ? 0 : team_.part, layout_.is_one_row ? 1 : team_.parts, activations_);
    timer_.lap(IN_QUANTIZE);
    if (!layout_.is_one_row) synchronize();
    const float* bias = operand<float>(op.bias);
    const Share share{team_.part, team_.parts, &counter()};
    if (op.kind == LUT4 || op.kind == LUT4_FINE) {
      const Lut4Weight weight{operand<uint8_t>(op.weight[0]), operand<int8_t>(op.weight[1]), operand<int8_t>(op.weight[2]),
                              operand<float>(op.weight[3]), features, columns, op.kind == LUT4 ? 1 : FINE_SCALES};
      layer.multiply(&weight, activations_, m, bias, y, share);
    } else if (is_groupwise(op.kind)) {
      const GroupwiseWeight weight{operand<uint8_t>(op.weight[0]), operand<uint8_t>(op.weight[1]),
                                   operand<int8_t>(op.weight[2]), features, columns, layout_of(op.kind)};
      layer.multiply(&weight, activations_, m, bias, y, share);
    } else {
      const Int8Weight weight{operand<int8_t>(op.weight[0]), operand<float>(op.weight[1]), features, columns,
                              operand<int32_t>(op.weight[2])};
      layer.multiply(&weight, activations_, m, bias, y, share);
    }
    timer_.lap(IN_MULTIPLY);
    set_prefetch_range();
    synchronize();
  }

  void gather(const GatherOp& op) {
    if (!layout_.is_one_row) synchronize();
    const Rows x = rows_at(op.x), y = rows_at(op.y);
    const int64_t* index = operand<int64_t>(op.rows);
    const Span mine = my_rows(op.y.slot);
    for (int64_t r = mine.begin; r < mine.end; ++r) std::memcpy(y.row(r), x.row(index[r]), op.width * sizeof(float));
  }

  void attend(const AttendOp& op, const AttendOtherOp* other) {
    if (!layout_.is_one_row) synchronize();
    AttendArgs args = attend_args(call_, op, other);
    args.query = heads(op.query), args.key = heads(op.key), args.value = heads(op.value);
    args.out = {slots_[op.y_slot], args.query_heads * args.head_dim, args.head_dim};
    args.scratch = attention_;
    timer_.lap(IN_ROWS);
    attend_in_team(args, team_, counter());
    timer_.lap(IN_ATTENTION);
    synchronize();
  }

  void attend_all(const AttendAllOp& op) {
    if (!layout_.is_one_row) synchronize();
    AttendAllArgs args{heads(op.query), heads(op.key), heads(op.value), heads({op.y, op.head_dim})};
    args.tokens = call_.tokens, args.starts = call_.starts;
    args.batches = call_.starts == nullptr ? call_.rows[0] / call_.tokens : call_.sequences;
    args.query_heads = op.query_heads, args.kv_heads = op.kv_heads, args.head_dim = op.head_dim;
    args.scale = number(op.scale), args.causal = op.causal != 0;
    if (op.mask >= 0 && call_.starts == nullptr) {
      const int64_t row = call_.strides[op.mask] ? call_.strides[op.mask] : args.tokens;
      const int64_t batch = op.mask_has_batches ? (op.mask_has_rows ? row * args.tokens : row) : 0;
      const int64_t skipped = call_.first_sequence * batch * (op.mask_is_float ? sizeof(float) : sizeof(bool));
      args.mask = {static_cast<const char*>(call_.operands[op.mask]) + skipped, op.mask_is_float != 0, batch, op.mask_has_rows ? row : 0};
    }
    timer_.lap(IN_ROWS);
    attend_all_in_team(args, counter());
    timer_.lap(IN_ATTENTION);
    synchronize();
  }

  // The operation at `code`, whose rows are independent of each other.
  void row_work(const int64_t* code) {
    switch (*code) {
      case RMS_NORM: {
        const RmsNormOp& op = fields<RmsNormOp>(code);
        return each_row(op.y.slot, [&, x = rows_at(op.x), y = rows_at(op.y)](int64_t r) {
          for (int64_t h = 0; h < op.heads; ++h)
            kernels_.rms_norm(x.row(r) + h * op.head_stride, operand<float>(op.weight), number(op.offset), number(op.eps),
                              op.width, y.row(r) + h * op.width);
        });
      }
      case LAYER_NORM: {
        const LayerNormOp& op = fields<LayerNormOp>(code);
        return each_row(op.y.slot, [&, x = rows_at(op.x), y = rows_at(op.y)](int64_t r) {
          kernels_.layer_norm(x.row(r), operand<float>(op.weight), operand<float>(op.bias), number(op.eps), op.width, y.row(r));
        });
      }
      case ACTIVATE: {
        const ActivateOp& op = fields<ActivateOp>(code);
        return each_row(op.y.slot, [&, x = rows_at(op.x), other = rows_at(op.other), y = rows_at(op.y)](int64_t r) {
          kernels_.activate(op.activation, x.row(r), other.stride < 0 ? nullptr : other.row(r), op.width, y.row(r));
        });
      }
      case ADD:
      case MULTIPLY: {
        const CombineOp& op = fields<CombineOp>(code);
        const auto combine = *code == ADD ? kernels_.add : kernels_.multiply;
        return each_row(op.y.slot, [&, x = rows_at(op.x), other = rows_at(op.other), y = rows_at(op.y)](int64_t r) {
          combine(x.row(r), other.row(r), op.width, y.row(r));
        });
      }
      case SCALE: {
        const ScaleOp& op = fields<ScaleOp>(code);
        return each_row(op.y.slot, [&, x = rows_at(op.x), y = rows_at(op.y)](int64_t r) {
          kernels_.scale(x.row(r), number(op.factor), op.width, y.row(r));
        });
      }
      case ROTATE: {
        const RotateOp& op = fields<RotateOp>(code);
        return each_row(op.y.slot, [&, x = rows_at(op.x), y = rows_at(op.y), cos = rows_at(op.cos), sin = rows_at(op.sin)](int64_t r) {
          for (int64_t h = 0; h < op.heads; ++h)
            kernels_.rotate(x.row(r) + h * op.head_stride, cos.row(r), sin.row(r), op.rotated, op.head_width,
                            y.row(r) + h * op.head_width);
        });
      }
      default: {  // COPY
        const CopyOp& op = fields<CopyOp>(code);
        return each_row(op.y.slot, [&, x = rows_at(op.x), y = rows_at(op.y)](int64_t r) {
          for (int64_t h = 0; h < op.heads; ++h)
            std::memcpy(y.row(r) + h * op.head_width, x.row(r) + h * op.head_stride, op.head_width * sizeof(float));
        });
      }
    }
  }

  template <class Function>
  void each_row(int64_t slot, Function function) const {
    const Span mine = my_rows(slot);
    // Where every thread computes all rows, only one of them writes the result.
    if (layout_.is_one_row && layout_.slots[3 * slot] == RESULT_SLOT && team_.part != 0) return;
    for (int64_t r = mine.begin; r < mine.end; ++r) function(r);
  }

  const ProgramCall& call_;
  const Layout& layout_;
  const RowKernels& kernels_;
  Team team_;
  PhaseTimer timer_;
  std::vector<float*> slots_;
  char *activations_, *attention_, *counters_;
  int64_t shared_ = 0, layers_ = 0;
};

}  // namespace
}  // namespace infer_native
