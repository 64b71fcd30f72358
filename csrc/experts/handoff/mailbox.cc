#include "experts/handoff/mailbox.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "experts/mailbox_words.h"
#include "runtime/signal.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kHeaderBytes = 640;
constexpr int kPollsPerClock = 64;
constexpr size_t kMostWork = 4;
constexpr int64_t kAll = int64_t{1} << 30;  // experts that are kept: none is late

int64_t aligned(int64_t bytes) { return (bytes + 127) / 128 * 128; }

std::atomic_ref<uint32_t> word(uint8_t* memory, MailboxWord index) {
  return std::atomic_ref<uint32_t>(reinterpret_cast<uint32_t*>(memory)[index]);
}

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

MailboxOffsets mailbox_offsets(const MailboxShape& s) {
  MailboxOffsets at;
  at.x = kHeaderBytes;
  at.ids = at.x + aligned(s.tokens * s.hidden * 2);
  at.weights = at.ids + aligned(s.tokens * s.top_k * 4);
  at.result = at.weights + aligned(s.tokens * s.top_k * 4);
  const int64_t end = at.result + aligned(s.tokens * s.hidden * 4);
  at.half = s.late ? end - at.x : 0;
  at.hints = end + at.half;
  at.bytes = at.hints + aligned(kMostHintedTokens * s.top_k * 4);
  return at;
}

Mailbox::Mailbox(uint8_t* memory, const MailboxShape& shape)
    : memory_(memory), shape_(shape), at_(mailbox_offsets(shape)) {}

// How long and how eagerly a post is waited for.
struct Mailbox::Patience {
  Patience(int64_t posts, double timeout_seconds) : is_known(posts != kUntilStopped), seconds(timeout_seconds) {}

  const bool is_known;  // the number of posts
  const double seconds;
  bool is_first = true;  // post of this call
  Clock::time_point since{};

  void begin() { since = Clock::now(); }

  // Between two rounds of polls. Until the first post has come, this thread may share its CPU with the one that
  // replays the graph.
  void pause(Clock::time_point now) const {
    if (is_first) sched_yield();
    if (!is_known && now - since > Mailbox::kSpin) std::this_thread::sleep_for(Mailbox::kNap);
  }
};

void Mailbox::check_closed(const char* what) const {
  if (is_open()) throw std::logic_error(std::string("a mailbox cannot ") + what + " while its posts are answered");
}

int Mailbox::add(std::shared_ptr<ExpertStore> layer) {
  check_closed("get a layer");
  if (layer->shape().hidden != shape_.hidden)
    throw std::invalid_argument("the layer's hidden size is " + std::to_string(layer->shape().hidden) +
                                ", the mailbox's " + std::to_string(shape_.hidden));
  layers_.push_back(std::move(layer));
  deferring_.push_back({kAll, 0});
  return int(layers_.size()) - 1;
}

void Mailbox::defer(int layer, const Late& late) {
  check_closed("change a layer");
  if (layer < 0 || size_t(layer) >= layers_.size() || !shape_.late || late.kept < 0 || late.routed > shape_.top_k)
    throw std::invalid_argument("layer " + std::to_string(layer) + " of this mailbox cannot defer experts");
  deferring_[size_t(layer)] = late;
}

void Mailbox::serve(int64_t posts, double timeout_seconds) {
  try {
    answer_all(posts, timeout_seconds);
  } catch (...) {
    word(memory_, kFailed).store(1, std::memory_order_release);  // first of all: the GPU waits
    foresight_.forget();
    waiting_ = 0;
    throw;
  }
}

