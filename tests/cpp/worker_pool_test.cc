// Contract of runtime/worker_pool.h, without Python so that it also runs under the thread sanitizer.
#include "runtime/worker_pool.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using tandem::Worker;
using tandem::WorkerPool;

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                               \
    }                                                                             \
  } while (0)

namespace {

// `make test` goes round a fourth as often as `make test-all`, which the thread sanitizer watches, too.
int rounds(int all) { return std::getenv("TANDEM_BRIEF") != nullptr ? (all + 3) / 4 : all; }

bool has_more_workers_than_cpus(const std::vector<int>& cpus) {
  cpu_set_t allowed;
  CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  const bool one_for_all = cpus.size() > 1 && cpus[0] == cpus[1] && cpus[0] >= 0;
  return one_for_all || static_cast<int>(cpus.size()) > CPU_COUNT(&allowed);
}

template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "(nothing thrown)";
}

void every_worker_runs_once(WorkerPool& pool) {
  std::vector<int> seen(pool.size(), 0);
  const auto caller = std::this_thread::get_id();
  for (int repeat = 0; repeat < rounds(2000); ++repeat)
    pool.run([&](const Worker& w) {
      CHECK(w.count == pool.size() && w.pool == &pool);
      CHECK((w.index == 0) == (std::this_thread::get_id() == caller));
      ++seen[w.index];
    });
  for (int n : seen) CHECK(n == rounds(2000));
}

// Between two barriers everybody sees what everybody wrote before the first.
void barriers_order_writes(WorkerPool& pool) {
  std::vector<int> slot(pool.size(), 0);
  pool.run([&](const Worker& w) {
    for (int round = 1; round <= rounds(500); ++round) {
      slot[w.index] = round;
      w.barrier();
      for (int value : slot) CHECK(value == round);
      w.barrier();
    }
  });
}

void tasks_run_exactly_once(WorkerPool& pool) {
  for (int64_t tasks : {0, 1, 2, 7, 1000}) {
    std::vector<int> hits(tasks, 0);
    pool.for_each(tasks, [&](int64_t i, const Worker&) { ++hits[i]; });
    for (int n : hits) CHECK(n == 1);
  }
}

// A phase sees everything that the one before has written; empty phases are passed over.
void phases_follow_each_other(WorkerPool& pool) {
  for (int repeat = 0; repeat < rounds(300); ++repeat) {
    std::vector<int> first(17, 0), second(5, 0);
    int sum = 0;
    pool.run_phases({
        {0, [](int64_t, const Worker&) { CHECK(false); }},
        {17, [&](int64_t i, const Worker&) { first[i] += static_cast<int>(i); }},
        {0, [](int64_t, const Worker&) { CHECK(false); }},
        {5, [&](int64_t i, const Worker&) { second[i] = std::accumulate(first.begin(), first.end(), repeat); }},
        {1, [&](int64_t, const Worker&) { sum = std::accumulate(second.begin(), second.end(), 0); }},
    });
    CHECK(sum == 5 * (136 + repeat));
  }
  pool.run_phases({});
}

// Tasks that may be taken early run once, and only when their phase has begun; steps ahead are counted from 0, for
// tasks that there are, and never for a phase that has tasks of another between it and the current one.
void tasks_are_taken_early(WorkerPool& pool) {
  for (int repeat = 0; repeat < rounds(300); ++repeat) {
    std::vector<int> first(9, 0), second(5, 0), third(1 + repeat % 20, 0);
    std::atomic<int> done{0};
    std::vector<std::atomic<int>> steps(third.size());
    int sum = 0;
    const auto ahead_of_second = [&](int64_t task, int64_t) {
      CHECK(task >= 0 && task < 5);
      return false;
    };
    const auto ahead_of_third = [&](int64_t task, int64_t step) {
      CHECK(done >= 9 && steps[static_cast<size_t>(task)]++ == step);
      return step < 3;
    };
    pool.run_phases({
        {9, [&](int64_t i, const Worker&) { first[i] = 1, ++done; }},
        {0, [](int64_t, const Worker&) { CHECK(false); }},
        {5, [&](int64_t i, const Worker&) { second[i] = std::accumulate(first.begin(), first.end(), 0), ++done; },
         nullptr, ahead_of_second},
        {static_cast<int64_t>(third.size()),
         [&](int64_t i, const Worker&) { third[i] += std::accumulate(second.begin(), second.end(), 0); }, nullptr,
         ahead_of_third},
        {1, [&](int64_t, const Worker&) { sum = std::accumulate(third.begin(), third.end(), 0); }},
    });
    CHECK(done == 14 && sum == 45 * static_cast<int>(third.size()));
  }
}

