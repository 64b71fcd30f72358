// A few threads that wait for a disk. They hold no core while they do, so they are no workers of a pool.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem {

class ReadingThreads {
 public:
  using Part = std::function<void(int64_t first, int64_t last)>;

  // The threads begin with the first call that needs them.
  explicit ReadingThreads(int count) : count_(count) {}
  // What was queued and has not begun is left out.
  ~ReadingThreads();
  ReadingThreads(const ReadingThreads&) = delete;
  ReadingThreads& operator=(const ReadingThreads&) = delete;

  int count() const { return count_; }

  // Calls `body` for [0, tasks), `step` of them at a time; the calling thread takes part. Returns when all are done,
  // and throws again what one of them threw; those that have not begun then are left out.
  void run(int64_t tasks, int64_t step, const Part& body);

  // The same without waiting, by threads that have nothing else to do. `body` must not throw.
  void queue(int64_t tasks, int64_t step, Part body);

 private:
  struct Job {
    int64_t tasks, step;
    Part body;
    int64_t next = 0, under_way = 0;
    std::exception_ptr error;
  };
  using Jobs = std::deque<std::shared_ptr<Job>>;

  void start();
  void loop();
  // Takes a part of a job and does it; the lock is free meanwhile. False: all parts are taken.
  bool do_part(Job& job, std::unique_lock<std::mutex>& lock);
  static std::shared_ptr<Job> front(Jobs& jobs);

  const int count_;
  std::mutex mutex_;
  std::condition_variable begin_, end_;
  Jobs awaited_, queued_;  // of the former somebody awaits the end
  std::vector<std::thread> threads_;
  bool stop_ = false;
};

}  // namespace tandem
