#include "experts/mailbox.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

enum Word {
  kPosted = 0,
  kLayer = 1,
  kTokens = 2,
  kDone = 32,
  kFailed = 64,
  kGaveUp = 96,
  kHinted = 128,
  kHintLayer = 129,
  kHintIds = 130
};
constexpr int64_t kHeaderBytes = 640;
constexpr int kPollsPerClock = 64;
constexpr size_t kMostWork = 4;

int64_t aligned(int64_t bytes) { return (bytes + 127) / 128 * 128; }

std::atomic_ref<uint32_t> word(uint8_t* memory, Word index) {
  return std::atomic_ref<uint32_t>(reinterpret_cast<uint32_t*>(memory)[index]);
}

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

MailboxOffsets mailbox_offsets(const MailboxShape& s) {
  MailboxOffsets at;
  at.x = kHeaderBytes;
  at.ids = at.x + aligned(s.tokens * s.hidden * 2);
  at.weights = at.ids + aligned(s.tokens * s.top_k * 4);
  at.result = at.weights + aligned(s.tokens * s.top_k * 4);
  at.hints = at.result + aligned(s.tokens * s.hidden * 4);
  at.bytes = at.hints + aligned(kMostHintedTokens * s.top_k * 4);
  return at;
}

Mailbox::Mailbox(uint8_t* memory, const MailboxShape& shape)
    : memory_(memory), shape_(shape), at_(mailbox_offsets(shape)) {}

int Mailbox::add(std::shared_ptr<ExpertLayer> layer) {
  if (layer->shape().hidden != shape_.hidden)
    throw std::invalid_argument("the layer's hidden size is " + std::to_string(layer->shape().hidden) +
                                ", the mailbox's " + std::to_string(shape_.hidden));
  layers_.push_back(std::move(layer));
  return int(layers_.size()) - 1;
}

void Mailbox::serve(int64_t posts, double timeout_seconds) {
  try {
    auto ready = Clock::now();
    for (int64_t i = 0; i < posts; ++i) {
      if (i > 0) use_time();  // before the first post the GPU may not have ended what pieces read
      wait_for(answered_ + 1, timeout_seconds);
      const auto posted = Clock::now();
      wait_seconds_ += seconds(posted - ready);
      const ExpertLayer& asked = answer();
      word(memory_, kDone).store(++answered_, std::memory_order_release);
      ready = Clock::now();
      serve_seconds_ += seconds(ready - posted);
      foresight_.compare(asked, ids_);
      may_be_hinted_ = true;
    }
    meanwhile_.clear();
  } catch (...) {
    word(memory_, kFailed).store(1, std::memory_order_release);  // the GPU waits; what follows may wait for Python
    meanwhile_.clear();
    foresight_.forget();
    throw;
  }
}

bool Mailbox::posted(uint32_t number) { return word(memory_, kPosted).load(std::memory_order_acquire) == number; }

void Mailbox::meanwhile(std::shared_ptr<Meanwhile> work) {
  std::erase(meanwhile_, work);
  if (meanwhile_.size() == kMostWork) meanwhile_.erase(meanwhile_.begin());
  meanwhile_.push_back(std::move(work));
}

// Whether there was one.
bool Mailbox::do_a_piece() {
  for (const auto& work : meanwhile_)
    if (work->next() == Meanwhile::Progress::did) return true;
  return false;
}

// Workers that are free fetch weights beside it, if a hint has come.
void Mailbox::use_time() {
  if (meanwhile_.empty()) return;
  const auto until = Clock::now() + kTimeForPieces;
  while (!posted(answered_ + 1) && Clock::now() < until) {
    look_for_hint();
    if (!do_a_piece()) return;
  }
}

void Mailbox::wait_for(uint32_t number, double timeout_seconds) {
  Clock::time_point give_up{};
  for (;;) {
    for (int i = 0; i < kPollsPerClock; ++i) {
      if (posted(number)) return;
      look_for_hint();
      if (!foresight_.fetch_a_little()) cpu_pause();
    }
    if (word(memory_, kGaveUp).load(std::memory_order_acquire))
      throw std::runtime_error("the GPU waited too long for the CPU's experts and has given up");
    const auto now = Clock::now();
    if (give_up == Clock::time_point{}) give_up = now + std::chrono::microseconds(int64_t(timeout_seconds * 1e6));
    if (now >= give_up)
      throw std::runtime_error("the GPU asked for no experts for " + std::to_string(timeout_seconds) + " s");
  }
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

const ExpertLayer& Mailbox::answer() {
  const uint32_t layer = word(memory_, kLayer).load(std::memory_order_relaxed);
  const uint32_t tokens = word(memory_, kTokens).load(std::memory_order_relaxed);
  if (layer >= layers_.size() || int64_t(tokens) > shape_.tokens)
    throw std::runtime_error("the GPU asked for layer " + std::to_string(layer) + " with " + std::to_string(tokens) +
                             " tokens, which do not exist");
  // A GPU that has given up posts on: what is counted and then used must not change in between.
  const int32_t* ids = reinterpret_cast<const int32_t*>(memory_ + at_.ids);
  ids_.assign(ids, ids + tokens * shape_.top_k);
  layers_[layer]->forward({{memory_ + at_.x, DType::bf16, int64_t(tokens), shape_.hidden},
                           ids_.data(),
                           reinterpret_cast<const float*>(memory_ + at_.weights),
                           shape_.top_k,
                           memory_ + at_.result,
                           DType::f32,
                           false,
                           foresight_.of(*layers_[layer])});
  ++posts_;
  experts_ += layers_[layer]->experts_used();
  return *layers_[layer];
}

void Mailbox::reset() {
  std::memset(memory_, 0, kHeaderBytes);
  answered_ = 0;
  may_be_hinted_ = false;
  foresight_.forget();
}

}  // namespace tandem