// Workers' own tasks are done once each, by whoever: phases of them follow each other and others, and may be begun
// early. Some worker may have none.
void own_tasks_are_done_once(WorkerPool& pool) {
  for (int repeat = 0; repeat < rounds(300); ++repeat) {
    std::vector<int64_t> counts(size_t(pool.size())), later(size_t(pool.size()), 1);
    for (size_t w = 0; w < counts.size(); ++w) counts[w] = repeat % 7 * int64_t((w + size_t(repeat)) % 3);
    const int64_t tasks = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    std::vector<int> hits(size_t(tasks), 0), again(later.size(), 0);
    int before = 0, after = 0;
    const auto hit = [&](int64_t first, int64_t count, const Worker&) {
      CHECK(count >= 1 && count <= 3 && before == 1);
      for (int64_t i = first; i < first + count; ++i) ++hits[size_t(i)];
    };
    const auto hit_again = [&](int64_t first, int64_t count, const Worker&) {
      CHECK(count == 1 && std::accumulate(hits.begin(), hits.end(), int64_t{0}) == tasks);
      ++again[size_t(first)];
    };
    const auto ahead = [&](int64_t, int64_t step) { return step < 2; };
    const WorkerPool::Own first{counts.data(), 3, hit}, second{later.data(), 1, hit_again};
    pool.run_phases({{1, [&](int64_t, const Worker&) { before = 1; }},
                     {tasks, {}, nullptr, repeat % 2 ? WorkerPool::AheadBody(ahead) : WorkerPool::AheadBody(), &first},
                     {pool.size(), {}, nullptr, ahead, &second},
                     {1, [&](int64_t, const Worker&) { after = std::accumulate(again.begin(), again.end(), 0); }}});
    for (int n : hits) CHECK(n == 1);
    for (int n : again) CHECK(n == 1);
    CHECK(after == pool.size());
  }
  std::vector<int64_t> wrong(size_t(pool.size()), 2);
  const auto nothing = [](int64_t, int64_t, const Worker&) {};
  const WorkerPool::Own own{wrong.data(), 1, nothing};
  CHECK(message_of<std::invalid_argument>([&] { pool.run_phases({{1, {}, nullptr, {}, &own}}); }) ==
        "the workers' own tasks are not all of the phase's");
  wrong.assign(wrong.size(), 0);
  wrong[0] = 65536;
  CHECK(message_of<std::invalid_argument>([&] { pool.run_phases({{65536, {}, nullptr, {}, &own}}); }) ==
        "a worker has at most 65535 tasks of its own");
}

// A worker that is kept busy by its own first task is helped: others do the rest of its queue meanwhile.
void a_slow_worker_is_helped(WorkerPool& pool) {
  if (pool.size() == 1) return;
  std::vector<int64_t> counts(size_t(pool.size()), 0);
  counts[0] = 64;
  std::atomic<int64_t> done{0};
  const auto task = [&](int64_t first, int64_t count, const Worker& w) {
    if (w.index == 0 && first == 0)
      while (done < 64 - count) std::this_thread::yield();
    done += count;
  };
  const WorkerPool::Own own{counts.data(), 8, task};
  for (int repeat = 0; repeat < 20; ++repeat) {
    done = 0;
    pool.run_phases({{64, {}, nullptr, {}, &own}});
    CHECK(done == 64);
  }
}

// Everybody else takes a task of the next phase early while one worker is still at work, which then finds none but can
// end its phase. (With more workers than CPUs they do not, and it does not wait for them.)
void a_slow_worker_is_waited_for(WorkerPool& pool, bool crowded) {
  std::atomic<int> waiting{0}, early{0};
  const int others = crowded ? 0 : pool.size() - 1;
  const auto ahead = [&](int64_t, int64_t step) {
    if (step == 0) ++waiting;
    return false;
  };
  for (int repeat = 0; repeat < 20; ++repeat) {
    waiting = 0;
    std::atomic<bool> over{false};
    const auto slow = [&](int64_t, const Worker&) {
      while (waiting < others) std::this_thread::yield();
      if (crowded) std::this_thread::sleep_for(std::chrono::microseconds(200));
      over = true;
    };
    const auto next = [&](int64_t, const Worker&) { early += !over; };
    pool.run_phases({{1, slow}, {3 * pool.size(), next, nullptr, ahead}});
    CHECK(early == 0);
  }
}

