// How rows are spread over the pool: cheap calls stay on the calling thread, since waking others costs more.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/worker_pool.h"

namespace tandem {

// body(row) for every row; `elements` is the work of one row. A region costs about a microsecond, in which one core
// does some thousands of elements.
template <class Body>
void for_rows(WorkerPool& pool, int64_t rows, int64_t elements, Body body) {
  constexpr int64_t kElementsPerTask = 16384;
  const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, elements));
  const int64_t tasks = (rows + rows_per_task - 1) / rows_per_task;
  const auto run_task = [&](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (int64_t r = task * rows_per_task; r < end; ++r) body(r);
  };
  if (tasks <= 1) return run_task(0);
  pool.for_each(tasks, [&](int64_t task, const Worker&) { run_task(task); });
}

}  // namespace tandem
