// The tasks of a region's phase by memory node: which node each is for, and those that nobody has taken yet.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <numeric>

namespace tandem {

constexpr int kMaxNodes = 16;

// A phase's tasks, listed node after node.
class NodeTasks {
 public:
  void add(int64_t tasks) { of_node_[size_t(nodes_++)] = tasks; }
  int64_t count() const { return std::accumulate(of_node_.begin(), of_node_.end(), int64_t{0}); }
  const int64_t* of_node() const { return of_node_.data(); }

  struct Place {
    size_t node;
    int64_t task;  // of the node's
  };
  Place at(int64_t index) const {
    size_t node = 0;
    for (; index >= of_node_[node]; ++node) index -= of_node_[node];
    return {node, index};
  }

 private:
  std::array<int64_t, kMaxNodes> of_node_{};
  int nodes_ = 0;
};

// What nobody has taken yet: a queue per node, each one atomic word. A region's phases take two sets of
// them in turn, so that one may be open while the one before it is not over.
class TaskQueues {
 public:
  static constexpr int kMaxPhases = 15;

  struct Task {
    int phase = -1;  // -1: there is none to take now
    int64_t index = 0;
    int64_t count = 1;  // of tasks that follow each other (OwnTasks)
  };

  explicit TaskQueues(int nodes) : nodes_(nodes) {}

  // By the region's owner, when all tasks are done. Whoever still looks at a queue takes nothing of the new region
  // unless it sees the new ticket.
  void begin_region() {
    for (auto& set : queues_)
      for (int n = 0; n < nodes_; ++n) {
        std::atomic<uint64_t>& ticket = set[size_t(n)].ticket;
        ticket.store(((ticket.load(std::memory_order_relaxed) >> 36) + 1) << 36, std::memory_order_relaxed);
      }
  }

  // of_node[n]: how many of the tasks are node n's, in the order of their indices; null: all are the first's. Once the
  // last one is open, others may do them all and end the region before this returns: nothing is read or written then.
  void open(int phase, int64_t tasks, const int64_t* of_node) {
    int64_t end = 0;
    for (int n = 0; end < tasks; ++n) {
      const int64_t count = of_node ? of_node[n] : tasks;
      if (count == 0) continue;
      Queue& queue = queues_[phase % 2][size_t(n)];
      queue.end = end += count;
      const uint64_t region = queue.ticket.load(std::memory_order_relaxed) >> 36 << 36;
      queue.ticket.store(region | uint64_t(phase) << 32 | uint64_t(count), std::memory_order_release);
    }
  }

  // One of `node`'s tasks of this phase, or where it has none left, another's: a task done far from its memory is
  // better than waiting.
  Task take(int phase, int node) {
    for (int n = 0; n < nodes_; ++n)
      if (const Task task = take_from(queues_[phase % 2][size_t((node + n) % nodes_)], phase); task.phase >= 0)
        return task;
    return {};
  }

 private:
  // [28 bits region][4 bits phase][32 bits remaining]: one compare-and-swap takes a task of exactly this phase of
  // exactly this region.
  struct alignas(64) Queue {
    std::atomic<uint64_t> ticket{0};
    int64_t end = 0;  // one past its last task; read only by who holds one, which keeps the phase alive
  };

  static Task take_from(Queue& queue, int phase) {
    uint64_t seen = queue.ticket.load(std::memory_order_acquire);
    do {
      if (uint32_t(seen) == 0 || int(seen >> 32 & 0xf) != phase) return {};
    } while (!queue.ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    return {phase, queue.end - int64_t(uint32_t(seen))};
  }

  const int nodes_;
  std::array<std::array<Queue, kMaxNodes>, 2> queues_;
};

}  // namespace tandem
