#include "fused_program/fused_program.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "fused_program/fused_program_worker.h"
#include "fused_program/row_pieces.h"
#include "threads/oversubscription.h"

namespace infer_native {
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

namespace {

struct Free {
  void operator()(char* pointer) const { std::free(pointer); }
};

// Memory for values that the calling thread keeps between calls. Uninitialized.
class KeptBuffer {
 public:
  char* of(int64_t wanted) {
    if (wanted > size_) {
      release();
      memory_.reset(static_cast<char*>(std::aligned_alloc(LINE, aligned(wanted + wanted / 4))));
      if (!memory_) throw std::bad_alloc();
      size_ = wanted;
    }
    return memory_.get();
  }
  void release_if_large() {
    if (size_ > KEPT_BYTES) release();
  }

 private:
  static constexpr int64_t KEPT_BYTES = 256 << 20;

  void release() { memory_.reset(), size_ = 0; }

  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

// Runs the operations one after another, each on all threads of a team.
void run_in_team(const ProgramCall& call, Layout& layout, int64_t threads) {
  thread_local KeptBuffer buffer;
  thread_local TeamSize team_size;
  const bool static_partition = threads > 1 && call.rows[0] < STRIP_ROWS;
  if (threads > 1) threads = team_size.limit(threads, Clock::now());
  layout.make_room(call, threads);
  char* shared = buffer.of(layout.shared_bytes + threads * layout.own_bytes + LINE);
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
  buffer.release_if_large();
}

// Runs the whole program on one piece of the rows after another, each on one thread.
void run_pieces(const RowPieces& pieces, int64_t threads) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    std::vector<int64_t> starts;
    for (int64_t index = next.fetch_add(1); index < pieces.count(); index = next.fetch_add(1)) {
      try {
        const ProgramCall part = pieces.call_of(index, starts);
        Layout layout(part);
        run_in_team(part, layout, 1);
      } catch (const std::bad_alloc&) {  // which may not leave the parallel region
        out_of_memory = true;
      }
    }
  }
  if (out_of_memory) throw std::bad_alloc();
}

}  // namespace

void run_program(const ProgramCall& call) {
  if (call.rows[0] == 0) return;
  Layout layout(call);
  const int64_t threads = layout.threads(call.rows[0]);
  const RowPieces pieces(call, threads);
  if (pieces.pay()) return run_pieces(pieces, threads);
  run_in_team(call, layout, threads);
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
