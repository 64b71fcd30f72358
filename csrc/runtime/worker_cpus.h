// On which CPUs and memory nodes the workers of a pool are.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <climits>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime/task_queues.h"

namespace tandem {

inline bool more_workers_than_cpus(const std::vector<int>& cpus) {
  cpu_set_t allowed;
  const int usable = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : INT_MAX;
  std::set<int> distinct;
  int floating = 0;
  for (int cpu : cpus) cpu < 0 ? void(++floating) : void(distinct.insert(cpu));
  const bool shared = static_cast<int>(distinct.size()) + floating < static_cast<int>(cpus.size());
  return shared || static_cast<int>(cpus.size()) > std::max(usable, static_cast<int>(distinct.size()));
}

inline void pin(std::thread& thread, int worker, int cpu) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  if (pthread_setaffinity_np(thread.native_handle(), sizeof set, &set) != 0)
    throw std::invalid_argument("worker " + std::to_string(worker) + " cannot run on CPU " + std::to_string(cpu) +
                                ": this process may not use it (see taskset -pc, cpuset)");
}

inline std::vector<int> checked_nodes(std::vector<int> nodes, size_t workers, size_t memory_nodes) {
  if (nodes.empty()) nodes.assign(workers, 0);
  if (nodes.size() != workers) throw std::invalid_argument("nodes needs an entry for each worker");
  for (size_t i = 0; i < workers; ++i)
    if (const int before = i ? nodes[i - 1] : 0; nodes[i] < before || nodes[i] > before + (i > 0))
      throw std::invalid_argument("nodes are counted from 0, and workers sorted by node");
  if (nodes.back() >= kMaxNodes)
    throw std::invalid_argument("at most " + std::to_string(kMaxNodes) + " memory nodes can be used");
  if (memory_nodes && memory_nodes != size_t(nodes.back()) + 1)
    throw std::invalid_argument("memory_nodes needs an entry for each node");
  return nodes;
}

}  // namespace tandem
