// One thread's view of the team that computes a call together.
#pragma once

#include "threads/barrier.h"

namespace infer_native {

// Asks memory for what its thread reads after the next meeting, while the thread has nothing to ask for itself: between
// two products memory would idle for as long as norms, attention and waiting take.
class Ahead {
 public:
  // From now on for these bytes, in order.
  void aim(const char* begin, int64_t bytes) {
    at_ = begin;
    end_ = begin + (bytes < MOST ? bytes : MOST);
  }
  // Up to `lines` more of them, into the second-level cache; whether there were any.
  bool fetch(int64_t lines) {
    const char* const stop = end_ - at_ > lines * LINE_BYTES ? at_ + lines * LINE_BYTES : end_;
    if (at_ >= stop) return false;
    for (; at_ < stop; at_ += LINE_BYTES) __builtin_prefetch(at_, 0, 2);
    return true;
  }

 private:
  static constexpr int64_t LINE_BYTES = 64, MOST = 64 << 10;  // a fraction of any second-level cache
  const char *at_ = nullptr, *end_ = nullptr;
};

class Team {
 public:
  static constexpr int64_t BURST = 48, TRICKLE = 2;  // lines between two pieces of work, and while waiting

  Team(void* memory, int64_t part, int64_t parts) : part(part), parts(parts), barrier_(memory, part, parts) {}

  void meet() {
    if (parts > 1) barrier_.meet([this] { return ahead.fetch(TRICKLE); });
  }

  bool crowded() const { return barrier_.crowded(); }

  const int64_t part, parts;
  Ahead ahead;

 private:
  Barrier barrier_;
};

}  // namespace infer_native
