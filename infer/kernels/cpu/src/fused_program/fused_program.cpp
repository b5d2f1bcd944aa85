#include "fused_program/fused_program.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "fused_program/fused_program_worker.h"
#include "threads/oversubscription.h"

namespace infer_native {
namespace {

constexpr int64_t KEPT_BYTES = 256 << 20;  // a larger buffer is freed after the call

struct Free {
  void operator()(char* pointer) const { std::free(pointer); }
};

}  // namespace

namespace {

template <class Op>
constexpr int64_t length_of() {
  return 1 + sizeof(Op) / sizeof(int64_t);
}

}  // namespace

int64_t op_length(int64_t code) {
  switch (code) {
    case LINEAR: return length_of<LinearOp>();
    case RMS_NORM: return length_of<RmsNormOp>();
    case LAYER_NORM: return length_of<LayerNormOp>();
    case ACTIVATE: return length_of<ActivateOp>();
    case ADD:
    case MULTIPLY: return length_of<CombineOp>();
    case SCALE: return length_of<ScaleOp>();
    case ROTATE: return length_of<RotateOp>();
    case GATHER: return length_of<GatherOp>();
    case COPY: return length_of<CopyOp>();
    case ATTEND: return length_of<AttendOp>();
    case ATTEND_ALL: return length_of<AttendAllOp>();
    case ATTEND_OTHER: return length_of<AttendOtherOp>();
    default: return 0;
  }
}

void run_program(const ProgramCall& call) {
  thread_local std::unique_ptr<char, Free> buffer;
  thread_local int64_t size = 0;
  if (call.rows[0] == 0) return;
  Layout layout(call);
  thread_local TeamSize team_size;
  int64_t threads = layout.threads(call.rows[0]);
  const bool static_partition = threads > 1 && call.rows[0] < STRIP_ROWS;
  if (threads > 1) threads = team_size.limit(threads, Clock::now());
  layout.make_room(call, threads);
  const int64_t wanted = layout.shared_bytes + threads * layout.own_bytes + LINE;
  if (wanted > size) {
    buffer.reset();
    size = 0;
    buffer.reset(static_cast<char*>(std::aligned_alloc(LINE, aligned(wanted + wanted / 4))));
    if (!buffer) throw std::bad_alloc();
    size = wanted;
  }
  char* shared = buffer.get();
  char* own = shared + layout.shared_bytes;
  std::memset(shared + layout.barrier, 0, static_cast<size_t>(Barrier::bytes(threads)));
  for (int64_t i = 0; i < layout.shares; ++i) new (shared + layout.counters + LINE * i) std::atomic<int64_t>(0);
  if (threads == 1) {
    Worker(call, layout, shared, own, 0, 1).run();
  } else {
    std::atomic<int64_t> delayed{0};
    const Clock::time_point start = Clock::now();
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      const PreemptionProbe probe(start);
      const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
      Worker worker(call, layout, shared, own + part * layout.own_bytes, part, parts);
      worker.run();
      if (worker.oversubscribed() || (static_partition && probe.preempted())) delayed.fetch_add(1, std::memory_order_relaxed);
    }
    team_size.record(threads, delayed.load(), Clock::now());
  }
  if (size > KEPT_BYTES) buffer.reset(), size = 0;
}

}  // namespace infer_native

// Starts or stops the profile, and returns the first thread's seconds of quantization, products, row operations, barriers
// and attention since the last call.
extern "C" __attribute__((visibility("default"))) void infer_chain_watch(int on, double* spent) {
  using namespace infer_native;
  if (spent != nullptr) std::copy(seconds, seconds + PHASES, spent);
  std::fill(seconds, seconds + PHASES, 0.0);
  profiling = on != 0;
}
