// Where the threads of a team wait for each other, for steps that meet a hundred times in a few milliseconds.
//
// OpenMP's barrier makes a system call whenever the last thread arrives, and its waiting threads can do nothing else.
// Here a thread tells those 1, 2, 4, … places after it that it has arrived, once those before it have told it the same
// (Hensgen, Finkel and Manber 1988): with two threads that is one line of memory each way. Who waits calls a function of
// the caller's as long as that has something to do, and sleeps when it takes long: a thread that spins on the processor
// that the awaited one needs keeps it from arriving. Where both were last seen on one processor, it sleeps at once.
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

// Processor that runs the calling thread; -1 where the system does not tell.
inline int32_t processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

class Barrier {
 public:
  // Of the memory for so many threads, at a multiple of 64. It must be zero before the first of them meets.
  static int64_t bytes(int64_t parts) { return parts * rounds(parts) * SPACE; }

  Barrier(void* memory, int64_t part, int64_t parts)
      : memory_(static_cast<char*>(memory)), part_(part), parts_(parts), rounds_(rounds(parts)) {}

  // Returns when every thread of the team has called it as often; idle() says whether it did something useful.
  template <class Idle>
  void meet(Idle idle) {
    meetings_ += 1;
    const int32_t here = processor();
    bool shared = false;
    for (int64_t round = 0; round < rounds_; ++round) {
      const int64_t distance = int64_t{1} << round;
      tell(line((part_ + distance) % parts_, round), here);
      Line& mine = line(part_, round);
      const bool together = here >= 0 && mine.processor.load(std::memory_order_relaxed) == here + 1;
      shared |= together && part_ >= distance;  // of two threads on one processor the later one counts
      wait(mine.flag, idle, together);
    }
    shared_ += shared;
  }
  void meet() {
    meet([] { return false; });
  }

  // Whether the thread was on the processor of one before it at most of its meetings: the team has a thread too many.
  bool crowded() const { return 2 * shared_ > meetings_; }

 private:
  using Flag = std::atomic<uint32_t>;  // meetings of the thread that tells, times two; odd: the one who is told sleeps
  struct Line {
    Flag flag;
    std::atomic<int32_t> processor;  // of the one who tells when it last told, plus one; 0 before
  };
  static constexpr int64_t SPACE = 128;  // a processor may fetch lines in pairs
  static constexpr int SPINS = 64;       // between two looks at the clock
  static constexpr std::chrono::microseconds SPIN_TIME{50};
  static_assert(sizeof(Flag) == sizeof(uint32_t), "what a futex is");

  static int64_t rounds(int64_t parts) {
    int64_t found = 0;
    while ((int64_t{1} << found) < parts) ++found;
    return found;
  }

  Line& line(int64_t part, int64_t round) const { return *reinterpret_cast<Line*>(memory_ + (part * rounds_ + round) * SPACE); }

  void tell(Line& other, int32_t here) const {
    other.processor.store(here + 1, std::memory_order_relaxed);
    if (other.flag.exchange(2 * meetings_, std::memory_order_seq_cst) & 1) wake(other.flag);
  }

  // Who tells may be one meeting further already.
  bool told(uint32_t value) const { return static_cast<int32_t>((value >> 1) - meetings_) >= 0; }

  template <class Idle>
  void wait(Flag& mine, Idle idle, bool together) const {
    const auto told_now = [&] { return told(mine.load(std::memory_order_acquire)); };
    if (told_now()) return;
    if (!together) {
      const auto until = std::chrono::steady_clock::now() + SPIN_TIME;
      do {
        for (int spin = 0; spin < SPINS;) {
          if (told_now()) return;
          if (!idle()) relax(), ++spin;
        }
      } while (std::chrono::steady_clock::now() < until);
    }
    for (uint32_t seen = mine.load(std::memory_order_acquire); !told(seen); seen = mine.load(std::memory_order_acquire))
      if ((seen & 1) != 0 || mine.compare_exchange_weak(seen, seen | 1, std::memory_order_seq_cst)) sleep(mine, seen | 1);
  }

#if defined(__linux__)
  static void sleep(Flag& flag, uint32_t seen) { syscall(SYS_futex, &flag, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
  static void wake(Flag& flag) { syscall(SYS_futex, &flag, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }
#else
  static void sleep(Flag&, uint32_t) { std::this_thread::yield(); }
  static void wake(Flag&) {}
#endif

  char* memory_;
  int64_t part_, parts_, rounds_;
  uint32_t meetings_ = 0, shared_ = 0;
};

}  // namespace infer_native
