// How many threads are worth having while other processes want the processors, too.
//
// A decode step meets at a barrier five times a layer, and its work is cut beforehand: a thread that is not running
// holds up all others for a time slice, again and again, and two threads beside one busy process were three times as
// slow as one. So threads that are held up twice in a few calls leave the team, for a while that doubles each time the
// whole team is found disturbed again.
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

class Crowd {
 public:
  // Of the `wanted` threads.
  int64_t threads(int64_t wanted, Clock::time_point now) {
    const bool over = now >= until_;
    probing_ = over;
    return over ? wanted : std::min(wanted, most_);
  }

  // After a call by a team of which so many threads were held up.
  void ran(int64_t team, int64_t disturbed, Clock::time_point now) {
    calls_ += 1;
    if (disturbed == 0) {
      if (probing_) pause_ = SHORT;
      return;
    }
    const bool once = pause_ == SHORT && calls_ > FEW_CALLS;  // which happens on a quiet machine, too
    calls_ = 0;
    if (once) return;
    most_ = std::max<int64_t>(1, team - disturbed);
    until_ = now + pause_;
    pause_ = std::min(2 * pause_, LONG);
  }

 private:
  static constexpr std::chrono::milliseconds SHORT{20}, LONG{2000};
  static constexpr int64_t FEW_CALLS = 8;
  int64_t most_ = 1, calls_ = FEW_CALLS;  // calls since a thread was held up
  bool probing_ = true;
  std::chrono::milliseconds pause_ = SHORT;
  Clock::time_point until_{};
};

// Notices whether the processor was taken from the calling thread, for long, since the beginning of the team's call.
class Presence {
 public:
  explicit Presence(Clock::time_point start) : start_(start), before_(spent()) {}

  bool disturbed() const {
    const Spent now = spent();
    const double wall = std::chrono::duration<double>(Clock::now() - start_).count();
    const double away = wall - (now.seconds - before_.seconds);
    // Who sleeps because another holds him up gave the processor away himself.
    return now.taken > before_.taken && away > LEAST && away > SHARE * wall;
  }

 private:
  static constexpr double LEAST = 5e-4, SHARE = 0.2;

  struct Spent {
    double seconds = 0;  // of the processor
    long taken = 0;      // how often it was taken; stays 0 where the system does not tell
  };
  static Spent spent() {
    Spent found;
#if defined(RUSAGE_THREAD)
    timespec now;
    rusage usage;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) != 0 || getrusage(RUSAGE_THREAD, &usage) != 0) return found;
    found.seconds = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
    found.taken = usage.ru_nivcsw;
#endif
    return found;
  }

  Clock::time_point start_;
  Spent before_;
};

}  // namespace
}  // namespace infer_native
