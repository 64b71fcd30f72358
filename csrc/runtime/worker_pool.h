// A fixed set of pinned threads that run one parallel region at a time. The calling thread is worker 0, so a pool
// of n uses n - 1 threads of its own and never more spinning threads than CPUs.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "runtime/probable_reads.h"
#include "runtime/region_tasks.h"
#include "runtime/sure_reads.h"

namespace tandem {

// A non-owning reference to a callable, or to none: no allocation per region.
template <class Signature>
class FunctionRef;
template <class R, class... A>
class FunctionRef<R(A...)> {
 public:
  FunctionRef() = default;
  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, FunctionRef>>>
  FunctionRef(F&& f)
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* o, A... a) -> R { return (*static_cast<std::remove_reference_t<F>*>(o))(a...); }) {}
  R operator()(A... a) const { return call_(object_, a...); }
  explicit operator bool() const { return call_ != nullptr; }

 private:
  void* object_ = nullptr;
  R (*call_)(void*, A...) = nullptr;
};

class WorkerPool;

// What a region's body sees of the pool.
struct Worker {
  int index;  // 0 .. count-1; 0 is the calling thread
  int count;
  int node;  // 0 .. pool->nodes()-1
  WorkerPool* pool;

  // Waits for all workers. Throws on every worker when one of them has thrown, so nobody waits for ever.
  void barrier() const;
};

class WorkerPool {
 public:
  // One worker per entry of `cpus`; entry i is the logical CPU worker i is pinned to, -1 = not pinned. The calling
  // thread (worker 0) is never pinned by the pool. `spin_us`: how long an idle worker polls before it sleeps.
  // nodes[i]: the node of worker i, counted from 0, ascending; weights are divided among nodes; empty: there is one.
  // memory_nodes[n]: where node n's memory is, as the system numbers it; empty: that does not matter.
  explicit WorkerPool(std::vector<int> cpus, int spin_us = 200, std::vector<int> nodes = {},
                      std::vector<int> memory_nodes = {});
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int size() const;
  int nodes() const;               // distinct memory nodes of its workers, at most kMaxNodes
  int workers_of(int node) const;  // `node` counts from 0
  // The first of `count` things that a node gets when they are divided in proportion to workers; of node nodes():
  // count.
  int64_t first_of(int node, int64_t count) const;
  int memory_node(int node) const;  // as the system numbers it; -1: it does not matter
  int caller_cpu() const;           // worker 0's, for whoever calls; -1: any

  // Runs body once on every worker and returns when all are done; rethrows the first exception. Regions of several
  // calling threads queue up behind each other. A region inside a region is an error (std::logic_error).
  void run(FunctionRef<void(const Worker&)> body);

  using TaskBody = FunctionRef<void(int64_t, const Worker&)>;
  // A little of what can be done for a task before its phase begins, `step` by step from 0: fetching what it will read,
  // say. A fraction of a microsecond each; false when there is no more. Must not throw.
  using AheadBody = FunctionRef<bool(int64_t task, int64_t step)>;
  // Whether all that a task reads is written, and what it overwrites is read, although the phase before is not over.
  // The phase before that one is: of phases that have tasks, only the next one's are taken early. Must not throw.
  using ReadyBody = FunctionRef<bool(int64_t task)>;
  // Tasks that are workers' own (OwnTasks), of which a worker does up to `most_at_once`, one after the other, in a
  // call.
  struct Own {
    const int64_t* of_worker;  // how many of them are each worker's, in the order of their indices; below 2^16
    int64_t most_at_once;
    FunctionRef<void(int64_t first, int64_t count, const Worker&)> body;
  };
  struct Phase {
    int64_t tasks;  // below 2^32
    TaskBody body;
    const int64_t* of_node = nullptr;  // how many of them are each node's, in the order of their indices: its workers
                                       // do those first, and others' only then. Null: they are nobody's
    // Given: whoever finds no task of the phase before takes one of this phase early and does this for it. It runs the
    // task as soon as the phase begins.
    AheadBody ahead = {};
    const Own* own = nullptr;  // given: instead of `body` and `of_node`
    // Given: a task that was taken early is run as soon as it is ready. Not for workers' own.
    ReadyBody ready = {};
  };

  // One region of phases: body(i) of a phase for i in [0, tasks), each exactly once, by whoever is free. A phase begins
  // when all tasks of the one before are done (but see Phase::ready). Nobody waits for a worker that has not come: on a
  // busy machine, where a worker may lose its core for milliseconds, the others do its share. So a task must not wait
  // for other tasks. Called with the list in place, run_phases({{n, [&](int64_t i, const Worker&) {...}}, ...}): a
  // Phase owns nothing.
  void run_phases(std::initializer_list<Phase> phases) { run_phases(std::span(phases.begin(), phases.size())); }
  void run_phases(std::span<const Phase> phases);  // at most kMostPhases
  static constexpr size_t kMostPhases = TaskQueues::kMaxPhases;

  // What the operations after the next region will read first; whoever is idle from then on fetches it. Empty: what was
  // announced before still holds.
  void announce(const std::vector<ByteRange>& upcoming);

  // What a caller that waits for somebody else will probably read (ProbableReads). Idle workers fetch it from now on;
  // the caller does, too, with `fetch_a_little` (false: it has done its share). It ends when a phase of workers' own
  // tasks begins, or a region without one. `withdraw` ends it, too, and returns the bytes.
  void announce_probable(const std::vector<SharedRange>& ranges, int64_t most_each);
  bool fetch_a_little();
  int64_t withdraw();

  // A region will come soon: workers that sleep wake up, and poll for as long as after a region.
  void wake();

  // One phase.
  void for_each(int64_t tasks, TaskBody body);

 private:
  void check_own(const Phase& phase) const;

  struct State;
  std::unique_ptr<State> state_;
  friend struct Worker;
};

// Seconds an empty region takes, mean over `repeats`: what every operation pays before it does anything.
double region_start_latency(WorkerPool& pool, int repeats);

}  // namespace tandem
