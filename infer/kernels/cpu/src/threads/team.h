// Handle of one thread to the team that computes a call: its index, barrier and prefetcher.
#pragma once

#include "threads/barrier.h"

namespace infer_native {

// Software prefetch of the weights that a thread reads after the next barrier: without it memory would idle between two
// products, during norms, attention and waiting.
class WeightPrefetcher {
 public:
  // Sets the bytes to prefetch, in order.
  void set_range(const char* begin, int64_t bytes) {
    at_ = begin;
    end_ = begin + (bytes < MOST ? bytes : MOST);
  }
  // Prefetches up to `lines` more lines into the second-level cache; returns whether there were any.
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
  static constexpr int64_t BURST = 48, TRICKLE = 2;  // lines between two operations, and per turn of a waiting loop

  Team(void* memory, int64_t part, int64_t parts) : part(part), parts(parts), barrier_(memory, part, parts) {}

  // Returns when every thread of the team has called it.
  void synchronize() {
    if (parts > 1) barrier_.arrive_and_wait([this] { return prefetcher.fetch(TRICKLE); });
  }

  bool oversubscribed() const { return barrier_.oversubscribed(); }

  const int64_t part, parts;
  WeightPrefetcher prefetcher;

 private:
  Barrier barrier_;
};

}  // namespace infer_native
