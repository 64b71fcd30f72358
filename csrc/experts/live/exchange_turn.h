// A batch of exchanges from its first copy to its last, a piece of microseconds at a time. Copies and queries call the
// driver, which may stand still until a running graph has ended; so they belong to the step's thread. What changes
// places in CPU memory belongs to the thread that answers the GPU's posts, between two answers. `stage_` says whose
// turn it is.
//
// All of it may be done while a step runs, but for forgetting the coming experts: that step still uses them in CPU
// memory. The computing stream gets new tables after the step; up to there its tables say what they said.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "experts/live/expert_moves.h"
#include "runtime/meanwhile.h"

namespace tandem {

// `cuStreamQuery` of CUDA's driver, or what stands for it in a test: 0, kNotReady, or what is wrong.
using StreamQuery = int (*)(void* stream);
constexpr int kNotReady = 600;

class ExchangeTurn final : public Meanwhile {
 public:
  struct Device {
    CopyAsync copy;
    StreamQuery query;
    void *up, *down, *computing;
    uint64_t image, table;  // addresses of what the GPU's tables are copied from, and of these
    int64_t table_bytes;
  };

  ExchangeTurn(std::unique_ptr<ExpertMoves> moves, const Device& device)
      : moves_(std::move(moves)), device_(device), stage_(moves_->count() ? Stage::begin : Stage::ended) {}

  // After a step: pieces until nothing can be done or so much time has passed. Whether it has ended: then the coming
  // experts are forgotten, so no step may be under way that could use them.
  bool run(double seconds);

  ExpertMoves& moves() { return *moves_; }
  int64_t bytes_given() const { return bytes_given_; }

 private:
  enum class Stage { begin, copy, assign, hide, fill_slot, show, ended };

  Progress piece() noexcept override;          // the stage `assign`
  Progress piece_of_step() noexcept override;  // all others
  Progress assign_one();
  Progress look();
  void publish(Stage now, Stage then);
  void go_on(Stage now, Stage then);
  void enter(Stage stage);

  std::unique_ptr<ExpertMoves> moves_;
  Device device_;
  std::atomic<Stage> stage_;  // the other members belong to whose turn it is
  size_t index_ = 0;          // of the next move
  int64_t bytes_given_ = 0;
  bool forgotten_ = false;
};

}  // namespace tandem
