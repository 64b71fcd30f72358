// Answers a mailbox's posts on a thread of its own, which is worker 0 of the pool while it does so. A step's thread
// stands in calls of the driver, which may wait until the graph has ended, or for Python's lock; the graph waits for
// its posts. So this thread calls no driver and frees no object of Python's.
//
//   step's thread     begin(posts) ── replay ── ... ── finish()
//   this thread            └─ answers ──────────────────┘ then sleeps
//
// Both may have the same CPU: this one yields it until the first post has come, and the other one sleeps in `finish`.
// Between `begin` and `finish` nobody else may run a region of the pool.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <thread>

#include "experts/handoff/mailbox.h"
#include "runtime/signal.h"

namespace tandem {

class PostThread {
 public:
  // On worker 0's CPU of the pool that the mailbox's layers have; on any while there is no layer. Elsewhere it would
  // meet a worker, and each post would wait for both. Throws std::invalid_argument where that CPU may not be used.
  explicit PostThread(std::shared_ptr<Mailbox> mailbox);
  ~PostThread();
  PostThread(const PostThread&) = delete;
  PostThread& operator=(const PostThread&) = delete;

  // Before a graph with so many posts is started, or kUntilStopped. timeout_seconds: for each post, see
  // `Mailbox::serve`. Throws std::logic_error before `finish`; std::runtime_error in a forked child, and after `end`.
  void begin(int64_t posts, double timeout_seconds);

  // Wakes the pool's workers, and sleeps until all posts are answered. Does the step's pieces of the mailbox's work
  // meanwhile, and drops it then. Throws what `Mailbox::serve` has thrown. Nothing where nothing was begun.
  void finish();

  // By any thread: ends what was begun with an error for `finish`. The GPU is told not to wait.
  void cancel();
  // By any thread: ends `kUntilStopped` once nothing is posted.
  void stop();

  // Cancels, and ends the thread. It cannot be begun again.
  void end();

  Mailbox& mailbox() { return *mailbox_; }

 private:
  void run();
  void answer();
  bool is_forked() const;

  std::shared_ptr<Mailbox> mailbox_;
  const pid_t process_;
  int64_t posts_ = 0;
  double timeout_seconds_ = 0;
  std::exception_ptr error_;  // of the run that has ended, until `finish`
  std::chrono::steady_clock::time_point last_answer_{};
  Signal begun_, ended_;
  std::atomic<bool> runs_{false};  // since `begin`, until the last answer
  std::atomic<bool> is_ending_{false};
  std::thread* thread_;  // leaked by a forked child, where nothing runs that could be joined
};

// Ends the threads of all that live: before the interpreter goes away, and with it the memory that they look at.
void end_post_threads();

}  // namespace tandem
