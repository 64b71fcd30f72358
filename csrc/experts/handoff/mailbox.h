// The CPU's end of a hand-off from a CUDA stream. A kernel of the stream posts a layer's tokens into memory that both
// see, and raises a number. A thread polls for it here (post_thread.h), runs the layer, and answers with the same
// number. Another kernel waits for that. Neither side enters the driver: it costs microseconds, inside CUDA graphs too.
//
//   words (32 bits)   0 posted, 1 layer, 2 tokens,   written by the GPU; `posted` last
//                     3 flags (PostFlag)
//                     32 done                        written by the CPU
//                     64 failed                      written by the CPU: no answer will come
//                     96 gave_up                     written by the GPU: it waits no longer
//                     128 hinted, 129 layer,         written by the GPU; `hinted` last
//                     130 ids                        experts/mailbox_words.h names them for both
//   from byte 640     x [tokens, hidden] bf16, ids [tokens, top_k] i32, weights f32, result [tokens, hidden] f32,
//                     each aligned to 128 bytes; the same a second time where experts may be late; hints i32
//
// One post is under way at a time. Numbers count from 1 since the last reset, on both sides.
//
// Between two posts the CPU has nothing to do, and its memory neither. So after a post the GPU may say which experts
// the next one will probably ask for (`hinted` is the number of the post before). While the CPU waits for that, idle
// workers prefetch their weights. Nobody waits for a hint, nobody trusts it, and no result depends on it. The thread
// itself also does pieces of other work then (`meanwhile`).
//
// Experts may be late: of a layer that defers, a token's weakest experts are computed after the answer, while the GPU
// goes on to the next layer. Their sum is added to the answer of the next post. So posts take turns between two halves:
// deferred experts read x in theirs and write to the other's result, before the next answer is added there.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "experts/run/foresight.h"
#include "experts/store/expert_store.h"
#include "runtime/meanwhile.h"
#include "runtime/tally.h"

namespace tandem {

struct MailboxShape {
  int64_t tokens;  // at most, of one post
  int64_t hidden;
  int64_t top_k;
  bool late = false;  // experts may be late: there are two halves
};

struct MailboxOffsets {
  int64_t x, ids, weights, result, hints;
  int64_t half;  // bytes from the first x, ids, weights and result to the second; 0: there is one of each
  int64_t bytes;
};

// Of a token's first `routed` experts the `kept` of the largest weights are computed at once, and so is all that
// follows these. Equal weights: the earlier one counts as larger.
struct Late {
  int64_t kept, routed;
};

MailboxOffsets mailbox_offsets(const MailboxShape& shape);

// What a post says of itself.
enum PostFlag : uint32_t {
  kSecondHalf = 1,  // where it lies
  kLastPost = 2     // of its step: nothing follows to which deferred experts could be added
};

constexpr int64_t kUntilStopped = -1;  // posts, where nobody knows how many will come

class Mailbox {
 public:
  // memory: mailbox_offsets(shape).bytes, zeroed, aligned to 128 bytes, outlives this.
  Mailbox(uint8_t* memory, const MailboxShape& shape);

  // Returns the number that posts call the layer by. This and `defer` throw std::logic_error while posts are answered.
  int add(std::shared_ptr<ExpertStore> layer);

  // Other experts of this layer are late from now on, unless a post is the last of its step. Throws
  // std::invalid_argument for a layer that does not exist, or a mailbox of one half.
  void defer(int layer, const Late& late);

  // Answers the next `posts` posts, of which the last is the last of its step, or all until `stop`. Throws
  // std::runtime_error when none comes for `timeout_seconds` (where their number is known), the GPU has given up, or
  // `cancel` was called, and whatever a layer throws. Then the GPU is told not to wait, and only `reset` makes this
  // usable again.
  //
  // Where the number is known, this polls without a pause. Where it is not, it looks every kNap once nothing has come
  // for kSpin.
  void serve(int64_t posts, double timeout_seconds);

  // Of the CPU that a thread which answers should have; -1: any.
  int caller_cpu() const;

  // Workers are awake when the first post comes.
  void wake_workers();

  // By any thread: what runs in `serve` ends, and what is posted then is not answered.
  void cancel() { cancelled_.store(true, std::memory_order_release); }
  // By any thread: `serve(kUntilStopped)` returns as soon as nothing is posted.
  void stop() { stopped_.store(true, std::memory_order_release); }

  // By the step's thread. Pieces are done in this `serve`, after answers, as long as nothing is posted; first given,
  // first done. At most kMostWork are kept; the oldest is dropped.
  void meanwhile(std::shared_ptr<Meanwhile> work);
  // A piece of the step's own, once the first post has come: before, the GPU may not have ended what pieces read.
  // Returns whose it was; null: none can be done now.
  Meanwhile* do_piece_of_step();
  bool has_work() const { return has_work_.load(std::memory_order_relaxed); }
  // Whether some of it waits for a copy or for the thread that answers, as of the last `do_piece_of_step`.
  bool work_waits() const { return work_waits_; }
  // When `serve` has ended: what is not finished belongs to its caller again.
  void drop_work();

  int64_t posts() const { return posts_; }                 // answered since this was made
  int64_t experts_used() const { return experts_; }        // by those, each counted once per post
  double wait_seconds() const { return wait_seconds_; }    // until a post came
  double serve_seconds() const { return serve_seconds_; }  // from there to its answer
  const Foresight& foresight() const { return foresight_; }

  // Around `serve`, by who has it called: `add`, `defer` and `reset` would change what it reads.
  void open();
  void close() { is_open_.store(false, std::memory_order_release); }
  bool is_open() const { return is_open_.load(std::memory_order_acquire); }

  // After a failure, when no kernel of the stream is running any more. Throws std::logic_error while posts are
  // answered.
  void reset();

  static constexpr std::chrono::microseconds kSpin{200}, kNap{50};

 private:
  struct Patience;

  void answer_all(int64_t posts, double timeout_seconds);
  void check_closed(const char* what) const;
  bool wait_for_post(Patience& patience);
  void poll_once();
  void look_for_hint();
  void use_time();
  bool do_a_piece();
  bool posted(uint32_t number);
  ExpertStore& answer(bool may_defer);  // the layer that was asked
  void choose_late(const Late& late, const float* weights);
  void compute_late(ExpertStore& layer);
  void run(ExpertStore& layer, const std::vector<int32_t>& ids, bool to_other_half);

  uint8_t* memory_;
  MailboxShape shape_;
  MailboxOffsets at_;
  std::vector<int32_t> ids_;         // of the post that is answered
  std::vector<int32_t> now_, late_;  // of these, in their places, -1 elsewhere
  int64_t half_ = 0, tokens_ = 0;    // of that post
  int64_t waiting_ = 0;  // tokens of deferred experts, whose sum lies in this half's result; 0: there is none
  std::vector<std::shared_ptr<ExpertStore>> layers_;
  std::vector<Late> deferring_;  // of each layer
  Foresight foresight_;
  std::mutex work_mutex_;  // the step's thread changes the list; the thread that answers never waits for it
  std::vector<std::shared_ptr<Meanwhile>> meanwhile_;
  std::atomic<bool> has_work_{false}, has_post_{false};
  bool work_waits_ = false;  // of the step's thread
  std::atomic<bool> is_open_{false}, cancelled_{false}, stopped_{false};
  uint32_t answered_ = 0;
  bool may_be_hinted_ = false;  // nothing was heard since the last answer
  Tally<int64_t> posts_, experts_;
  Tally<double> wait_seconds_, serve_seconds_;
};

}  // namespace tandem
