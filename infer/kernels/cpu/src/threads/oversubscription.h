// Team size under CPU oversubscription: fewer threads while other processes use the processors.
//
// A decode step has five barriers per layer and static partitions of work, so that a preempted thread delays all others
// by a time slice, again and again: two threads beside one busy process were three times as slow as one. Threads that
// are delayed twice within a few calls leave the team, for a time that doubles whenever the full team is delayed again.
#pragma once

#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace infer_native {
namespace {

using Clock = std::chrono::steady_clock;

class TeamSize {
 public:
  // Returns how many of the `wanted` threads the next call starts.
  int64_t limit(int64_t wanted, Clock::time_point now) {
    const bool over = now >= until_;
    probing_ = over;
    return over ? wanted : std::min(wanted, most_);
  }

  // Records a call by a team of which `delayed` threads were delayed.
  void record(int64_t team, int64_t delayed, Clock::time_point now) {
    calls_ += 1;
    if (delayed == 0) {
      if (probing_) pause_ = SHORT;
      return;
    }
    const bool once = pause_ == SHORT && calls_ > FEW_CALLS;  // happens on an idle machine too
    calls_ = 0;
    if (once) return;
    most_ = std::max<int64_t>(1, team - delayed);
    until_ = now + pause_;
    pause_ = std::min(2 * pause_, LONG);
  }

 private:
  static constexpr std::chrono::milliseconds SHORT{20}, LONG{2000};
  static constexpr int64_t FEW_CALLS = 8;
  int64_t most_ = 1, calls_ = FEW_CALLS;  // calls since a thread was delayed
  bool probing_ = true;
  std::chrono::milliseconds pause_ = SHORT;
  Clock::time_point until_{};
};

// Detects whether the calling thread was preempted, for a notable time, since the team's call began.
class PreemptionProbe {
 public:
  explicit PreemptionProbe(Clock::time_point start) : start_(start), before_(spent()) {}

  bool preempted() const {
    const Spent now = spent();
    const double wall = std::chrono::duration<double>(Clock::now() - start_).count();
    const double away = wall - (now.seconds - before_.seconds);
    // Sleeping in a barrier is a voluntary context switch and counts for nothing.
    return now.preemptions > before_.preemptions && away > LEAST && away > SHARE * wall;
  }

 private:
  static constexpr double LEAST = 5e-4, SHARE = 0.2;

  struct Spent {
    double seconds = 0;    // CPU time
    long preemptions = 0;  // involuntary context switches; 0 where the system does not count them
  };
  static Spent spent() {
    Spent found;
#if defined(RUSAGE_THREAD)
    timespec now;
    rusage usage;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) != 0 || getrusage(RUSAGE_THREAD, &usage) != 0) return found;
    found.seconds = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
    found.preemptions = usage.ru_nivcsw;
#endif
    return found;
  }

  Clock::time_point start_;
  Spent before_;
};

}  // namespace
}  // namespace infer_native