void Mailbox::answer_all(int64_t posts, double timeout_seconds) {
  Patience patience(posts, timeout_seconds);
  for (int64_t i = 0; !patience.is_known || i < posts; ++i) {
    if (i > 0) use_time();  // before the first post the GPU may not have ended what pieces read
    patience.begin();
    if (!wait_for_post(patience)) return;
    patience.is_first = false;
    has_post_.store(true, std::memory_order_release);
    const auto posted = Clock::now();
    wait_seconds_.add(seconds(posted - patience.since));
    const uint32_t flags = word(memory_, kFlags).load(std::memory_order_relaxed);
    half_ = flags & kSecondHalf ? at_.half : 0;
    ExpertStore& asked = answer(!(flags & kLastPost) && (!patience.is_known || i + 1 < posts));
    word(memory_, kDone).store(++answered_, std::memory_order_release);
    compute_late(asked);
    serve_seconds_.add(seconds(Clock::now() - posted));
    foresight_.compare(asked, ids_);
    may_be_hinted_ = true;
  }
}

int Mailbox::caller_cpu() const { return layers_.empty() ? -1 : layers_.front()->workspace().pool().caller_cpu(); }

void Mailbox::wake_workers() {
  if (!layers_.empty()) layers_.front()->workspace().pool().wake();
}

bool Mailbox::posted(uint32_t number) { return word(memory_, kPosted).load(std::memory_order_acquire) == number; }

void Mailbox::meanwhile(std::shared_ptr<Meanwhile> work) {
  std::shared_ptr<Meanwhile> dropped;  // freed without the lock: it may be Python's
  std::lock_guard lock(work_mutex_);
  std::erase(meanwhile_, work);
  if (meanwhile_.size() == kMostWork) {
    dropped = std::move(meanwhile_.front());
    meanwhile_.erase(meanwhile_.begin());
  }
  meanwhile_.push_back(std::move(work));
  has_work_.store(true, std::memory_order_relaxed);
}

void Mailbox::drop_work() {
  std::vector<std::shared_ptr<Meanwhile>> dropped;
  std::lock_guard lock(work_mutex_);
  dropped.swap(meanwhile_);
  has_work_.store(false, std::memory_order_relaxed);
}

// Whether there was one.
bool Mailbox::do_a_piece() {
  const std::unique_lock lock(work_mutex_, std::try_to_lock);
  if (!lock) return false;
  for (const auto& work : meanwhile_)
    if (work->next() == Meanwhile::Progress::did) return true;
  return false;
}

Meanwhile* Mailbox::do_piece_of_step() {
  work_waits_ = !meanwhile_.empty();
  if (!has_post_.load(std::memory_order_acquire)) return nullptr;
  work_waits_ = false;
  for (const auto& work : meanwhile_) {
    const Meanwhile::Progress done = work->next_of_step();
    if (done == Meanwhile::Progress::did) return work.get();
    work_waits_ = work_waits_ || done == Meanwhile::Progress::waits;
  }
  return nullptr;
}

// Workers that are free fetch weights beside it, if a hint has come.
void Mailbox::use_time() {
  if (!has_work()) return;
  const auto until = Clock::now() + kTimeForPieces;
  while (!posted(answered_ + 1) && Clock::now() < until) {
    look_for_hint();
    if (!do_a_piece()) return;
  }
}

// False: `stop` was called, and nothing is posted.
bool Mailbox::wait_for_post(Patience& patience) {
  const uint32_t number = answered_ + 1;
  for (;;) {
    for (int i = 0; i < kPollsPerClock; ++i) {
      if (posted(number)) return true;
      poll_once();
    }
    if (word(memory_, kGaveUp).load(std::memory_order_acquire))
      throw std::runtime_error("the GPU waited too long for the CPU's experts and has given up");
    if (cancelled_.load(std::memory_order_acquire)) throw std::runtime_error("the step was given up");
    if (!patience.is_known && stopped_.load(std::memory_order_acquire)) return posted(number);
    const auto now = Clock::now();
    if (patience.is_known && seconds(now - patience.since) >= patience.seconds)
      throw std::runtime_error("the GPU asked for no experts for " + std::to_string(patience.seconds) + " s");
    patience.pause(now);
  }
}

void Mailbox::poll_once() {
  look_for_hint();
  if (!foresight_.fetch_a_little()) cpu_pause();
}

