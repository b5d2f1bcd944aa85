// Test of the team size beside other processes: prints each failed expectation and exits 1 if there is any.
#include "threads/oversubscription.h"

#include <cstdio>

#if defined(__linux__)
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

using namespace infer_native;

namespace {

int wrong = 0;

void expect(const char* what, int64_t found, int64_t wanted) {
  if (found == wanted) return;
  std::printf("%s: %lld, expected %lld\n", what, static_cast<long long>(found), static_cast<long long>(wanted));
  wrong = 1;
}

}  // namespace

int main() {
  using std::chrono::milliseconds;
  TeamSize team;
  Clock::time_point now = Clock::now();
  expect("at first", team.limit(8, now), 8);
  team.record(8, 0, now);
  expect("not delayed", team.limit(8, now), 8);
  team.record(8, 2, now);
  expect("delayed once", team.limit(8, now), 8);
  for (int i = 0; i < 8; ++i) team.record(8, 0, now);
  team.record(8, 2, now);
  expect("once more, much later", team.limit(8, now), 8);
  team.record(8, 2, now);
  expect("two delayed", team.limit(8, now += milliseconds(1)), 6);
  expect("a smaller call", team.limit(3, now), 3);
  team.record(6, 1, now);
  expect("one more", team.limit(8, now += milliseconds(1)), 5);
  expect("full team", team.limit(8, now += milliseconds(50)), 8);
  team.record(8, 8, now);
  expect("at least one", team.limit(8, now += milliseconds(1)), 1);
  expect("for twice as long", team.limit(8, now += milliseconds(70)), 1);
  for (int i = 0; i < 20; ++i) {
    now += milliseconds(3000);
    expect("after the longest wait", team.limit(4, now), 4);
    team.record(4, 1, now);
  }
  expect("delayed for long", team.limit(4, now += milliseconds(1900)), 3);
  expect("full team again", team.limit(4, now += milliseconds(200)), 4);
  for (int i = 0; i < 9; ++i) team.record(4, 0, now);
  team.record(4, 1, now);
  expect("not delayed, then once", team.limit(4, now), 4);
  team.record(4, 1, now);
  expect("and twice", team.limit(4, now += milliseconds(10)), 3);
  expect("full team soon again", team.limit(4, now += milliseconds(11)), 4);

#if defined(__linux__)
  const PreemptionProbe asleep(Clock::now());
  const timespec nap{0, 30'000'000};
  nanosleep(&nap, nullptr);
  expect("a thread that slept", asleep.preempted(), false);

  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  sched_setaffinity(0, sizeof one, &one);
  const pid_t other = fork();
  if (other == 0)
    for (volatile int i = 0;; i = 1 - i) {
    }
  const PreemptionProbe beside(Clock::now());
  for (const auto end = Clock::now() + milliseconds(300); Clock::now() < end;) {
  }
  expect("a thread beside a busy process", beside.preempted(), true);
  kill(other, SIGKILL);
  waitpid(other, nullptr, 0);
#endif
  return wrong;
}
