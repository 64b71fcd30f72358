// One piece of work at a time on a thread of its own, which starts with the first.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace tandem {

// Signals are the application's business, so they go to its own threads: those that start meanwhile get none.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

class Aside {
 public:
  using Clock = std::chrono::steady_clock;

  // `done`: called on that thread when a piece of work has ended.
  explicit Aside(std::function<void()> done) : done_(std::move(done)) {}
  ~Aside() { stop(); }

  // Nothing may be under way.
  void begin(std::function<void()> work) {
    if (!thread_.joinable()) start();
    const std::lock_guard lock(mutex_);
    work_ = std::move(work);
    busy_.store(true, std::memory_order_release);
    changed_.notify_one();
  }
  bool is_busy() const { return busy_.load(std::memory_order_acquire); }

  // Of what has ended, once: the seconds that it took. Rethrows what it threw.
  double taken() {
    const double seconds = std::exchange(seconds_, 0.0);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    return seconds;
  }

 private:
  void start() {
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { serve(); });
    pthread_setname_np(thread_.native_handle(), "tandem-aside");
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return is_busy() || stopping_; });
      if (stopping_) return;
      const auto started = Clock::now();
      try {
        work_();
      } catch (...) {
        error_ = std::current_exception();
      }
      work_ = nullptr;
      seconds_ = std::chrono::duration<double>(Clock::now() - started).count();
      busy_.store(false, std::memory_order_release);
      done_();
    }
  }

  void stop() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);  // after what is under way
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  std::function<void()> done_, work_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> busy_{false};
  bool stopping_ = false;
  double seconds_ = 0.0;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace tandem
