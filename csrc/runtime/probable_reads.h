// Weights that will probably be read when somebody else has spoken: a GPU, in tens of microseconds. Until then workers
// with nothing to do bring them into their caches. Every worker has a fixed share: sixteen (Xeon) that took 4 KiB at a
// time from one counter asked for 1.6 MB in 35 us, since each of them waited for the counter's cache line; with shares
// it is 5.2 MB.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "runtime/read_ahead.h"

namespace tandem {

// Only hints, as ReadAhead's. One thread announces and withdraws; worker i of `workers` calls fetch(i).
class ProbableReads {
 public:
  static constexpr size_t kRanges = 32;

  explicit ProbableReads(int workers) : shares_(size_t(workers)) {}

  // Replaces what was announced before: of each range the beginning, then the next pages of each, about `most` bytes in
  // all. Ranges past the first `kRanges` are ignored.
  void announce(const std::vector<ByteRange>& ranges, int64_t most) {
    withdraw();
    const size_t count = std::min(ranges.size(), kRanges);
    int64_t longest = 0;
    for (size_t i = 0; i < count; ++i) {
      data_[i].store(ranges[i].data, std::memory_order_relaxed);
      bytes_[i].store(ranges[i].bytes, std::memory_order_relaxed);
      longest = std::max(longest, ranges[i].bytes);
    }
    if (longest == 0) return;
    const int64_t rounds = std::min(longest, most / int64_t(count));
    count_.store(int64_t(count), std::memory_order_relaxed);
    pages_.store((rounds + kPageBytes - 1) / kPageBytes * int64_t(count), std::memory_order_relaxed);
    turn_.store(++last_turn_, std::memory_order_release);
  }

  // Returns how many bytes were fetched; nobody fetches more.
  int64_t withdraw() {
    const uint32_t turn = turn_.exchange(0, std::memory_order_relaxed);
    int64_t fetched = 0;
    for (const Share& share : shares_)
      if (turn && share.turn.load(std::memory_order_relaxed) == turn)
        fetched += share.fetched.load(std::memory_order_relaxed);
    return fetched;
  }

  // Prefetches the next few lines of the worker's share; false if there are none.
  bool fetch(int worker) {
    const uint32_t turn = turn_.load(std::memory_order_acquire);
    if (turn == 0) return false;
    Share& share = shares_[size_t(worker)];
    if (share.turn.load(std::memory_order_relaxed) != turn) share.begin(turn);
    const int64_t next = share.next.load(std::memory_order_relaxed);
    const int64_t page = next / kPageBytes * int64_t(shares_.size()) + worker;
    const int64_t count = count_.load(std::memory_order_relaxed);
    if (page >= pages_.load(std::memory_order_relaxed)) return false;
    fetch_of(size_t(page % count), page / count * kPageBytes + next % kPageBytes, share);
    share.next.store(next + kChunkBytes, std::memory_order_relaxed);
    return true;
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  static constexpr int64_t kChunkBytes = 1024;  // a fraction of a microsecond: who fetches is needed soon
  static constexpr int64_t kPageBytes = 4096;   // by one worker, whose own prefetcher goes no further

  struct alignas(64) Share {
    std::atomic<uint32_t> turn{0};
    std::atomic<int64_t> fetched{0};
    std::atomic<int64_t> next{0};  // of its pages, one after the other

    void begin(uint32_t now) {
      fetched.store(0, std::memory_order_relaxed);
      next.store(0, std::memory_order_relaxed);
      turn.store(now, std::memory_order_relaxed);
    }
  };

  void fetch_of(size_t range, int64_t at, Share& share) {
    const uint8_t* data = data_[range].load(std::memory_order_relaxed);
    const int64_t end = std::min(bytes_[range].load(std::memory_order_relaxed), at + kChunkBytes);
    if (at >= end) return;
    share.fetched.store(share.fetched.load(std::memory_order_relaxed) + end - at, std::memory_order_relaxed);
    for (; at < end; at += kLineBytes) __builtin_prefetch(data + at, 0, 2);  // into L2
  }

  std::atomic<uint32_t> turn_{0};  // number of what is announced; 0: nothing
  uint32_t last_turn_ = 0;
  std::atomic<int64_t> count_{1}, pages_{0};  // of ranges; of all of them, in turn
  std::atomic<const uint8_t*> data_[kRanges] = {};
  std::atomic<int64_t> bytes_[kRanges] = {};
  std::vector<Share> shares_;
};

}  // namespace tandem