// Tasks of the next phase that are ready do not wait for the current one, and phases end in their order all the same.
void ready_tasks_do_not_wait(WorkerPool& pool, bool crowded) {
  if (pool.size() == 1 || crowded) return;
  for (int repeat = 0; repeat < rounds(100); ++repeat) {
    std::atomic<int> early{0}, last{0};
    std::atomic<bool> over{false};
    const auto slow = [&](int64_t, const Worker&) {
      while (early < 9) std::this_thread::yield();
      over = true;
    };
    const auto next = [&](int64_t, const Worker&) { ++early; };
    const auto third = [&](int64_t, const Worker&) { CHECK(over && early == 9 && ++last <= 5); };
    const auto nothing = [](int64_t, int64_t) { return false; };
    const auto ready = [](int64_t) { return true; };
    const auto not_ready = [](int64_t) { return false; };
    pool.run_phases(
        {{1, slow}, {9, next, nullptr, nothing, nullptr, ready}, {5, third, nullptr, nothing, nullptr, not_ready}});
    CHECK(last == 5);
  }
}

// A worker that still knows the last phase of a region takes nothing of the next one out of turn.
void regions_follow_each_other(WorkerPool& pool) {
  const int64_t tasks = pool.size();
  const auto nothing = [](int64_t, int64_t) { return false; };
  for (int repeat = 0; repeat < rounds(1500); ++repeat) {
    std::atomic<int64_t> done{0};
    const auto in_turn = [&](int64_t phase) { CHECK(done++ / tasks == phase); };
    pool.run_phases({{tasks, [&](int64_t, const Worker&) { in_turn(0); }},
                     {tasks, [&](int64_t, const Worker&) { in_turn(1); }, nullptr, nothing},
                     {tasks, [&](int64_t, const Worker&) { in_turn(2); }, nullptr, nothing},
                     {tasks, [&](int64_t, const Worker&) { in_turn(3); }, nullptr, nothing}});
    CHECK(done == 4 * tasks);
  }
}

// Who has taken a task early is not held up by a phase that ends with an exception, and does not run it.
void an_exception_frees_who_waits_early(WorkerPool& pool) {
  std::atomic<int> later{0};
  const auto nothing = [](int64_t, int64_t) { return false; };
  const auto region = [&] {
    pool.run_phases({{3,
                      [](int64_t i, const Worker&) {
                        std::this_thread::sleep_for(std::chrono::microseconds(50));
                        if (i == 2) throw std::out_of_range("task 2");
                      }},
                     {64, [&](int64_t, const Worker&) { ++later; }, nullptr, nothing},
                     {64, [&](int64_t, const Worker&) { ++later; }, nullptr, nothing}});
  };
  for (int repeat = 0; repeat < rounds(100); ++repeat) CHECK(message_of<std::out_of_range>(region) == "task 2");
  CHECK(later == 0);
}

// A phase whose task throws ends the region: no later phase runs its tasks, and the pool works afterwards.
void a_throwing_task_ends_the_region(WorkerPool& pool) {
  std::atomic<int> later{0};
  const auto region = [&] {
    pool.run_phases({{8,
                      [](int64_t i, const Worker&) {
                        if (i == 3) throw std::out_of_range("task 3");
                      }},
                     {8, [&](int64_t, const Worker&) { ++later; }}});
  };
  for (int repeat = 0; repeat < rounds(100); ++repeat) CHECK(message_of<std::out_of_range>(region) == "task 3");
  CHECK(later == 0);
}

