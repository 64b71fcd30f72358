// How a phase's work is cut into tasks.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tandem {

constexpr int64_t kMaxChunkTokens = 4096;   // of a batch that runs at once
constexpr int64_t kShortBytes = 32 * 1024;  // weights of a task of few rows, at least

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Few rows are bound by memory, which likes long streams; the end likes short ones, since nobody knows who is slow
// today. So a task takes half a worker's share of what is left (guided self-scheduling: Polychronopoulos and Kuck,
// 1987).
class GuidedPairs {
 public:
  GuidedPairs(int64_t pair_bytes, int64_t workers, int64_t most)
      : shares_(uint32_t(2 * workers)), least_(std::clamp<int64_t>(kShortBytes / pair_bytes, 1, most)), most_(most) {}
  int64_t of(uint32_t left) const { return std::clamp<int64_t>(left / shares_, least_, most_); }

 private:
  uint32_t shares_;  // 32 bits: there are a hundred divisions before anything begins
  int64_t least_, most_;
};

}  // namespace tandem
