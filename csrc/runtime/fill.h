// Filling new memory on all workers: each huge page is cleared and filled by one of them, while it is in that one's
// cache. Cleared in a phase of its own, the memory would be written twice.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/memory.h"
#include "runtime/task_queues.h"
#include "runtime/worker_pool.h"

namespace tandem {

// Memory of one node, which its workers fill: so that it is theirs even where the system was not asked for that.
struct NewMemory {
  uint8_t *begin, *end;
};

// Pieces of memory that is in use, or of many places: fill(node, piece) for every one, by whoever is free.
// first_from(node, offset): the first piece that begins there or later; of end - begin, how many there are.
template <class FirstFrom, class Fill>
void fill_known(WorkerPool& pool, const std::vector<NewMemory>& memory, const FirstFrom& first_from, const Fill& fill) {
  NodeTasks pieces;
  for (size_t node = 0; node < memory.size(); ++node)
    pieces.add(first_from(node, memory[node].end - memory[node].begin));
  const auto fill_one = [&](int64_t i, const Worker&) {
    const auto [node, piece] = pieces.at(i);
    fill(node, piece);
  };
  pool.run_phases({{pieces.count(), fill_one, pieces.of_node()}});
}

// The same of memory that is new. One entry per node.
template <class FirstFrom, class Fill>
void fill_new(WorkerPool& pool, const std::vector<NewMemory>& memory, const FirstFrom& first_from, const Fill& fill) {
  constexpr int64_t kPartsPerWorker = 4;  // fewer cannot be shared out evenly: then pieces are given out one by one
  NodeTasks parts;
  for (const NewMemory& m : memory) parts.add(HugeBuffer::parts(m.begin, m.end));
  const auto part_of = [&](NodeTasks::Place place) {
    return HugeBuffer::part(memory[place.node].begin, memory[place.node].end, place.task);
  };
  const auto touch = [&](int64_t i, const Worker&) { part_of(parts.at(i)).touch(); };
  const auto touch_and_fill = [&](int64_t i, const Worker&) {
    const size_t node = parts.at(i).node;
    const HugeBuffer::Part part = part_of(parts.at(i));
    part.touch();
    const int64_t last = first_from(node, part.end - memory[node].begin);
    for (int64_t piece = first_from(node, part.begin - memory[node].begin); piece < last; ++piece) fill(node, piece);
  };
  if (parts.count() >= kPartsPerWorker * pool.size()) {
    pool.run_phases({{parts.count(), touch_and_fill, parts.of_node()}});
  } else {
    pool.run_phases({{parts.count(), touch, parts.of_node()}});
    fill_known(pool, memory, first_from, fill);
  }
}

}  // namespace tandem
