// Where the threads of a team wait for each other, for steps that meet a hundred times in a few milliseconds.
//
// OpenMP's barrier makes a system call whenever the last thread arrives, and its waiting threads can do nothing else.
// Here a thread tells those 1, 2, 4, … places after it that it has arrived, once those before it have told it the same
// (Hensgen, Finkel and Manber 1988): with two threads that is one line of memory each way. Who waits calls a function of
// the caller's as long as that has something to do, and sleeps when it takes long.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
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
    for (int64_t round = 0; round < rounds_; ++round) {
      tell(flag((part_ + (int64_t{1} << round)) % parts_, round));
      wait(flag(part_, round), idle);
    }
  }
  void meet() {
    meet([] { return false; });
  }

 private:
  using Flag = std::atomic<uint32_t>;  // meetings of the thread that tells, times two; odd: the one who is told sleeps
  static constexpr int64_t SPACE = 128;  // a processor may fetch lines in pairs
  static constexpr int SPINS = 20000;    // about a millisecond
  static_assert(sizeof(Flag) == sizeof(uint32_t), "what a futex is");

  static int64_t rounds(int64_t parts) {
    int64_t found = 0;
    while ((int64_t{1} << found) < parts) ++found;
    return found;
  }

  Flag& flag(int64_t part, int64_t round) const { return *reinterpret_cast<Flag*>(memory_ + (part * rounds_ + round) * SPACE); }

  void tell(Flag& other) const {
    if (other.exchange(2 * meetings_, std::memory_order_seq_cst) & 1) wake(other);
  }

  // Who tells may be one meeting further already.
  bool told(uint32_t value) const { return static_cast<int32_t>((value >> 1) - meetings_) >= 0; }

  template <class Idle>
  void wait(Flag& mine, Idle idle) const {
    for (int spin = 0; spin < SPINS;) {
      if (told(mine.load(std::memory_order_acquire))) return;
      if (!idle()) relax(), ++spin;
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
  uint32_t meetings_ = 0;
};

}  // namespace infer_native
