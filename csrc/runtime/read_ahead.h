// Weights that the next operations will read, surely or probably. Workers with nothing to do bring them into their
// caches, so that memory is busy while the caller does something small (norm, rotation, attention, routing, Python) or
// waits for a GPU.
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
class ReadAhead {
 public:
  static constexpr size_t kRanges = 4;         // one after the other
  static constexpr size_t kRangesInTurn = 32;  // or piece by piece

  // Replaces what was announced before; ranges past the first `kRanges` are ignored.
  void announce(const std::vector<ByteRange>& ranges) {
    const size_t count = std::min(ranges.size(), kRanges);
    int64_t total = 0;
    for (size_t i = 0; i < count; ++i) total += ranges[i].bytes;
    replace(ranges, count, 0, total);
  }

  // The same for ranges whose beginnings come first: a piece of each, then the next piece of each, `most` bytes in all.
  // Ranges past the first `kRangesInTurn` are ignored.
  void announce_in_turn(const std::vector<ByteRange>& ranges, int64_t most) {
    const size_t count = std::min(ranges.size(), kRangesInTurn);
    int64_t longest = 0;
    for (size_t i = 0; i < count; ++i) longest = std::max(longest, ranges[i].bytes);
    const int64_t pieces = (longest + kPieceBytes - 1) / kPieceBytes;
    replace(ranges, count, int64_t(count), std::min(most, pieces * kPieceBytes * int64_t(count)));
  }

  // By who announced. Returns how many bytes of it were fetched; nobody fetches more of it.
  int64_t withdraw() {
    const int64_t next = next_.exchange(kNothing, std::memory_order_relaxed);
    if (next >= kNothing) return 0;
    const int64_t taken = std::min(next, total_.load(std::memory_order_relaxed));
    const int64_t in_turn = in_turn_.load(std::memory_order_relaxed);
    if (in_turn == 0) return taken;
    int64_t fetched = 0;
    for (int64_t i = 0; i < in_turn; ++i) {
      const int64_t round = in_turn * kPieceBytes, rest = taken % round - i * kPieceBytes;
      const int64_t of_range = taken / round * kPieceBytes + std::clamp<int64_t>(rest, 0, kPieceBytes);
      fetched += std::min(of_range, bytes_[size_t(i)].load(std::memory_order_relaxed));
    }
    return fetched;
  }

  // Prefetches the next few lines that nobody has taken; false if there are none.
  bool fetch() {
    if (next_.load(std::memory_order_acquire) >= total_.load(std::memory_order_relaxed)) return false;
    const int64_t in_turn = in_turn_.load(std::memory_order_relaxed);
    const int64_t chunk = in_turn ? kLongChunkBytes : kChunkBytes;
    const int64_t at = next_.fetch_add(chunk, std::memory_order_relaxed);
    if (!in_turn) return fetch_in_order(at);
    const int64_t piece = at / kPieceBytes;
    fetch_of(size_t(piece % in_turn), piece / in_turn * kPieceBytes + at % kPieceBytes, chunk);
    return true;
  }

 private:
  static constexpr int64_t kNothing = INT64_MAX / 2;  // taken: room for whoever still adds to it
  static constexpr int64_t kLineBytes = 64;
  static constexpr int64_t kChunkBytes = 1024;      // a fraction of a microsecond: who fetches is needed soon
  static constexpr int64_t kLongChunkBytes = 4096;  // a page, so that a core's own prefetcher stays in its chunk
  static constexpr int64_t kPieceBytes = 16 * 1024;

  // in_turn: how many ranges take turns; 0: they follow each other.
  void replace(const std::vector<ByteRange>& ranges, size_t count, int64_t in_turn, int64_t total) {
    next_.store(kNothing, std::memory_order_relaxed);
    for (size_t i = 0; i < (in_turn ? kRangesInTurn : kRanges); ++i) {
      const ByteRange range = i < count ? ranges[i] : ByteRange{nullptr, 0};
      data_[i].store(range.data, std::memory_order_relaxed);
      bytes_[i].store(range.bytes, std::memory_order_relaxed);
    }
    in_turn_.store(in_turn, std::memory_order_relaxed);
    total_.store(total, std::memory_order_relaxed);
    next_.store(0, std::memory_order_release);
  }

  bool fetch_in_order(int64_t at) {
    for (size_t i = 0; i < kRanges; ++i) {
      const int64_t bytes = bytes_[i].load(std::memory_order_relaxed);
      if (at < bytes) {
        fetch_of(i, at, kChunkBytes);
        return true;
      }
      at -= bytes;
    }
    return false;
  }

  void fetch_of(size_t range, int64_t at, int64_t chunk) {
    const uint8_t* data = data_[range].load(std::memory_order_relaxed);
    const int64_t end = std::min(bytes_[range].load(std::memory_order_relaxed), at + chunk);
    for (; at < end; at += kLineBytes) __builtin_prefetch(data + at, 0, 2);  // into L2
  }

  std::atomic<const uint8_t*> data_[kRangesInTurn] = {};
  std::atomic<int64_t> bytes_[kRangesInTurn] = {};
  std::atomic<int64_t> in_turn_{0};
  std::atomic<int64_t> total_{0};
  alignas(64) std::atomic<int64_t> next_{0};  // bytes taken, over all ranges
};

}  // namespace tandem
