// How threads of this process wait for each other.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace tandem {

inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

// Returns when woken, when the word has changed, or after so much time.
inline void futex_wait_for(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds most) {
  const timespec time{most.count() / 1'000'000'000, most.count() % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, &time, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A counter that threads wait on: polls for a bounded time, then sleeps in the kernel.
struct Signal {
  alignas(64) std::atomic<uint32_t> word{0};
  std::atomic<int> sleepers{0};

  uint32_t load() const { return word.load(std::memory_order_acquire); }

  void raise() {
    word.fetch_add(1, std::memory_order_seq_cst);
    // seq_cst on both sides: either we see the sleeper, or its futex_wait sees the new value.
    if (sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(word);
  }

  // `yields`: more threads than CPUs, so whoever polls keeps somebody else from running. `meanwhile` does a little
  // useful work between two looks, or returns false. Returns early when `until` holds, which is not seen while asleep.
  template <class Meanwhile, class Until = bool (*)()>
  void wait_past(
      uint32_t seen, std::chrono::microseconds spin, bool yields, Meanwhile meanwhile,
      Until until = [] { return false; }) {
    if (!poll(seen, spin, yields, meanwhile, until)) sleep_past(seen);
  }

  void sleep_past(uint32_t seen) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (word.load(std::memory_order_seq_cst) == seen) futex_wait(word, seen);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

  // May return sooner.
  void sleep_past(uint32_t seen, std::chrono::nanoseconds most) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (word.load(std::memory_order_seq_cst) == seen) futex_wait_for(word, seen, most);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  template <class Meanwhile, class Until>
  bool poll(uint32_t seen, std::chrono::microseconds spin, bool yields, Meanwhile meanwhile, Until until) const {
    constexpr int kPausesPerClock = 64;  // ~2 us between looks at the clock
    std::chrono::steady_clock::time_point give_up{};
    for (;;) {
      for (int i = 0; i < (yields ? 1 : kPausesPerClock); ++i) {
        if (load() != seen || until()) return true;
        if (!meanwhile()) cpu_pause();
      }
      const auto now = std::chrono::steady_clock::now();
      if (give_up == std::chrono::steady_clock::time_point{}) give_up = now + spin;
      if (now >= give_up) return load() != seen;
      if (yields) sched_yield();
    }
  }
};

}  // namespace tandem
