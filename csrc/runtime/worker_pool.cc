#include "runtime/worker_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/pool_state.h"
#include "runtime/worker_cpus.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

void count_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
}

}  // namespace

WorkerPool::WorkerPool(std::vector<int> cpus, int spin_us, std::vector<int> nodes, std::vector<int> memory_nodes) {
  if (cpus.empty()) throw std::invalid_argument("a WorkerPool needs at least one worker");
  if (spin_us < 0) throw std::invalid_argument("spin_us must be 0 or more");
  count_forks();
  const int count = static_cast<int>(cpus.size());
  state_ = std::make_unique<State>(checked_nodes(std::move(nodes), cpus.size(), memory_nodes.size()),
                                   std::chrono::microseconds(spin_us), more_workers_than_cpus(cpus));
  state_->memory_nodes = std::move(memory_nodes);
  const SignalsBlocked blocked;
  try {
    for (int i = 1; i < count; ++i) {
      state_->threads.emplace_back([state = state_.get(), worker = state_->worker(i, this)] { state->serve(worker); });
      pthread_setname_np(state_->threads.back().native_handle(), ("tandem-" + std::to_string(i)).c_str());
      pin(state_->threads.back(), i, cpus[i]);
    }
  } catch (...) {
    state_->stop();
    throw;
  }
}

WorkerPool::~WorkerPool() {
  if (!state_) return;
  if (state_->generation != fork_generation.load()) {
    (void)state_.release();  // a forked child owns no threads to join; leaking is all that is safe
    return;
  }
  try {
    join();
  } catch (...) {  // nobody is left who would want to know
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

void WorkerPool::run(FunctionRef<void(const Worker&)> body) {
  state_->check_caller();
  const auto lock = state_->held();
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
  const auto lock = state_->held();
  state_->do_phases(phases, state_->worker(0, this));
}

void WorkerPool::for_each(int64_t tasks, TaskBody body) { run_phases({{tasks, body}}); }

void WorkerPool::begin(std::function<void()> work) {
  try {
    join();
  } catch (...) {  // of a step that was given up
  }
  state_->begin(std::move(work));
}

double WorkerPool::join() {
  state_->check_caller();
  return state_->join(state_->worker(0, this));
}

void WorkerPool::announce(const std::vector<ByteRange>& upcoming) {
  if (!upcoming.empty()) state_->sure.announce(upcoming);
}

void WorkerPool::announce_probable(const std::vector<SharedRange>& ranges, int64_t most_each) {
  state_->probable.announce(ranges, most_each);
}

bool WorkerPool::fetch_a_little() { return state_->probable.fetch(0); }

int64_t WorkerPool::withdraw() { return state_->probable.withdraw(); }

void Worker::barrier() const { pool->state_->wait_at_barrier(); }

double region_start_latency(WorkerPool& pool, int repeats) {
  const auto start = Clock::now();
  for (int i = 0; i < repeats; ++i) pool.run([](const Worker&) {});
  return std::chrono::duration<double>(Clock::now() - start).count() / std::max(repeats, 1);
}

}  // namespace tandem
