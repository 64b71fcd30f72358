// Tasks that are taken before their phase begins, while threads are slow at the worst moments (pool_pauses.h): every
// task is done once, in its phase, and regions end.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "runtime/worker_pool.h"

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "early_tasks_test: %s\n", what);
  std::exit(1);
}

}  // namespace

int main() {
  using tandem::Worker;
  using tandem::WorkerPool;
  tandem::WorkerPool pool({-1, -1, -1});
  constexpr int kTasks = 4;
  const auto fetch = [](int64_t, int64_t) { return false; };
  for (int region = 0; region < 3000; ++region) {
    alarm(20);  // a region that does not end
    std::atomic<int> done{0};
    const auto task_of = [&](int phase) {
      return [&done, phase](int64_t, const Worker&) {
        check(done.load() >= phase * kTasks, "a task ran before its phase");
        done.fetch_add(1);
      };
    };
    const auto first = task_of(0), second = task_of(1), third = task_of(2);
    const int64_t some_have = region % 3, of_worker[] = {some_have, kTasks - some_have, 0};
    const auto some = [&](int64_t task, int64_t count, const Worker& worker) {
      for (int64_t i = 0; i < count; ++i) (region % 2 ? second : third)(task + i, worker);
    };
    const WorkerPool::Own own{of_worker, 2, some};
    // What a task reads is there when all tasks of the phase before are done, a little before the pool knows it.
    const auto is_ready = [&done](int phase) {
      return [&done, phase](int64_t) { return done.load() >= phase * kTasks; };
    };
    const auto when_first_is_done = is_ready(1), when_second_is_done = is_ready(2);
    const WorkerPool::ReadyBody none, second_is_ready = when_first_is_done, third_is_ready = when_second_is_done;
    const bool is_second = region % 2;  // or the third: one of them is of workers' own tasks
    pool.run_phases({{kTasks, first},
                     {kTasks, second, nullptr, fetch, is_second ? &own : nullptr, is_second ? none : second_is_ready},
                     {kTasks, third, nullptr, fetch, is_second ? nullptr : &own, is_second ? third_is_ready : none}});
    check(done.load() == 3 * kTasks, "a task was not done, or twice");
  }
  std::puts("early_tasks_test: ok");
}
