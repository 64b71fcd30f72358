// Work that somebody does a piece at a time while waiting for something else.
#pragma once

#include <chrono>

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

  Progress next() noexcept {
    const auto start = std::chrono::steady_clock::now();
    const Progress made = piece();
    const Seconds took = std::chrono::steady_clock::now() - start;
    seconds_ += took.count();
    if (took > kTimeForPieces) late_seconds_ += (took - Seconds(kTimeForPieces)).count();
    return made;
  }

  double seconds() const { return seconds_; }            // that `next` took, all together
  double late_seconds() const { return late_seconds_; }  // of these, what single pieces took beyond kTimeForPieces

 protected:
  virtual Progress piece() noexcept = 0;

 private:
  using Seconds = std::chrono::duration<double>;

  double seconds_ = 0, late_seconds_ = 0;
};

}  // namespace tandem