// Tasks of nodes are done once each whoever does them, phase after phase; a worker begins with its own node's.
void nodes_have_their_own_tasks() {
  WorkerPool pool({-1, -1, -1, -1}, 50, {0, 0, 1, 2}, {0, 2, 5});
  CHECK(pool.nodes() == 3 && pool.workers_of(0) == 2 && pool.workers_of(2) == 1);
  CHECK(pool.first_of(1, 10) == 5 && pool.first_of(2, 10) == 7 && pool.first_of(3, 10) == 10);
  CHECK(pool.memory_node(1) == 2 && pool.memory_node(2) == 5);
  for (int repeat = 0; repeat < rounds(300); ++repeat) {
    const int64_t counts[] = {repeat % 5, 20, repeat % 2}, none[] = {0, 0, 3};
    const int64_t tasks = counts[0] + counts[1] + counts[2];
    std::vector<int> hits(tasks, 0);
    int later = 0;
    const auto ahead = [](int64_t, int64_t step) { return step < 2; };
    pool.run_phases({
        {tasks, [&](int64_t i, const Worker&) { ++hits[i]; }, counts},
        {3,
         [&](int64_t i, const Worker&) {
           if (i == 1) later = std::accumulate(hits.begin(), hits.end(), 0);
         },
         none, repeat % 3 ? WorkerPool::AheadBody(ahead) : WorkerPool::AheadBody()},
    });
    for (int n : hits) CHECK(n == 1);
    CHECK(later == tasks);
  }
  WorkerPool caller({-1}, 50, {0}, {3});
  CHECK(caller.nodes() == 1 && caller.memory_node(0) == 3);
  CHECK(WorkerPool({-1, -1}, 0, {0, 1}).memory_node(1) == -1);
  CHECK(message_of<std::invalid_argument>([] { WorkerPool({-1, -1}, 0, {0, 2}); }) ==
        "nodes are counted from 0, and workers sorted by node");
  CHECK(message_of<std::invalid_argument>([] { WorkerPool({-1, -1}, 0, {0, 1}, {4}); }) ==
        "memory_nodes needs an entry for each node");
  const int64_t wrong[] = {1};
  CHECK(message_of<std::invalid_argument>([&] { caller.run_phases({{2, [](int64_t, const Worker&) {}, wrong}}); }) ==
        "the nodes' tasks are not all of the phase's");
  CHECK(message_of<std::invalid_argument>([] { WorkerPool({-1, -1}, 0, {1, 0}); }) ==
        "nodes are counted from 0, and workers sorted by node");
  CHECK(message_of<std::invalid_argument>([] { WorkerPool({-1, -1}, 0, {1}); }) ==
        "nodes needs an entry for each worker");
}

// Which queue a worker looks at first, without threads.
void own_tasks_come_first() {
  tandem::TaskQueues queues(3);
  const int64_t counts[] = {2, 1, 1};
  queues.begin_region();
  queues.open(4, 4, counts);
  const auto taken = [&](int phase, int node) {
    const auto task = queues.take(phase, node);
    return task.phase < 0 ? -1 : 10 * task.phase + static_cast<int>(task.index);
  };
  CHECK(taken(4, 1) == 42 && taken(5, 1) == -1 && taken(4, 1) == 43);
  queues.open(5, 4, counts);  // while the phase before it is not over
  CHECK(taken(4, 1) == 40 && taken(5, 1) == 52 && taken(4, 2) == 41 && taken(4, 0) == -1 && taken(6, 0) == -1);
  queues.open(6, 4, counts);
  CHECK(taken(4, 0) == -1 && taken(6, 0) == 60 && taken(5, 0) == 50);
  queues.begin_region();
  CHECK(taken(5, 0) == -1 && taken(6, 0) == -1);
}

// A worker that is kept busy elsewhere holds up nobody: here, inside a task of this very region's first phase, the
// caller and the others finish everything else first.
void tasks_wait_for_no_worker(WorkerPool& pool) {
  if (pool.size() == 1) return;
  std::atomic<int> done{0};
  pool.for_each(64, [&](int64_t i, const Worker&) {
    if (i == 0)
      while (done < 63) std::this_thread::yield();
    else
      ++done;
  });
  CHECK(done == 63);
}

// Whichever worker throws, the region ends, the message arrives, and the pool works afterwards.
void an_exception_frees_everybody(WorkerPool& pool) {
  for (int repeat = 0; repeat < rounds(300); ++repeat) {
    const int thrower = repeat % pool.size();
    const std::string text = message_of<std::runtime_error>([&] {
      pool.run([&](const Worker& w) {
        if (repeat % 3 == 0) w.barrier();
        if (w.index == thrower) throw std::runtime_error("worker " + std::to_string(thrower));
        w.barrier();
        w.barrier();
      });
    });
    CHECK(text == "worker " + std::to_string(thrower));
    int ran = 0;
    pool.run([&](const Worker& w) {
      w.barrier();
      if (w.index == 0) ++ran;
    });
    CHECK(ran == 1);
  }
  CHECK(message_of<std::out_of_range>([&] {
          pool.for_each(100, [](int64_t i, const Worker&) {
            if (i == 40) throw std::out_of_range("task 40");
          });
        }) == "task 40");
}