// One that is late counts, too. What it says is copied before it is looked at: a GPU that has given up hints on.
void Mailbox::look_for_hint() {
  if (!may_be_hinted_ || word(memory_, kHinted).load(std::memory_order_acquire) != answered_) return;
  may_be_hinted_ = false;
  const uint32_t layer = word(memory_, kHintLayer).load(std::memory_order_relaxed);
  const uint32_t count = word(memory_, kHintIds).load(std::memory_order_relaxed);
  if (layer >= layers_.size() || int64_t(count) > kMostHintedTokens * shape_.top_k) return;
  const int32_t* ids = reinterpret_cast<const int32_t*>(memory_ + at_.hints);
  foresight_.begin(layers_[layer], {ids, ids + count});
}

ExpertStore& Mailbox::answer(bool may_defer) {
  const uint32_t layer = word(memory_, kLayer).load(std::memory_order_relaxed);
  const uint32_t tokens = word(memory_, kTokens).load(std::memory_order_relaxed);
  if (layer >= layers_.size() || int64_t(tokens) > shape_.tokens)
    throw std::runtime_error("the GPU asked for layer " + std::to_string(layer) + " with " + std::to_string(tokens) +
                             " tokens, which do not exist");
  if (waiting_ && waiting_ != int64_t(tokens))
    throw std::runtime_error("deferred experts of " + std::to_string(waiting_) +
                             " tokens wait, and the GPU asked for " + std::to_string(tokens));
  // A GPU that has given up posts on: what is counted and then used must not change in between.
  const int32_t* ids = reinterpret_cast<const int32_t*>(memory_ + at_.ids + half_);
  tokens_ = tokens;
  ids_.assign(ids, ids + tokens_ * shape_.top_k);
  late_.clear();
  if (may_defer && deferring_[layer].kept < deferring_[layer].routed)
    choose_late(deferring_[layer], reinterpret_cast<const float*>(memory_ + at_.weights + half_));
  run(*layers_[layer], late_.empty() ? ids_ : now_, false);
  waiting_ = 0;
  posts_.add(1);
  return *layers_[layer];
}

// Divides `ids_`; `late_` stays empty if none is.
void Mailbox::choose_late(const Late& late, const float* weights) {
  now_ = ids_;
  for (int64_t t = 0; t < tokens_; ++t) {
    const float* const w = weights + t * shape_.top_k;
    for (int64_t k = 0; k < late.routed; ++k) {
      const int64_t pair = t * shape_.top_k + k;
      int64_t stronger = 0;
      for (int64_t other = 0; other < late.routed; ++other)
        stronger += w[other] > w[k] || (w[other] == w[k] && other < k);
      if (stronger < late.kept || ids_[size_t(pair)] < 0) continue;
      late_.resize(ids_.size(), -1);
      late_[size_t(pair)] = std::exchange(now_[size_t(pair)], -1);
    }
  }
}

void Mailbox::compute_late(ExpertStore& layer) {
  if (late_.empty()) return;
  run(layer, late_, true);
  waiting_ = tokens_;
}

// Of the post that is answered; to the other half, nothing is added to what lies there.
void Mailbox::run(ExpertStore& layer, const std::vector<int32_t>& ids, bool to_other_half) {
  layer.forward({{memory_ + at_.x + half_, DType::bf16, tokens_, shape_.hidden},
                 ids.data(),
                 reinterpret_cast<const float*>(memory_ + at_.weights + half_),
                 shape_.top_k,
                 memory_ + at_.result + (to_other_half ? at_.half - half_ : half_),
                 DType::f32,
                 !to_other_half && waiting_ > 0,
                 to_other_half ? nullptr : foresight_.of(layer)});
  experts_.add(layer.experts_used());
}

void Mailbox::open() {
  cancelled_.store(false, std::memory_order_relaxed);
  stopped_.store(false, std::memory_order_relaxed);
  has_post_.store(false, std::memory_order_relaxed);
  is_open_.store(true, std::memory_order_seq_cst);
}

void Mailbox::reset() {
  check_closed("begin anew");
  std::memset(memory_, 0, kHeaderBytes);
  answered_ = 0;
  may_be_hinted_ = false;
  waiting_ = 0;
  foresight_.forget();
}

}  // namespace tandem
