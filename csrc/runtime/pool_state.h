// What a WorkerPool is made of: how its threads find their tasks, and how a caller's regions follow each other.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/aside.h"
#include "runtime/signal.h"
#include "runtime/worker_pool.h"

#ifndef TANDEM_POOL_PAUSE  // tests make moments longer in which other threads may come between
#define TANDEM_POOL_PAUSE(moment) static_cast<void>(0)
#endif

namespace tandem {

// Unwinds a worker out of a barrier after another worker has thrown; never leaves the pool.
struct RegionAborted {};

inline thread_local bool inside_region = false;
inline thread_local bool is_aside = false;  // the thread of `begin`: no worker, but it holds the pool for its work
inline std::atomic<uint32_t> fork_generation{0};  // forks of this process's ancestors; a child's pools have no threads

struct WorkerPool::State {
  State(std::vector<int> node_of_worker, std::chrono::microseconds spin_time, bool yield)
      : nodes(std::move(node_of_worker)),
        count(static_cast<int>(nodes.size())),
        spin(spin_time),
        yields(yield),
        generation(fork_generation.load()),
        tasks(nodes),
        probable(count) {}

  const std::vector<int> nodes;   // of each worker
  std::vector<int> memory_nodes;  // of each node
  const int count;
  const std::chrono::microseconds spin;
  const bool yields;
  const uint32_t generation;
  std::vector<std::thread> threads;

  std::mutex region;   // one region at a time; callers queue here
  std::mutex joining;  // see Held
  Signal work;         // raised when there may be something to do, and when a region is over
  std::atomic<bool> stopping{false};
  std::atomic<bool> failed{false};
  std::mutex error_mutex;
  std::exception_ptr error;  // the first

  // A region of phases.
  RegionTasks tasks;
  // Tasks that are not done, of the current phase and of the next. A phase that is open early counts one more until it
  // begins: it must not end before the phase before.
  struct alignas(64) Counter {
    std::atomic<int64_t> count{0};
  };
  std::array<Counter, 2> unfinished;        // by phase % 2
  alignas(64) std::atomic<int> current{0};  // phase
  std::atomic<bool> phases_done{true};
  std::array<const Phase*, TaskQueues::kMaxPhases> phases{};  // with tasks; read only by who holds a task, which keeps
  int phase_count = 0;                                        // the region alive

  // A region in which every worker takes part.
  const FunctionRef<void(const Worker&)>* body = nullptr;
  alignas(64) std::atomic<uint32_t> full_regions{0};  // how many there have been
  alignas(64) std::atomic<int> working{0};            // pool threads still in it
  alignas(64) std::atomic<int> at_barrier{0};
  Signal barrier;

  SureReads sure;
  ProbableReads probable;

  Aside aside{[this] { work.raise(); }};  // the last: its thread uses the others

  Worker worker(int index, WorkerPool* pool) const { return {index, count, nodes[static_cast<size_t>(index)], pool}; }

  void wait_for_work(uint32_t seen, int worker) {
    work.wait_past(seen, spin, yields, [=, this] { return probable.fetch(worker) || sure.fetch(); });
  }

