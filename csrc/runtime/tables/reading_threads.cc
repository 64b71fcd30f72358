#include "runtime/tables/reading_threads.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace tandem {

ReadingThreads::~ReadingThreads() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  begin_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ReadingThreads::run(int64_t tasks, int64_t step, const Part& body) {
  if (tasks <= step) {
    if (tasks) body(0, tasks);
    return;
  }
  std::unique_lock lock(mutex_);
  start();  // first: what it throws leaves no job behind that refers to this call
  const auto job = std::make_shared<Job>(Job{tasks, step, std::cref(body), 0, 0, nullptr});
  awaited_.push_back(job);
  begin_.notify_all();
  while (do_part(*job, lock)) continue;
  end_.wait(lock, [&] { return !job->under_way; });
  std::erase(awaited_, job);
  if (job->error) std::rethrow_exception(job->error);
}

void ReadingThreads::queue(int64_t tasks, int64_t step, Part body) {
  const std::lock_guard lock(mutex_);
  start();
  if (threads_.empty()) return;  // nobody reads ahead; who needs the rows reads them
  queued_.push_back(std::make_shared<Job>(Job{tasks, step, std::move(body), 0, 0, nullptr}));
  begin_.notify_all();
}

void ReadingThreads::start() {
  try {
    while (int(threads_.size()) < count_) threads_.emplace_back([this] { loop(); });
  } catch (const std::system_error&) {
    // The system gives no more of them: fewer read, and who waits reads, too.
  }
}

void ReadingThreads::loop() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    std::shared_ptr<Job> job = front(awaited_);
    if (!job) job = front(queued_);
    if (!job)
      begin_.wait(lock);
    else
      do_part(*job, lock);
  }
}

std::shared_ptr<ReadingThreads::Job> ReadingThreads::front(Jobs& jobs) {
  while (!jobs.empty() && jobs.front()->next >= jobs.front()->tasks) jobs.pop_front();
  return jobs.empty() ? nullptr : jobs.front();
}

bool ReadingThreads::do_part(Job& job, std::unique_lock<std::mutex>& lock) {
  if (job.next >= job.tasks) return false;
  const int64_t first = job.next, last = std::min(job.tasks, first + job.step);
  job.next = last;
  ++job.under_way;
  lock.unlock();
  std::exception_ptr error;
  try {
    job.body(first, last);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (error) {
    job.error = job.error ? job.error : error;
    job.next = job.tasks;
  }
  if (!--job.under_way && job.next >= job.tasks) end_.notify_all();
  return true;
}

}  // namespace tandem
