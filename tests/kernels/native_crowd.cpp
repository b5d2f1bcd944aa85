// A team of threads beside other processes: prints what is not as it should be, exits 1 when anything is not.
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
  Crowd crowd;
  Clock::time_point now = Clock::now();
  expect("at first", crowd.threads(8, now), 8);
  crowd.ran(8, 0, now);
  expect("undisturbed", crowd.threads(8, now), 8);
  crowd.ran(8, 2, now);
  expect("held up once", crowd.threads(8, now), 8);
  for (int i = 0; i < 8; ++i) crowd.ran(8, 0, now);
  crowd.ran(8, 2, now);
  expect("once more, much later", crowd.threads(8, now), 8);
  crowd.ran(8, 2, now);
  expect("two held up", crowd.threads(8, now += milliseconds(1)), 6);
  expect("a smaller call", crowd.threads(3, now), 3);
  crowd.ran(6, 1, now);
  expect("one more", crowd.threads(8, now += milliseconds(1)), 5);
  expect("all again", crowd.threads(8, now += milliseconds(50)), 8);
  crowd.ran(8, 8, now);
  expect("never none", crowd.threads(8, now += milliseconds(1)), 1);
  expect("for twice as long", crowd.threads(8, now += milliseconds(70)), 1);
  for (int i = 0; i < 20; ++i) {
    now += milliseconds(3000);
    expect("after the longest wait", crowd.threads(4, now), 4);
    crowd.ran(4, 1, now);
  }
  expect("disturbed for long", crowd.threads(4, now += milliseconds(1900)), 3);
  expect("tried again", crowd.threads(4, now += milliseconds(200)), 4);
  for (int i = 0; i < 9; ++i) crowd.ran(4, 0, now);
  crowd.ran(4, 1, now);
  expect("undisturbed and then once", crowd.threads(4, now), 4);
  crowd.ran(4, 1, now);
  expect("and twice", crowd.threads(4, now += milliseconds(10)), 3);
  expect("soon whole again", crowd.threads(4, now += milliseconds(11)), 4);

#if defined(__linux__)
  const Presence asleep(Clock::now());
  const timespec nap{0, 30'000'000};
  nanosleep(&nap, nullptr);
  expect("a thread that slept", asleep.disturbed(), false);

  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  sched_setaffinity(0, sizeof one, &one);
  const pid_t other = fork();
  if (other == 0)
    for (volatile int i = 0;; i = 1 - i) {
    }
  const Presence beside(Clock::now());
  for (const auto end = Clock::now() + milliseconds(300); Clock::now() < end;) {
  }
  expect("a thread beside a busy process", beside.disturbed(), true);
  kill(other, SIGKILL);
  waitpid(other, nullptr, 0);
#endif
  return wrong;
}
