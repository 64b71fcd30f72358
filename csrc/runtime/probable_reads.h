// Weights that will probably be read when somebody else has spoken: a GPU, in tens of microseconds. Until then idle
// workers prefetch them. Every worker has a fixed share, and computes it later: another core's cache is as slow to read
// as memory. A common counter would cost two thirds of the speed: each would wait for its cache line.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "runtime/shares.h"

namespace tandem {

// `units` of `unit_bytes` each, side by side, for workers first_worker ... first_worker + workers - 1, divided by
// first_of_share.
struct SharedRange {
  const uint8_t* data;
  int64_t units, unit_bytes;
  int64_t turn;
  int first_worker, workers;
};

// Only hints, as SureReads'. One thread announces and withdraws, at any time; worker i of `workers` calls fetch(i).
class ProbableReads {
 public:
  static constexpr size_t kRanges = 128;

  explicit ProbableReads(int workers) : shares_(size_t(workers)) {}

  // Replaces what was announced before: every worker fetches its share of each range, one range after the other, about
  // `most_each` bytes. So tasks of the first find all they need, others nothing. Ranges past the first `kRanges` are
  // ignored.
  void announce(const std::vector<SharedRange>& ranges, int64_t most_each) {
    withdraw();
    const size_t count = std::min(ranges.size(), kRanges);
    if (count == 0 || most_each <= 0) return;
    for (size_t i = 0; i < count; ++i) ranges_[i].set(ranges[i]);
    set(count_, int64_t(count));
    set(most_each_, most_each);
    turn_.store(++last_turn_, std::memory_order_release);
  }

  // Nobody fetches more. By anybody.
  void stop() {
    if (turn_.load(std::memory_order_relaxed)) turn_.store(0, std::memory_order_relaxed);
  }

  // Returns how many bytes were fetched since `announce`; nobody fetches more.
  int64_t withdraw() {
    stop();
    int64_t fetched = 0;
    for (const Share& share : shares_)
      if (counted_ != last_turn_ && share.turn.load(std::memory_order_relaxed) == last_turn_)
        fetched += get(share.fetched);
    counted_ = last_turn_;
    return fetched;
  }

  // Prefetches the next few lines of the worker's share; false if there are none.
  bool fetch(int worker) {
    const uint32_t turn = turn_.load(std::memory_order_acquire);
    if (turn == 0) return false;
    Share& share = shares_[size_t(worker)];
    if (share.turn.load(std::memory_order_relaxed) != turn) share.begin(turn);
    if (get(share.fetched) >= get(most_each_)) return false;
    const int64_t count = std::min(get(count_), int64_t(kRanges));
    for (int64_t range; (range = get(share.range)) < count;) {
      if (get(share.at) >= get(share.end) && !share.find(ranges_[size_t(range)], worker)) continue;
      share.fetch();
      return true;
    }
    return false;
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  static constexpr int64_t kChunkBytes = 1024;  // a fraction of a microsecond: who fetches is needed soon
  using Number = std::atomic<int64_t>;

  static int64_t get(const Number& number) { return number.load(std::memory_order_relaxed); }
  static void set(Number& number, int64_t value) { number.store(value, std::memory_order_relaxed); }

  struct Range {  // numbers may be torn when `announce` meets `fetch`; a prefetch of any address is harmless
    std::atomic<const uint8_t*> data{nullptr};
    Number units{0}, unit_bytes{0}, turn{0}, first_worker{0}, workers{1};

    void set(const SharedRange& from) {
      data.store(from.data, std::memory_order_relaxed);
      ProbableReads::set(units, from.units);
      ProbableReads::set(unit_bytes, from.unit_bytes);
      ProbableReads::set(turn, from.turn);
      ProbableReads::set(first_worker, from.first_worker);
      ProbableReads::set(workers, std::max(1, from.workers));
    }
    int64_t first_byte(int64_t k) const {
      return first_of_share(get(units), get(workers), get(turn), k) * get(unit_bytes);
    }
  };

  struct alignas(64) Share {
    std::atomic<uint32_t> turn{0};
    Number fetched{0};               // bytes in all
    Number range{0}, at{0}, end{0};  // the one that it is at or begins next; of its bytes, those left to fetch
    std::atomic<const uint8_t*> data{nullptr};

    void begin(uint32_t now) {
      for (Number* number : {&fetched, &range, &at, &end}) set(*number, 0);
      turn.store(now, std::memory_order_relaxed);
    }
    // The worker's part of the range; false and past the range if it has none.
    bool find(const Range& from, int worker) {
      const int64_t k = worker - get(from.first_worker);
      const bool is_for_worker = k >= 0 && k < get(from.workers);
      data.store(from.data.load(std::memory_order_relaxed), std::memory_order_relaxed);
      set(at, is_for_worker ? from.first_byte(k) : 0);
      set(end, is_for_worker ? from.first_byte(k + 1) : 0);
      if (get(at) >= get(end)) set(range, get(range) + 1);
      return get(at) < get(end);
    }
    void fetch() {
      const int64_t from = get(at), to = std::min(get(end), from + kChunkBytes);
      const uint8_t* const bytes = data.load(std::memory_order_relaxed);
      for (int64_t i = from; i < to; i += kLineBytes) __builtin_prefetch(bytes + i, 0, 2);  // into L2
      set(fetched, get(fetched) + to - from);
      set(at, to);
      if (to == get(end)) set(range, get(range) + 1);
    }
  };

  std::atomic<uint32_t> turn_{0};  // number of what is announced; 0: nothing
  uint32_t last_turn_ = 0, counted_ = 0;
  Number count_{0}, most_each_{0};
  Range ranges_[kRanges];
  std::vector<Share> shares_;
};

}  // namespace tandem
