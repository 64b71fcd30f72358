#include "runtime/worker_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <exception>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "runtime/signal.h"
#include "runtime/worker_cpus.h"

#ifndef TANDEM_POOL_PAUSE  // tests make moments longer in which other threads may come between
#define TANDEM_POOL_PAUSE(moment) static_cast<void>(0)
#endif

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

// Unwinds a worker out of a barrier after another worker has thrown; never leaves the pool.
struct RegionAborted {};

thread_local bool inside_region = false;
std::atomic<uint32_t> fork_generation{0};  // counts forks of this process's ancestors; a child's pools have no threads

void count_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
}

}  // namespace

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
  int caller_cpu = -1;
  const int count;
  const std::chrono::microseconds spin;
  const bool yields;
  const uint32_t generation;
  std::vector<std::thread> threads;

  std::mutex region;  // one region at a time; callers queue here
  Signal work;        // raised when there may be something to do, and when a region is over
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
      if (!help(caller)) wait_for_work(seen, caller.index);
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

WorkerPool::WorkerPool(std::vector<int> cpus, int spin_us, std::vector<int> nodes, std::vector<int> memory_nodes) {
  if (cpus.empty()) throw std::invalid_argument("a WorkerPool needs at least one worker");
  if (spin_us < 0) throw std::invalid_argument("spin_us must be 0 or more");
  count_forks();
  const int count = static_cast<int>(cpus.size());
  state_ = std::make_unique<State>(checked_nodes(std::move(nodes), cpus.size(), memory_nodes.size()),
                                   std::chrono::microseconds(spin_us), more_workers_than_cpus(cpus));
  state_->memory_nodes = std::move(memory_nodes);
  state_->caller_cpu = cpus[0];
  sigset_t all, before;  // signals are the application's business, so they go to its own threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int i = 1; i < count; ++i) {
      state_->threads.emplace_back([state = state_.get(), worker = state_->worker(i, this)] { state->serve(worker); });
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

int WorkerPool::nodes() const { return state_->nodes.back() + 1; }

int WorkerPool::workers_of(int node) const {
  return static_cast<int>(std::count(state_->nodes.begin(), state_->nodes.end(), node));
}

int64_t WorkerPool::first_of(int node, int64_t count) const {
  const auto before = std::lower_bound(state_->nodes.begin(), state_->nodes.end(), node) - state_->nodes.begin();
  return count * before / state_->count;
}

int WorkerPool::memory_node(int node) const {
  return state_->memory_nodes.empty() ? -1 : state_->memory_nodes[static_cast<size_t>(node)];
}

int WorkerPool::caller_cpu() const { return state_->caller_cpu; }

void WorkerPool::run(FunctionRef<void(const Worker&)> body) {
  state_->check_caller();
  std::lock_guard lock(state_->region);
  state_->do_full_region(body, state_->worker(0, this));
}

void WorkerPool::check_own(const Phase& phase) const {
  const int64_t* const of_worker = phase.own->of_worker;
  if (std::accumulate(of_worker, of_worker + size(), int64_t{0}) != phase.tasks)
    throw std::invalid_argument("the workers' own tasks are not all of the phase's");
  if (*std::max_element(of_worker, of_worker + size()) > OwnTasks::kMostEach)
    throw std::invalid_argument("a worker has at most 65535 tasks of its own");
  if (phase.own->most_at_once < 1) throw std::invalid_argument("a worker does at least one of its own tasks at once");
  if (phase.ready) throw std::invalid_argument("workers' own tasks are several at once: none of them is ready early");
}

void WorkerPool::run_phases(std::span<const Phase> phases) {
  state_->check_caller();
  if (phases.size() > kMostPhases) throw std::invalid_argument("a region has at most 15 phases");
  for (const Phase& phase : phases) {
    if (phase.tasks > UINT32_MAX) throw std::invalid_argument("a phase has at most 2^32 - 1 tasks");
    if (phase.of_node && !phase.own &&
        std::accumulate(phase.of_node, phase.of_node + nodes(), int64_t{0}) != phase.tasks)
      throw std::invalid_argument("the nodes' tasks are not all of the phase's");
    if (phase.own) check_own(phase);
  }
  std::lock_guard lock(state_->region);
  state_->do_phases(phases, state_->worker(0, this));
}

void WorkerPool::for_each(int64_t tasks, TaskBody body) { run_phases({{tasks, body}}); }

void WorkerPool::announce(const std::vector<ByteRange>& upcoming) {
  if (!upcoming.empty()) state_->sure.announce(upcoming);
}

void WorkerPool::announce_probable(const std::vector<SharedRange>& ranges, int64_t most_each) {
  state_->probable.announce(ranges, most_each);
}

bool WorkerPool::fetch_a_little() { return state_->probable.fetch(0); }

int64_t WorkerPool::withdraw() { return state_->probable.withdraw(); }

void WorkerPool::wake() { state_->work.raise(); }

void Worker::barrier() const { pool->state_->wait_at_barrier(); }

double region_start_latency(WorkerPool& pool, int repeats) {
  const auto start = Clock::now();
  for (int i = 0; i < repeats; ++i) pool.run([](const Worker&) {});
  return std::chrono::duration<double>(Clock::now() - start).count() / std::max(repeats, 1);
}

}  // namespace tandem
