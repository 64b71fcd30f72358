// A region's tasks that nobody has taken yet: some belong to a worker, the others to whoever is free.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/own_tasks.h"
#include "runtime/task_queues.h"

namespace tandem {

class RegionTasks {
 public:
  using Task = TaskQueues::Task;

  // nodes[w]: of worker w.
  explicit RegionTasks(const std::vector<int>& nodes) : nodes_(nodes), shared_(nodes.back() + 1), own_(nodes) {}

  void begin_region() { shared_.begin_region(); }
  void open(int phase, int64_t tasks, const int64_t* of_node) { shared_.open(phase, tasks, of_node); }
  void open_own(int phase, int64_t tasks, const int64_t* of_worker, int64_t most_at_once) {
    own_.open(phase, tasks, of_worker, most_at_once);
  }

  // Of the current phase: the worker's own, its node's, or anybody's.
  Task take(int phase, int worker) {
    const Task task = take_early(phase, worker);
    return task.phase >= 0 ? task : own_.steal(phase, worker);
  }

  // Of the phase after it. Not others' own: what has not begun is not late.
  Task take_early(int phase, int worker) {
    const Task task = own_.take(phase, worker);
    return task.phase >= 0 ? task : shared_.take(phase, nodes_[size_t(worker)]);
  }

 private:
  const std::vector<int> nodes_;
  TaskQueues shared_;
  OwnTasks own_;
};

}  // namespace tandem
