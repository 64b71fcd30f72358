// Work that somebody does a piece at a time while waiting for something else.
#pragma once

namespace tandem {

class Meanwhile {
 public:
  enum class Progress {
    did,    // a piece, of microseconds
    waits,  // nothing can be done yet
    ended
  };

  virtual ~Meanwhile() = default;
  virtual Progress next() noexcept = 0;
};

}  // namespace tandem
