// Work that is done a piece at a time while a step runs, by two threads. The one that answers the GPU's posts does
// pieces between an answer and the next post. The step's own does others while it waits for the last answer.
#pragma once

#include <chrono>

#include "runtime/tally.h"

namespace tandem {

// The GPU needs 20 to 30 us from an answer to the next post (measured on an H200). Pieces begin in the first of these,
// so that the last one has ended by then, unless it takes longer than all of them should.
constexpr std::chrono::microseconds kTimeForPieces{10};

class Meanwhile {
 public:
  enum class Progress {
    did,    // a piece, of microseconds
    waits,  // nothing can be done yet
    ended
  };

  virtual ~Meanwhile() = default;

  // On the thread that answers posts: a piece that calls no driver and frees nothing of Python's.
  Progress next() noexcept {
    const auto start = std::chrono::steady_clock::now();
    const Progress done = piece();
    const Seconds took = std::chrono::steady_clock::now() - start;
    seconds_.add(took.count());
    if (took > kTimeForPieces) late_seconds_.add((took - Seconds(kTimeForPieces)).count());
    return done;
  }

  // On the step's thread: a piece that may call the driver. Other threads may be in `next` at the same time.
  Progress next_of_step() noexcept {
    const auto start = std::chrono::steady_clock::now();
    const Progress done = piece_of_step();
    step_seconds_.add(Seconds(std::chrono::steady_clock::now() - start).count());
    return done;
  }

  // Of the step's thread: a piece has ended so long after the last answer.
  void count_late(std::chrono::duration<double> late) { step_late_seconds_.add(late.count()); }

  double seconds() const { return seconds_ + step_seconds_; }  // that both took, all together
  // That posts may have waited for single pieces, which took longer than kTimeForPieces, and the step for its own.
  double late_seconds() const { return late_seconds_ + step_late_seconds_; }

 protected:
  virtual Progress piece() noexcept = 0;
  virtual Progress piece_of_step() noexcept { return Progress::ended; }

 private:
  using Seconds = std::chrono::duration<double>;

  Tally<double> seconds_, late_seconds_;            // of the thread that answers posts
  Tally<double> step_seconds_, step_late_seconds_;  // of the step's
};

}  // namespace tandem
