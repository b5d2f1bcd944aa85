// Test of the barrier: prints each failed expectation and exits 1 if there is any.
#include "threads/barrier.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

using namespace infer_native;

namespace {

std::atomic<int> wrong{0};

// No thread leaves a phase before all have arrived; in every `late`th phase one arrives so late that the others sleep.
void team(int64_t parts, int64_t phases, int64_t late) {
  void* const memory = std::aligned_alloc(64, static_cast<size_t>(Barrier::bytes(parts) + 64));
  std::memset(memory, 0, static_cast<size_t>(Barrier::bytes(parts)));
  std::vector<std::atomic<int64_t>> arrived(parts);
  std::atomic<int64_t> idle{0};
  std::vector<std::thread> threads;
  for (int64_t part = 0; part < parts; ++part)
    threads.emplace_back([&, part] {
      Barrier barrier(memory, part, parts);
      for (int64_t phase = 1; phase <= phases; ++phase) {
        if (late != 0 && phase % late == 0 && phase % parts == part) std::this_thread::sleep_for(std::chrono::milliseconds(30));
        arrived[part].store(phase, std::memory_order_relaxed);
        int64_t left = 3;  // units of useful work
        barrier.arrive_and_wait([&] { return left > 0 && left-- > 0; });
        idle += 3 - left;
        for (int64_t other = 0; other < parts; ++other)
          if (arrived[other].load(std::memory_order_relaxed) < phase) wrong = 1;
      }
    });
  for (std::thread& thread : threads) thread.join();
  std::free(memory);
  if (wrong) std::printf("%lld threads: one left before all had arrived\n", static_cast<long long>(parts));
  if (late != 0 && idle == 0) std::printf("no thread was idle\n"), wrong = 1;
}

#if defined(__linux__)
// Processors that the process may use.
std::vector<int> processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> found;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return found;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) found.push_back(cpu);
  return found;
}

// Threads pinned to the given processors: only one that shares with an earlier one is oversubscribed.
void pinned(const std::vector<int>& cpus) {
  const int64_t parts = static_cast<int64_t>(cpus.size());
  void* const memory = std::aligned_alloc(64, static_cast<size_t>(Barrier::bytes(parts) + 64));
  std::memset(memory, 0, static_cast<size_t>(Barrier::bytes(parts)));
  std::vector<std::thread> threads;
  for (int64_t part = 0; part < parts; ++part)
    threads.emplace_back([&, part] {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cpus[part], &set);
      if (pthread_setaffinity_np(pthread_self(), sizeof(set), &set) != 0) return;
      Barrier barrier(memory, part, parts);
      for (int phase = 0; phase < 50; ++phase) barrier.arrive_and_wait();
      bool shared = false;
      for (int64_t before = 0; before < part; ++before) shared |= cpus[before] == cpus[part];
      if (barrier.oversubscribed() == shared) return;
      std::printf("thread %d of %d is%s oversubscribed\n", int(part), int(parts), shared ? " not" : "");
      wrong = 1;
    });
  for (std::thread& thread : threads) thread.join();
  std::free(memory);
}
#endif

}  // namespace

int main() {
  for (int64_t parts = 1; parts <= 9; ++parts) team(parts, 50, 0);
  team(2, 20000, 0);
  for (const int64_t parts : {2, 3, 5}) team(parts, 12, 4);
#if defined(__linux__)
  const std::vector<int> cpus = processors();
  if (!cpus.empty()) pinned({cpus[0], cpus[0]});
  if (cpus.size() > 1) pinned({cpus[0], cpus[1]});
#endif
  return wrong;
}
