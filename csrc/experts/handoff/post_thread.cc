#include "experts/handoff/post_thread.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "runtime/worker_cpus.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kBetweenLooks{100};  // at copies that are under way

struct Living {
  const pid_t process = getpid();
  std::mutex mutex;
  std::vector<PostThread*> threads;
};

Living& living() {
  static Living* const all = new Living;  // never destroyed: threads may end after static objects have
  return *all;
}

// Signals are the application's business, so they go to its own threads.
template <class Body>
std::thread* without_signals(Body body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread* thread = nullptr;
  try {
    thread = new std::thread(std::move(body));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread->native_handle(), "tandem-posts");
  return thread;
}

}  // namespace

PostThread::PostThread(std::shared_ptr<Mailbox> mailbox)
    : mailbox_(std::move(mailbox)), process_(getpid()), thread_(without_signals([this] { run(); })) {
  try {
    pin(*thread_, 0, mailbox_->caller_cpu());
  } catch (...) {
    end();
    throw;
  }
  std::lock_guard lock(living().mutex);
  living().threads.push_back(this);
}

PostThread::~PostThread() {
  if (is_forked()) return;
  {
    std::lock_guard lock(living().mutex);
    std::erase(living().threads, this);
  }
  end();
}

bool PostThread::is_forked() const { return getpid() != process_; }

void PostThread::begin(int64_t posts, double timeout_seconds) {
  if (is_forked()) throw std::runtime_error("posts are answered in the process that loaded the model, not in its fork");
  if (is_ending_.load(std::memory_order_acquire)) throw std::runtime_error("the thread that answers posts has ended");
  if (mailbox_->is_open()) throw std::logic_error("posts of another step are being answered");
  posts_ = posts;
  timeout_seconds_ = timeout_seconds;
  mailbox_->open();
  if (is_ending_.load(std::memory_order_seq_cst)) cancel();  // which may have come before `open` forgot it
  runs_.store(true, std::memory_order_release);
  begun_.raise();
}

void PostThread::finish() {
  if (!mailbox_->is_open()) return;
  if (is_forked()) throw std::runtime_error("posts are answered in the process that began them");
  mailbox_->wake_workers();  // while the GPU computes up to its first post
  for (;;) {
    const uint32_t seen = ended_.load();
    if (!runs_.load(std::memory_order_acquire)) break;
    if (Meanwhile* const work = mailbox_->do_piece_of_step()) {
      if (!runs_.load(std::memory_order_acquire)) work->count_late(Clock::now() - last_answer_);
      continue;
    }
    mailbox_->work_waits() ? ended_.sleep_past(seen, kBetweenLooks) : ended_.sleep_past(seen);
  }
  mailbox_->drop_work();
  mailbox_->close();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void PostThread::cancel() { mailbox_->cancel(); }

void PostThread::stop() { mailbox_->stop(); }

void PostThread::end() {
  if (is_forked() || !thread_) return;
  is_ending_.store(true, std::memory_order_seq_cst);
  cancel();
  begun_.raise();
  thread_->join();
  delete std::exchange(thread_, nullptr);
}

void PostThread::run() {
  for (;;) {
    const uint32_t seen = begun_.load();
    if (runs_.load(std::memory_order_acquire))
      answer();
    else if (is_ending_.load(std::memory_order_acquire))
      return;
    else
      begun_.sleep_past(seen);
  }
}

void PostThread::answer() {
  try {
    mailbox_->serve(posts_, timeout_seconds_);
  } catch (...) {
    error_ = std::current_exception();
  }
  last_answer_ = Clock::now();
  runs_.store(false, std::memory_order_release);
  ended_.raise();
}

void end_post_threads() {
  if (living().process != getpid()) return;  // a fork may have been made while somebody held the lock
  std::lock_guard lock(living().mutex);
  for (PostThread* const thread : living().threads) thread->end();
}

}  // namespace tandem
