// What one thread of a chain's team does: the program, operation by operation, and where its time went.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "chain_layout.h"

namespace infer_native {
namespace {

constexpr int64_t STRIP_ROWS = 16;  // as in parallel.h: with fewer the work is cut beforehand

// Times of what the first thread did, while someone asked for them.
enum Phase { IN_QUANTIZE, IN_MULTIPLY, IN_ROWS, IN_WAIT, IN_ATTENTION, PHASES };
bool watched = false;
double seconds[PHASES] = {};

class Watch {
 public:
  explicit Watch(bool on) : on_(on) {
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
  Worker(const ChainCall& call, const Layout& layout, char* shared, char* own, int64_t part, int64_t parts)
      : call_(call), layout_(layout), kernels_(active_isa().rows), team_(shared + layout.meetings, part, parts),
        watch_(watched && part == 0), slots_(layout.count) {
    for (int64_t i = 0; i < layout.count; ++i) {
      const int64_t kind = layout.slots[3 * i];
      char* place = layout.alone && kind == ROW_SLOT ? own : shared;
      slots_[i] = kind == RESULT_SLOT ? call.result : reinterpret_cast<float*>(place + layout.offset[i]);
    }
    attention_ = shared + layout.attention, counters_ = shared + layout.counters;
    activations_ = layout.alone ? own + layout.own_activations : shared + layout.shared_activations;
    look_ahead();
  }

  void run() {
    for (const int64_t* op = layout_.operations; *op != END; op += chain_length(*op)) {
      team_.ahead.fetch(Team::BURST);
      switch (*op) {
        case LINEAR: linear(op + 1); break;
        case GATHER: gather(op + 1); break;
        case ATTEND: attend(op + 1); break;
        case ATTEND_ALL: attend_all(op + 1); break;
        default: row_work(op);
      }
    }
  }

 private:
  Rows place(const int64_t* three) const {
    if (three[0] >= 0) return {slots_[three[0]] + three[1], three[2]};
    const int64_t index = -1 - three[0];
    const bool wider = three[2] >= 0 && call_.strides[index] != 0;
    return {static_cast<float*>(call_.operands[index]) + three[1], wider ? call_.strides[index] : three[2]};
  }
  template <class T>
  const T* operand(int64_t index) const {
    return index < 0 ? nullptr : static_cast<const T*>(call_.operands[index]);
  }
  float number(int64_t index) const { return static_cast<float>(call_.numbers[index]); }

  // Of the next operation that is shared piece by piece; every thread asks in the same order.
  std::atomic<int64_t>& counter() { return *reinterpret_cast<std::atomic<int64_t>*>(counters_ + LINE * shared_++); }

  void meet() {
    watch_.lap(IN_ROWS);
    team_.meet();
    watch_.lap(IN_WAIT);
  }

  // The weights that this thread multiplies next, where it is known which.
  void look_ahead() {
    if (layers_ == static_cast<int64_t>(layout_.stretches.size()) || call_.rows[0] >= STRIP_ROWS) return team_.ahead.aim(nullptr, 0);
    const Stretch& next = layout_.stretches[layers_++];
    const int64_t begin = next.blocks * team_.part / team_.parts, end = next.blocks * (team_.part + 1) / team_.parts;
    team_.ahead.aim(next.codes + begin * next.block_bytes, (end - begin) * next.block_bytes);
  }

  // This thread's rows of the domain of a slot, or all of them.
  struct Span {
    int64_t begin, end;
  };
  Span my_rows(int64_t slot) const {
    const int64_t rows = call_.rows[layout_.slots[3 * slot + 1]];
    if (layout_.alone) return {0, rows};
    return {rows * team_.part / team_.parts, rows * (team_.part + 1) / team_.parts};
  }

  void linear(const int64_t* a) {
    const Rows x = place(a + 1), y = place(a + 4);
    const int64_t features = a[7], columns = a[8], m = call_.rows[layout_.slots[3 * a[4] + 1]];
    if (m == 0) return;
    const Staged& layer = staged(a[0]);
    InputGrid grid;
    if (a[0] == INT8) grid.step = operand<float>(a[12]);
    if (a[0] == INT8_BALANCED) grid.multiplier = operand<float>(a[12]);
    // Threads work on rows, but quantize columns of all rows where these are few.
    if (!layout_.alone && !by_rows(m, team_.parts) && a[1] >= 0 && layout_.slots[3 * a[1]] != TEAM_SLOT) meet();
    watch_.lap(IN_ROWS);
    layer.quantize(x.data, x.stride, m, columns, grid, layout_.alone ? 0 : team_.part, layout_.alone ? 1 : team_.parts, activations_);
    watch_.lap(IN_QUANTIZE);
    if (!layout_.alone) meet();
    const float* bias = operand<float>(a[13]);
    const Share share{team_.part, team_.parts, &counter()};
    if (a[0] == LUT4 || a[0] == LUT4_FINE) {
      const Lut4Weight weight{operand<uint8_t>(a[9]), operand<int8_t>(a[10]), operand<int8_t>(a[11]), operand<float>(a[12]), features,
                              columns, a[0] == LUT4 ? 1 : FINE_SCALES};
      layer.multiply(&weight, activations_, m, bias, y, share);
    } else {
      const Int8Weight weight{operand<int8_t>(a[9]), operand<float>(a[10]), features, columns, operand<int32_t>(a[11])};
      layer.multiply(&weight, activations_, m, bias, y, share);
    }
    watch_.lap(IN_MULTIPLY);
    look_ahead();
    meet();
  }

  void gather(const int64_t* a) {
    if (!layout_.alone) meet();
    const Rows x = place(a), y = place(a + 3);
    const int64_t* index = operand<int64_t>(a[7]);
    const Span mine = my_rows(a[3]);
    for (int64_t r = mine.begin; r < mine.end; ++r) std::memcpy(y.row(r), x.row(index[r]), a[6] * sizeof(float));
  }

  void attend(const int64_t* a) {
    if (!layout_.alone) meet();
    AttendArgs args = attend_args(call_, a);
    const auto heads = [&](int64_t at) {
      const Rows x = place(a + at);
      return Heads{x.data, x.stride, a[at + 3]};
    };
    args.query = heads(0), args.key = heads(4), args.value = heads(8);
    args.out = {slots_[a[12]], args.query_heads * args.head_dim, args.head_dim};
    args.scratch = attention_;
    watch_.lap(IN_ROWS);
    attend_in_team(args, team_, counter());
    watch_.lap(IN_ATTENTION);
    meet();
  }

  void attend_all(const int64_t* a) {
    if (!layout_.alone) meet();
    const auto heads = [&](int64_t at, int64_t stride) {
      const Rows x = place(a + at);
      return Heads{x.data, x.stride, stride};
    };
    AttendAllArgs args{heads(0, a[3]), heads(4, a[7]), heads(8, a[11]), heads(12, a[17])};
    args.tokens = call_.tokens, args.batches = call_.rows[0] / call_.tokens;
    args.query_heads = a[15], args.kv_heads = a[16], args.head_dim = a[17];
    args.scale = number(a[23]), args.causal = a[22] != 0;
    if (a[18] >= 0) {
      const int64_t row = call_.strides[a[18]] ? call_.strides[a[18]] : args.tokens;
      args.mask = {call_.operands[a[18]], a[19] != 0, a[20] ? (a[21] ? row * args.tokens : row) : 0, a[21] ? row : 0};
    }
    watch_.lap(IN_ROWS);
    attend_all_in_team(args, counter());
    watch_.lap(IN_ATTENTION);
    meet();
  }

  void row_work(const int64_t* op) {
    const int64_t* a = op + 1;
    switch (*op) {
      case RMS_NORM:
        return each_row(a[3], [&, x = place(a), y = place(a + 3)](int64_t r) {
          for (int64_t h = 0; h < a[6]; ++h)
            kernels_.rms_norm(x.row(r) + h * a[7], operand<float>(a[9]), number(a[10]), number(a[11]), a[8],
                              y.row(r) + h * a[8]);
        });
      case LAYER_NORM:
        return each_row(a[3], [&, x = place(a), y = place(a + 3)](int64_t r) {
          kernels_.layer_norm(x.row(r), operand<float>(a[7]), operand<float>(a[8]), number(a[9]), a[6], y.row(r));
        });
      case ACTIVATE:
        return each_row(a[7], [&, x = place(a + 1), other = place(a + 4), y = place(a + 7)](int64_t r) {
          kernels_.activate(a[0], x.row(r), other.stride < 0 ? nullptr : other.row(r), a[10], y.row(r));
        });
      case ADD:
      case MULTIPLY: {
        const auto combine = *op == ADD ? kernels_.add : kernels_.multiply;
        return each_row(a[6], [&, x = place(a), other = place(a + 3), y = place(a + 6)](int64_t r) {
          combine(x.row(r), other.row(r), a[9], y.row(r));
        });
      }
      case SCALE:
        return each_row(a[3], [&, x = place(a), y = place(a + 3)](int64_t r) {
          kernels_.scale(x.row(r), number(a[7]), a[6], y.row(r));
        });
      case ROTATE:
        return each_row(a[3], [&, x = place(a), y = place(a + 3), cos = place(a + 10), sin = place(a + 13)](int64_t r) {
          for (int64_t h = 0; h < a[6]; ++h)
            kernels_.rotate(x.row(r) + h * a[7], cos.row(r), sin.row(r), a[9], a[8], y.row(r) + h * a[8]);
        });
      default:  // COPY
        return each_row(a[3], [&, x = place(a), y = place(a + 3)](int64_t r) {
          for (int64_t h = 0; h < a[6]; ++h)
            std::memcpy(y.row(r) + h * a[8], x.row(r) + h * a[7], a[8] * sizeof(float));
        });
    }
  }

  template <class Function>
  void each_row(int64_t slot, Function function) const {
    const Span mine = my_rows(slot);
    // The result belongs to all: with threads of their own row work one of them writes it.
    if (layout_.alone && layout_.slots[3 * slot] == RESULT_SLOT && team_.part != 0) return;
    for (int64_t r = mine.begin; r < mine.end; ++r) function(r);
  }

  const ChainCall& call_;
  const Layout& layout_;
  const RowKernels& kernels_;
  Team team_;
  Watch watch_;
  std::vector<float*> slots_;
  char *activations_, *attention_, *counters_;
  int64_t shared_ = 0, layers_ = 0;
};

}  // namespace
}  // namespace infer_native
