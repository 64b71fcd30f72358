// Sequences of a step in layers whose memory of a sequence has a constant size.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/dense.h"

namespace tandem {

inline void check_slots(const BatchView& batch, int64_t slots, const char* what) {
  const std::string name(what);
  if (int64_t(batch.slots.size()) != batch.sequences())
    throw std::invalid_argument(name + ": the batch does not say which slots its sequences have");
  for (int32_t slot : batch.slots)
    if (slot < 0 || slot >= slots) throw std::invalid_argument(name + ": a slot is not there");
}

inline void check_sure(const BatchView& batch, const char* what) {
  if (!batch.state_lens.empty())
    throw std::invalid_argument(std::string(what) + ": a memory cannot take draft tokens back");
}

// What a token was given must be there as long as it may be taken back. read: places that other tokens need then.
inline void check_places(const BatchView& batch, int64_t places, const char* what, int64_t read = 0) {
  for (size_t s = 0; s < size_t(batch.sequences()); ++s) {
    const int64_t rows = batch.query_starts[s + 1] - batch.query_starts[s];
    const int64_t behind = batch.state_lens.empty() ? 0 : batch.seq_lens[s] - rows - batch.state_lens[s];
    const int64_t drafts = batch.num_verified.empty() ? 0 : rows - batch.num_verified[s];
    if (std::max(behind, drafts) + read > places)
      throw std::invalid_argument(std::string(what) + ": there are too few places for the inputs of draft tokens");
  }
}

// Rows of a sequence in the step, and its tokens before.
struct Span {
  Span(const BatchView& batch, int64_t s)
      : first(batch.query_starts[size_t(s)]),
        count(batch.query_starts[size_t(s) + 1] - first),
        known(batch.seq_lens[size_t(s)] - count),
        slot(batch.slots[size_t(s)]) {}
  int64_t first, count, known, slot;
};

}  // namespace tandem
