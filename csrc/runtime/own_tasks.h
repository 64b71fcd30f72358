// Tasks that belong to workers, because what they read lies in their caches. Each worker has a queue and takes some at
// once from its front. A worker without tasks takes single ones from the end of the longest, where least was fetched.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/task_queues.h"

namespace tandem {

// Two sets of queues, taken in turn by a region's phases, as in TaskQueues.
class OwnTasks {
 public:
  using Task = TaskQueues::Task;
  static constexpr int64_t kMostEach = 0xffff;  // of one worker

  // nodes[w]: of worker w.
  explicit OwnTasks(std::vector<int> nodes) : nodes_(std::move(nodes)) {
    for (Set& set : sets_) set.queues = std::vector<Queue>(nodes_.size());
  }

  // of_worker[w]: how many of the tasks are worker w's, in the order of their indices. As TaskQueues::open, this
  // neither reads nor writes anything once the last task is open.
  void open(int phase, int64_t tasks, const int64_t* of_worker, int64_t most_at_once) {
    Set& set = sets_[phase % 2];
    const uint64_t stamp = uint64_t(++opened_) << 36 | uint64_t(phase) << 32;
    set.most.store(most_at_once, std::memory_order_relaxed);
    set.phase.store(phase, std::memory_order_relaxed);
    int64_t end = 0;
    for (size_t w = 0; end < tasks; ++w) {
      const int64_t count = of_worker[w];
      if (count == 0) continue;
      set.queues[w].first = end;
      end += count;
      set.queues[w].word.store(stamp | uint64_t(count), std::memory_order_release);
    }
  }

  // The next of the worker's own: at most half of them, so that others find something if it turns out to be slow.
  Task take(int phase, int worker) {
    Set& set = sets_[phase % 2];
    Queue& queue = set.queues[size_t(worker)];
    uint64_t seen = queue.word.load(std::memory_order_acquire);
    for (;;) {
      const int64_t left = left_in(seen, phase);
      if (left == 0) return {};
      const int64_t count = std::clamp<int64_t>(left / 2, 1, set.most.load(std::memory_order_relaxed));
      if (queue.word.compare_exchange_weak(seen, seen + (uint64_t(count) << 16) - uint64_t(count),
                                           std::memory_order_acq_rel, std::memory_order_acquire))
        return {phase, queue.first + taken_of(seen), count};
    }
  }

  // Another worker's last one; of the same node, if there is any.
  Task steal(int phase, int worker) {
    Set& set = sets_[phase % 2];
    while (set.phase.load(std::memory_order_relaxed) == phase) {
      const auto [queue, seen] = longest(set, phase, nodes_[size_t(worker)]);
      if (!queue) break;
      uint64_t expected = seen;
      if (queue->word.compare_exchange_strong(expected, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire))
        return {phase, queue->first + taken_of(seen) + left_in(seen, phase) - 1, 1};
    }
    return {};
  }

 private:
  // [28 bits: which phase of all that were opened][4 bits phase][16 bits taken from the front][16 bits left]
  struct alignas(64) Queue {
    std::atomic<uint64_t> word{0};
    int64_t first = 0;  // task; read only by who holds one, which keeps the phase alive
  };
  struct Set {
    alignas(64) std::atomic<int> phase{-1};  // that was opened last
    std::atomic<int64_t> most{1};
    std::vector<Queue> queues;
  };

  static int64_t left_in(uint64_t word, int phase) {
    return int(word >> 32 & 0xf) == phase ? int64_t(word & 0xffff) : 0;
  }
  static int64_t taken_of(uint64_t word) { return int64_t(word >> 16 & 0xffff); }

  std::pair<Queue*, uint64_t> longest(Set& set, int phase, int node) const {
    std::pair<Queue*, uint64_t> best{nullptr, 0};
    int64_t most = 0;
    for (size_t w = 0; w < nodes_.size(); ++w) {
      const uint64_t seen = set.queues[w].word.load(std::memory_order_acquire);
      const int64_t left = left_in(seen, phase);
      const int64_t rank = left == 0 ? 0 : left + (nodes_[w] == node ? kMostEach : 0);
      if (rank <= most) continue;
      most = rank;
      best = {&set.queues[w], seen};
    }
    return best;
  }

  const std::vector<int> nodes_;
  uint32_t opened_ = 0;
  std::array<Set, 2> sets_;
};

}  // namespace tandem
