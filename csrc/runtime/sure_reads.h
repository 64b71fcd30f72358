// Weights that the next operations will surely read. Workers with nothing to do bring them into their caches, so that
// memory is busy while the caller does something small (norm, rotation, attention, routing, Python).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace tandem {

struct ByteRange {
  const uint8_t* data;
  int64_t bytes;
};

// Only hints: a range may be stale, or torn when `announce` meets `fetch`. A prefetch of any address is harmless.
class SureReads {
 public:
  static constexpr size_t kRanges = 4;

  // Replaces what was announced before; ranges past the first `kRanges` are ignored.
  void announce(const std::vector<ByteRange>& ranges) {
    next_.store(INT64_MAX / 2, std::memory_order_relaxed);
    int64_t total = 0;
    const size_t count = std::min<size_t>(ranges.size(), kRanges);
    for (size_t i = 0; i < kRanges; ++i) {
      const ByteRange range = i < count ? ranges[i] : ByteRange{nullptr, 0};
      data_[i].store(range.data, std::memory_order_relaxed);
      bytes_[i].store(range.bytes, std::memory_order_relaxed);
      total += range.bytes;
    }
    total_.store(total, std::memory_order_relaxed);
    next_.store(0, std::memory_order_release);
  }

  // Prefetches the next few lines that nobody has taken; false if there are none.
  bool fetch() {
    if (next_.load(std::memory_order_acquire) >= total_.load(std::memory_order_relaxed)) return false;
    int64_t at = next_.fetch_add(kChunkBytes, std::memory_order_relaxed);
    for (size_t i = 0; i < kRanges; ++i) {
      const int64_t bytes = bytes_[i].load(std::memory_order_relaxed);
      if (at < bytes) {
        const uint8_t* data = data_[i].load(std::memory_order_relaxed);
        const int64_t end = std::min(bytes, at + kChunkBytes);
        for (; at < end; at += kLineBytes) __builtin_prefetch(data + at, 0, 2);  // into L2
        return true;
      }
      at -= bytes;
    }
    return false;
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  static constexpr int64_t kChunkBytes = 1024;  // a fraction of a microsecond: who fetches is needed soon

  std::atomic<const uint8_t*> data_[kRanges] = {};
  std::atomic<int64_t> bytes_[kRanges] = {};
  std::atomic<int64_t> total_{0};
  alignas(64) std::atomic<int64_t> next_{0};  // bytes taken, over all ranges
};

}  // namespace tandem
