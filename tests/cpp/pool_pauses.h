// For worker_pool.cc: moments between two steps that take long enough for other threads to come between; and CPUs
// enough, since nobody takes tasks early where workers share them.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

inline int many_cpus(pid_t, size_t bytes, cpu_set_t* set) {
  std::memset(set, 0xff, bytes);
  return 0;
}
#define sched_getaffinity many_cpus

enum class PoolMoment { knows_phase, opened_next };

inline void pause_pool(PoolMoment moment) {
  static thread_local uint32_t random = 1;
  random = random * 1664525u + 1013904223u;
  if (moment == PoolMoment::opened_next || random >> 30 == 0) usleep(random >> 26);
}

#define TANDEM_POOL_PAUSE(moment) pause_pool(PoolMoment::moment)
