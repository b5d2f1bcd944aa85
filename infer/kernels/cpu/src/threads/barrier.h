// Dissemination barrier of a team of threads, for steps with a hundred barriers in a few milliseconds.
//
// OpenMP's barrier makes a system call whenever the last thread arrives, and its waiting threads can do nothing else.
// Here, in round r, thread i signals thread i + 2^r and waits for the signal of thread i - 2^r (Hensgen, Finkel and
// Manber 1988): with two threads that is one cache line in each direction. A waiting thread calls the caller's idle
// function while that has work, then spins, then sleeps on a futex: a thread that spins on the processor which the awaited
// one needs keeps it from arriving. Where both were last seen on one processor, it sleeps without spinning.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace infer_native {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns the processor that runs the calling thread; -1 where the system does not tell.
inline int32_t current_processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

class Barrier {
 public:
  // Returns the size of the memory for `parts` threads, which is aligned to 64 bytes and zeroed before the first arrives.
  static int64_t bytes(int64_t parts) { return parts * rounds(parts) * SPACE; }

  Barrier(void* memory, int64_t part, int64_t parts)
      : memory_(static_cast<char*>(memory)), part_(part), parts_(parts), rounds_(rounds(parts)) {}

  // Returns when every thread of the team has arrived; meanwhile calls idle(), which returns whether it did useful work.
  template <class Idle>
  void arrive_and_wait(Idle idle) {
    phase_ += 1;
    const int32_t here = current_processor();
    bool shared = false;
    for (int64_t round = 0; round < rounds_; ++round) {
      const int64_t distance = int64_t{1} << round;
      signal(flag_of((part_ + distance) % parts_, round), here);
      Flag& mine = flag_of(part_, round);
      const bool same_processor = here >= 0 && mine.processor.load(std::memory_order_relaxed) == here + 1;
      shared |= same_processor && part_ >= distance;  // of two threads on one processor the later one counts
      wait(mine.state, idle, same_processor);
    }
    shared_phases_ += shared;
  }
  void arrive_and_wait() {
    arrive_and_wait([] { return false; });
  }

  // Returns whether the thread shared a processor with an earlier one in more than half of the phases.
  bool oversubscribed() const { return 2 * shared_phases_ > phase_; }

 private:
  using State = std::atomic<uint32_t>;  // twice the phase of the signalling thread; odd: the waiting thread sleeps
  struct Flag {
    State state;
    std::atomic<int32_t> processor;  // of the signalling thread at its last signal, plus one; 0 before
  };
  static constexpr int64_t SPACE = 128;  // bytes between flags: processors may fetch cache lines in pairs
  static constexpr int SPINS = 64;       // between two readings of the clock
  static constexpr std::chrono::microseconds SPIN_TIME{50};
  static_assert(sizeof(State) == sizeof(uint32_t), "a futex is 32 bits wide");

  static int64_t rounds(int64_t parts) {
    int64_t found = 0;
    while ((int64_t{1} << found) < parts) ++found;
    return found;
  }

  Flag& flag_of(int64_t part, int64_t round) const { return *reinterpret_cast<Flag*>(memory_ + (part * rounds_ + round) * SPACE); }

  void signal(Flag& other, int32_t here) const {
    other.processor.store(here + 1, std::memory_order_relaxed);
    if (other.state.exchange(2 * phase_, std::memory_order_seq_cst) & 1) wake(other.state);
  }

  // The signalling thread may be one phase ahead.
  bool arrived(uint32_t value) const { return static_cast<int32_t>((value >> 1) - phase_) >= 0; }

  template <class Idle>
  void wait(State& mine, Idle idle, bool same_processor) const {
    const auto has_arrived = [&] { return arrived(mine.load(std::memory_order_acquire)); };
    if (has_arrived()) return;
    if (!same_processor) {
      const auto until = std::chrono::steady_clock::now() + SPIN_TIME;
      do {
        for (int spin = 0; spin < SPINS;) {
          if (has_arrived()) return;
          if (!idle()) relax(), ++spin;
        }
      } while (std::chrono::steady_clock::now() < until);
    }
    for (uint32_t seen = mine.load(std::memory_order_acquire); !arrived(seen); seen = mine.load(std::memory_order_acquire))
      if ((seen & 1) != 0 || mine.compare_exchange_weak(seen, seen | 1, std::memory_order_seq_cst)) sleep(mine, seen | 1);
  }

#if defined(__linux__)
  static void sleep(State& state, uint32_t seen) { syscall(SYS_futex, &state, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
  static void wake(State& state) { syscall(SYS_futex, &state, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }
#else
  static void sleep(State&, uint32_t) { std::this_thread::yield(); }
  static void wake(State&) {}
#endif

  char* memory_;
  int64_t part_, parts_, rounds_;
  uint32_t phase_ = 0, shared_phases_ = 0;
};

}  // namespace infer_native