  void fail() {
    {
      std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
    failed.store(true, std::memory_order_seq_cst);
    barrier.raise();  // whoever waits there wakes up and sees `failed`
  }

  template <class Call>
  void guarded(Call call) {
    inside_region = true;
    try {
      call();
    } catch (const RegionAborted&) {
    } catch (...) {
      fail();
    }
    inside_region = false;
  }

  void rethrow() {
    if (failed.load(std::memory_order_relaxed)) std::rethrow_exception(std::exchange(error, nullptr));
  }

  void wait_at_barrier() {
    const uint32_t seen = barrier.load();
    if (failed.load(std::memory_order_seq_cst)) throw RegionAborted{};
    if (at_barrier.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      at_barrier.store(0, std::memory_order_relaxed);  // ordered before the next arrivals by raise()
      barrier.raise();
    } else {
      barrier.wait_past(seen, spin, yields, [] { return false; });
    }
    if (failed.load(std::memory_order_acquire)) throw RegionAborted{};
  }

  // Takes and does one task; false if there is none to take now. With more workers than CPUs nobody takes one early:
  // it would wait for a CPU when it should begin.
  bool help(const Worker& worker) {
    const int now = current.load(std::memory_order_acquire);
    TANDEM_POOL_PAUSE(knows_phase);
    RegionTasks::Task task = tasks.take(now, worker.index);
    if (task.phase < 0 && !yields) task = tasks.take_early(now + 1, worker.index);
    if (task.phase < 0) return false;
    wait_for_phase(task, worker);
    run(task, worker);
    return true;
  }

  // Until the phase of a task that was taken early has begun, or the task is ready. Nobody waits for ever: whoever
  // holds a task of this phase does what is left of the phase before. It sees that after the next raise of `work` at
  // the latest. Hence none of its tasks is left when all wait, and who holds one of them is at work on it.
  void wait_for_phase(const RegionTasks::Task& task, const Worker& worker) {
    for (int64_t step = 0;;) {
      const uint32_t seen = work.load();
      const int now = current.load(std::memory_order_acquire);
      if (now >= task.phase || is_ready(task)) return;
      // Only of the current phase, whose tasks are counted: the one before may be open although it is not current.
      const RegionTasks::Task before = now == task.phase - 1 ? tasks.take(now, worker.index) : RegionTasks::Task{};
      if (before.phase >= 0)
        run(before, worker);
      else
        work.wait_past(
            seen, spin, yields,
            [&] {
              return (phases[task.phase]->own && probable.fetch(worker.index)) ||
                     phases[task.phase]->ahead(task.index, step++);
            },
            [&] { return is_ready(task); });
    }
  }

  bool is_ready(const RegionTasks::Task& task) const {
    const ReadyBody& ready = phases[task.phase]->ready;
    return ready && ready(task.index);
  }

  // Does a task, or some of a worker's own.
  void run(const RegionTasks::Task& task, const Worker& worker) {
    if (!failed.load(std::memory_order_relaxed)) guarded([&] { do_task(*phases[task.phase], task, worker); });
    if (finish(task.phase, task.count)) begin_phase(task.phase + 1);
  }

  bool finish(int phase, int64_t tasks) {
    return unfinished[phase % 2].count.fetch_sub(tasks, std::memory_order_acq_rel) == tasks;
  }

  static void do_task(const Phase& phase, const RegionTasks::Task& task, const Worker& worker) {
    phase.own ? phase.own->body(task.index, task.count, worker) : phase.body(task.index, worker);
  }

  // By the worker that did the last task of the phase before, or by the caller. A phase that may be taken from early is
  // open from the beginning of the one before, and may have been done meanwhile. When the last task of `phase` can be
  // taken and done, the region may be over before this returns, so that comes last.
  void begin_phase(int phase) {
    for (bool is_done = true; is_done; ++phase) {
      if (phase == phase_count) {
        phases_done.store(true, std::memory_order_release);
        break;
      }
      const bool is_open = phase > 0 && phases[phase]->ahead;
      if (phases[phase]->own) probable.stop();
      if (phase + 1 < phase_count && phases[phase + 1]->ahead) open(phase + 1, 1);
      TANDEM_POOL_PAUSE(opened_next);
      current.store(phase, std::memory_order_release);
      if (!is_open) open(phase, 0);
      is_done = is_open && finish(phase, 1);
    }
    work.raise();
  }

  void open(int phase, int64_t more) {
    const Phase& opened = *phases[phase];
    unfinished[phase % 2].count.store(opened.tasks + more, std::memory_order_relaxed);
    if (const Own* owners = opened.own)
      tasks.open_own(phase, opened.tasks, owners->of_worker, owners->most_at_once);
    else
      tasks.open(phase, opened.tasks, opened.of_node);
  }

  // Under `region`.
  void do_phases(std::span<const Phase> all, const Worker& caller) {
    failed.store(false, std::memory_order_relaxed);
    phase_count = 0;
    for (const Phase& phase : all)
      if (phase.tasks > 0) phases[phase_count++] = &phase;
    if (std::none_of(phases.begin(), phases.begin() + phase_count, [](const Phase* p) { return p->own; }))
      probable.stop();
    phases_done.store(false, std::memory_order_relaxed);
    current.store(0, std::memory_order_relaxed);  // before any task can be taken: seen by whoever takes one
    tasks.begin_region();
    begin_phase(0);
    for (;;) {
      const uint32_t seen = work.load();
      if (phases_done.load(std::memory_order_acquire)) break;
      if (is_aside)
        work.wait_past(seen, std::chrono::microseconds(0), false, [] { return false; });
      else if (!help(caller))
        wait_for_work(seen, caller.index);
    }
    rethrow();
  }

  // Under `region`.
  void do_full_region(FunctionRef<void(const Worker&)> all, const Worker& caller) {
    failed.store(false, std::memory_order_relaxed);
    body = &all;
    at_barrier.store(0, std::memory_order_relaxed);
    working.store(count - 1, std::memory_order_relaxed);
    full_regions.fetch_add(1, std::memory_order_release);
    work.raise();
    guarded([&] { all(caller); });
    for (;;) {
      const uint32_t seen = work.load();
      if (working.load(std::memory_order_acquire) == 0) break;
      wait_for_work(seen, caller.index);
    }
    rethrow();
  }

  // The life of a pool thread.
  void serve(const Worker& worker) {
    for (uint32_t regions = 0;;) {
      const uint32_t seen = work.load();
      if (stopping.load(std::memory_order_acquire)) return;
      if (full_regions.load(std::memory_order_acquire) != regions) {
        ++regions;
        guarded([&] { (*body)(worker); });
        if (working.fetch_sub(1, std::memory_order_acq_rel) == 1) work.raise();
      } else if (!help(worker)) {
        wait_for_work(seen, worker.index);
      }
    }
  }

  // What a caller of a region holds. Whoever joins is worker 0 as long as something is aside, so nobody else may be.
  struct Held {
    std::unique_lock<std::mutex> region, joining;
  };
  Held held() {
    if (is_aside) return {};
    Held both{std::unique_lock(region, std::defer_lock), std::unique_lock(joining, std::defer_lock)};
    std::lock(both.region, both.joining);
    return both;
  }

  void begin(std::function<void()> task) {
    aside.begin([this, task = std::move(task)] {
      const std::lock_guard lock(region);
      is_aside = true;
      try {
        task();
      } catch (...) {
        is_aside = false;
        throw;
      }
      is_aside = false;
    });
  }

  // As a pool thread does.
  double join(const Worker& caller) {
    const std::lock_guard lock(joining);
    while (aside.is_busy()) {
      const uint32_t seen = work.load();
      if (aside.is_busy() && !help(caller)) wait_for_work(seen, caller.index);
    }
    return aside.taken();
  }

  void check_caller() const {
    if (inside_region) throw std::logic_error("a parallel region was started inside a parallel region");
    if (generation != fork_generation.load(std::memory_order_relaxed))
      throw std::runtime_error(
          "this WorkerPool was made before fork(); its threads stayed in the parent. Make a new one");
  }

  void stop() {
    stopping.store(true, std::memory_order_release);
    work.raise();
    for (auto& thread : threads) thread.join();
  }
};

}  // namespace tandem