void callers_queue_up(WorkerPool& pool) {
  int64_t total = 0;  // not atomic: regions must not overlap
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int i = 0; i < 500; ++i)
        pool.run([&](const Worker& w) {
          if (w.index == 0) ++total;
          w.barrier();
        });
      for (int i = 0; i < 500; ++i) pool.for_each(1, [&](int64_t, const Worker&) { ++total; });
    });
  for (auto& caller : callers) caller.join();
  CHECK(total == 4000);
}

void nested_regions_are_refused(WorkerPool& pool) {
  const auto nested = [&] {
    pool.run([&](const Worker& w) {
      if (w.index == w.count - 1) pool.run([](const Worker&) {});
    });
  };
  CHECK(message_of<std::logic_error>(nested).find("inside") != std::string::npos);
}

void bad_arguments_are_refused() {
  CHECK(message_of<std::invalid_argument>([] { WorkerPool({}); }).find("at least one") != std::string::npos);
  CHECK(message_of<std::invalid_argument>([] { WorkerPool({0, 1000000}); }).find("CPU 1000000") != std::string::npos);
}

void a_forked_child_is_told(WorkerPool& pool) {
  if (pool.size() == 1) return;
  const pid_t child = fork();
  if (child == 0) {
    try {
      pool.run([](const Worker&) {});
    } catch (const std::runtime_error&) {
      _exit(0);
    }
    _exit(1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void idle_workers_sleep(WorkerPool& pool) {
  pool.run([](const Worker&) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // past the spin
  const auto cpu_seconds = [] {
    rusage u{};
    getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + 1e-6 * (u.ru_utime.tv_usec + u.ru_stime.tv_usec);
  };
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::seconds(1));
  CHECK(cpu_seconds() - before < 0.05);  // CPU time, not wall time: other load does not change it
}

}  // namespace

// Every worker fetches its share of each range, the first ranges first.
void probable_reads_are_shared() {
  std::vector<uint8_t> memory(1 << 20, 7);
  const int64_t most = 1 << 20;
  tandem::ProbableReads reads(3);
  const auto fetched = [&](std::initializer_list<int> workers) {
    for (int worker : workers)
      while (reads.fetch(worker)) {
      }
    return reads.withdraw();
  };
  const std::vector<tandem::SharedRange> ranges{{memory.data(), 7, 3000, 0, 0, 3},
                                                {memory.data(), 0, 3000, 0, 0, 3},
                                                {memory.data() + 64, 2, 100, 1, 1, 2},
                                                {nullptr, 0, 0, 0, 0, 0}};
  reads.announce(ranges, most);
  CHECK(fetched({0, 1, 2}) == 7 * 3000 + 200);
  CHECK(reads.withdraw() == 0 && !reads.fetch(0) && fetched({0, 1, 2}) == 0);
  reads.announce(ranges, most);
  CHECK(fetched({0}) == 2 * 3000);  // units 0 and 1; none of the others, which are not among its node's
  reads.announce(ranges, most);
  CHECK(fetched({2}) == 3 * 3000 + 100);
  reads.announce(ranges, 2000);
  CHECK(fetched({0}) == 2048);  // whole chunks
  reads.announce({{memory.data(), 7, 3000, 2, 0, 3}}, most);
  CHECK(fetched({0}) == 3 * 3000);  // another turn: others have one more
  reads.announce(ranges, 0);
  CHECK(fetched({0, 1, 2}) == 0);
  reads.announce({}, most);
  CHECK(fetched({0, 1, 2}) == 0);
  reads.announce(std::vector<tandem::SharedRange>(200, {memory.data(), 3, 100, 0, 0, 3}), most);
  CHECK(fetched({0, 1, 2}) == 128 * 300);
}

// Without threads: whose tasks are taken by whom, and in which order.
void own_tasks_belong_to_workers() {
  tandem::OwnTasks tasks({0, 0, 1});
  const auto text = [](const tandem::OwnTasks::Task& task) {
    if (task.phase < 0) return std::string("none");
    return std::to_string(task.phase) + ":" + std::to_string(task.index) + "+" + std::to_string(task.count);
  };
  const int64_t counts[] = {7, 2, 3};
  CHECK(text(tasks.take(3, 0)) == "none" && text(tasks.steal(3, 0)) == "none");
  tasks.open(3, 12, counts, 2);
  CHECK(text(tasks.take(2, 0)) == "none" && text(tasks.take(5, 0)) == "none" && text(tasks.steal(5, 0)) == "none");
  CHECK(text(tasks.take(3, 0)) == "3:0+2" && text(tasks.take(3, 0)) == "3:2+2");  // at most two
  CHECK(text(tasks.take(3, 2)) == "3:9+1" && text(tasks.take(3, 2)) == "3:10+1" && text(tasks.take(3, 1)) == "3:7+1");
  CHECK(text(tasks.steal(3, 1)) == "3:6+1");  // the longest queue's last
  CHECK(text(tasks.steal(3, 0)) == "3:5+1");
  CHECK(text(tasks.steal(3, 2)) == "3:11+1");  // nearer than worker 0's or 1's, of which there are as many
  const int64_t later[] = {0, 5, 0};
  tasks.open(4, 5, later, 100);  // while the phase before it is not over
  CHECK(text(tasks.take(4, 0)) == "none" && text(tasks.take(4, 1)) == "4:0+2" && text(tasks.steal(4, 0)) == "4:4+1");
  CHECK(text(tasks.take(3, 0)) == "3:4+1" && text(tasks.steal(3, 0)) == "3:8+1" && text(tasks.steal(3, 0)) == "none");
  tasks.open(3, 1, std::vector<int64_t>{0, 0, 1}.data(), 1);  // of the next region
  CHECK(text(tasks.take(3, 0)) == "none" && text(tasks.take(3, 2)) == "3:0+1" && text(tasks.take(3, 2)) == "none");
}

// Hints are taken while nobody has work, torn ones too, and harm nothing.
void announced_memory_is_fetched(WorkerPool& pool) {
  std::vector<uint8_t> memory(1 << 20, 7);
  const std::vector<tandem::ByteRange> known{{memory.data(), int64_t(memory.size())}, {memory.data(), 100}};
  const std::vector<tandem::ByteRange> nowhere{{reinterpret_cast<const uint8_t*>(8), 1 << 20}};
  for (int repeat = 0; repeat < rounds(200); ++repeat) {
    pool.announce(repeat % 3 ? known : nowhere);
    const tandem::SharedRange shared{(repeat % 3 ? known : nowhere)[0].data, 64, 1 << 14, repeat, 0, pool.size()};
    if (repeat % 5 == 4) pool.announce_probable({shared, shared}, 1 << 19);
    if (repeat % 7 == 6) CHECK(pool.withdraw() <= 2 << 20);
    pool.fetch_a_little();
    std::atomic<int> done{0};
    pool.for_each(5, [&](int64_t, const Worker&) { ++done; });
    CHECK(done == 5);
  }
}

int main() {
  bad_arguments_are_refused();
  probable_reads_are_shared();
  own_tasks_come_first();
  own_tasks_belong_to_workers();
  nodes_have_their_own_tasks();
  // More threads than cores, one core shared by all, no spinning at all: every way of waiting.
  const std::vector<std::vector<int>> shapes = {{-1}, {-1, -1}, {0, 0, 0}, {-1, -1, -1, -1, -1, -1, -1}};
  for (const auto& cpus : shapes)
    for (int spin_us : {0, 200}) {
      WorkerPool pool(cpus, spin_us);
      CHECK(pool.size() == static_cast<int>(cpus.size()));
      every_worker_runs_once(pool);
      barriers_order_writes(pool);
      tasks_run_exactly_once(pool);
      phases_follow_each_other(pool);
      tasks_are_taken_early(pool);
      own_tasks_are_done_once(pool);
      a_slow_worker_is_helped(pool);
      regions_follow_each_other(pool);
      a_slow_worker_is_waited_for(pool, has_more_workers_than_cpus(cpus));
      ready_tasks_do_not_wait(pool, has_more_workers_than_cpus(cpus));
      an_exception_frees_who_waits_early(pool);
      a_throwing_task_ends_the_region(pool);
      tasks_wait_for_no_worker(pool);
      an_exception_frees_everybody(pool);
      callers_queue_up(pool);
      announced_memory_is_fetched(pool);
      nested_regions_are_refused(pool);
#if !defined(__SANITIZE_THREAD__)  // the sanitizer runs threads of its own
      a_forked_child_is_told(pool);
      idle_workers_sleep(pool);
#endif
    }
  std::puts("worker_pool_test: ok");
}
