#include "runtime/worker_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <exception>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<uint32_t>;

// Unwinds a worker out of a barrier after another worker has thrown; never leaves the pool.
struct RegionAborted {};

thread_local bool inside_region = false;
std::atomic<uint32_t> fork_generation{0};  // counts forks of this process's ancestors; a child's pools have no threads

void count_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
}

void futex_wait(Word& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake_all(Word& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A counter that threads wait on: polls for a bounded time, then sleeps in the kernel.
struct Signal {
  alignas(64) Word word{0};
  std::atomic<int> sleepers{0};

  uint32_t load() const { return word.load(std::memory_order_acquire); }

  void raise() {
    word.fetch_add(1, std::memory_order_seq_cst);
    // seq_cst on both sides: either we see the sleeper, or its futex_wait sees the new value.
    if (sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(word);
  }

  // `yields`: more threads than CPUs, so whoever polls keeps somebody else from running.
  void wait_past(uint32_t seen, std::chrono::microseconds spin, bool yields) {
    if (poll(seen, spin, yields)) return;
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (word.load(std::memory_order_seq_cst) == seen) futex_wait(word, seen);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  bool poll(uint32_t seen, std::chrono::microseconds spin, bool yields) const {
    constexpr int kPausesPerClock = 64;  // ~2 us between looks at the clock
    Clock::time_point give_up{};
    for (;;) {
      for (int i = 0; i < (yields ? 1 : kPausesPerClock); ++i) {
        if (load() != seen) return true;
        cpu_pause();
      }
      const auto now = Clock::now();
      if (give_up == Clock::time_point{}) give_up = now + spin;
      if (now >= give_up) return load() != seen;
      if (yields) sched_yield();
    }
  }
};

bool more_workers_than_cpus(const std::vector<int>& cpus) {
  cpu_set_t allowed;
  const int usable = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : INT_MAX;
  std::set<int> distinct;
  int floating = 0;
  for (int cpu : cpus) cpu < 0 ? void(++floating) : void(distinct.insert(cpu));
  const bool shared = static_cast<int>(distinct.size()) + floating < static_cast<int>(cpus.size());
  return shared || static_cast<int>(cpus.size()) > std::max(usable, static_cast<int>(distinct.size()));
}

void pin(std::thread& thread, int worker, int cpu) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  if (pthread_setaffinity_np(thread.native_handle(), sizeof set, &set) != 0)
    throw std::invalid_argument("worker " + std::to_string(worker) + " cannot run on CPU " + std::to_string(cpu) +
                                ": this process may not use it (see taskset -pc, cpuset)");
}

}  // namespace

struct WorkerPool::State {
  State(int workers, std::chrono::microseconds spin_time, bool yield)
      : count(workers), spin(spin_time), yields(yield), generation(fork_generation.load()) {}

  const int count;
  const std::chrono::microseconds spin;
  const bool yields;
  const uint32_t generation;
  std::vector<std::thread> threads;

  std::mutex region;  // one region at a time; callers queue here
  const FunctionRef<void(const Worker&)>* body = nullptr;
  Signal start;                             // raised once per region
  alignas(64) std::atomic<int> working{0};  // pool threads still in the region
  Signal finished;                          // raised by the last of them
  alignas(64) std::atomic<int> at_barrier{0};
  Signal barrier;
  alignas(64) std::atomic<int64_t> next_task{0};
  std::atomic<bool> stopping{false};
  std::atomic<bool> failed{false};
  std::mutex error_mutex;
  std::exception_ptr error;  // the first

  void fail() {
    {
      std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
    failed.store(true, std::memory_order_seq_cst);
    barrier.raise();  // whoever waits there wakes up and sees `failed`
  }

  void run_body(const Worker& worker) {
    inside_region = true;
    try {
      (*body)(worker);
    } catch (const RegionAborted&) {
    } catch (...) {
      fail();
    }
    inside_region = false;
  }

  void wait_at_barrier() {
    const uint32_t seen = barrier.load();
    if (failed.load(std::memory_order_seq_cst)) throw RegionAborted{};
    if (at_barrier.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      at_barrier.store(0, std::memory_order_relaxed);  // ordered before the next arrivals by raise()
      barrier.raise();
    } else {
      barrier.wait_past(seen, spin, yields);
    }
    if (failed.load(std::memory_order_acquire)) throw RegionAborted{};
  }

  void serve(const Worker& worker) {
    uint32_t seen = 0;
    for (;;) {
      start.wait_past(seen++, spin, yields);
      if (stopping.load(std::memory_order_acquire)) return;
      run_body(worker);
      if (working.fetch_sub(1, std::memory_order_acq_rel) == 1) finished.raise();
    }
  }

  // Under `region`.
  void run_region(FunctionRef<void(const Worker&)> work, WorkerPool* pool) {
    body = &work;
    failed.store(false, std::memory_order_relaxed);
    at_barrier.store(0, std::memory_order_relaxed);
    const uint32_t seen = finished.load();
    working.store(count - 1, std::memory_order_relaxed);
    if (count > 1) start.raise();
    run_body(Worker{0, count, pool});
    if (count > 1) finished.wait_past(seen, spin, yields);
    if (failed.load(std::memory_order_relaxed)) std::rethrow_exception(std::exchange(error, nullptr));
  }

  void check_caller() const {
    if (inside_region) throw std::logic_error("a parallel region was started inside a parallel region");
    if (generation != fork_generation.load(std::memory_order_relaxed))
      throw std::runtime_error(
          "this WorkerPool was made before fork(); its threads stayed in the parent. Make a new one");
  }

  void stop() {
    stopping.store(true, std::memory_order_release);
    start.raise();
    for (auto& thread : threads) thread.join();
  }
};

WorkerPool::WorkerPool(std::vector<int> cpus, int spin_us) {
  if (cpus.empty()) throw std::invalid_argument("a WorkerPool needs at least one worker");
  if (spin_us < 0) throw std::invalid_argument("spin_us must be 0 or more");
  count_forks();
  const int count = static_cast<int>(cpus.size());
  state_ = std::make_unique<State>(count, std::chrono::microseconds(spin_us), more_workers_than_cpus(cpus));
  sigset_t all, before;  // signals are the application's business, so they go to its own threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int i = 1; i < count; ++i) {
      state_->threads.emplace_back([state = state_.get(), worker = Worker{i, count, this}] { state->serve(worker); });
      pthread_setname_np(state_->threads.back().native_handle(), ("tandem-" + std::to_string(i)).c_str());
      pin(state_->threads.back(), i, cpus[i]);
    }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    state_->stop();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

WorkerPool::~WorkerPool() {
  if (!state_) return;
  if (state_->generation != fork_generation.load()) {
    (void)state_.release();  // a forked child owns no threads to join; leaking is all that is safe
    return;
  }
  state_->stop();
}

int WorkerPool::size() const { return state_->count; }

void WorkerPool::run(FunctionRef<void(const Worker&)> body) {
  state_->check_caller();
  std::lock_guard lock(state_->region);
  state_->run_region(body, this);
}

void WorkerPool::for_each(int64_t tasks, FunctionRef<void(int64_t, const Worker&)> body) {
  state_->check_caller();
  if (tasks <= 0) return;
  std::lock_guard lock(state_->region);
  State& state = *state_;
  state.next_task.store(0, std::memory_order_relaxed);  // published by start.raise()
  state.run_region(
      [&](const Worker& worker) {
        while (!state.failed.load(std::memory_order_relaxed)) {
          const int64_t task = state.next_task.fetch_add(1, std::memory_order_relaxed);
          if (task >= tasks) return;
          body(task, worker);
        }
      },
      this);
}

void Worker::barrier() const { pool->state_->wait_at_barrier(); }

double region_start_latency(WorkerPool& pool, int repeats) {
  const auto start = Clock::now();
  for (int i = 0; i < repeats; ++i) pool.run([](const Worker&) {});
  return std::chrono::duration<double>(Clock::now() - start).count() / std::max(repeats, 1);
}

}  // namespace tandem
