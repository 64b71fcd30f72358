// How all cores read DRAM fastest: GB/s of patterns, measured in turn; equal shares against pieces for whoever is free.
//
// Xeon, 16 virtual CPUs of which some share a core with others: equal shares 85 to 111, pieces of 1 MiB 111 to 121, the
// same with prefetches into L2 8 KiB ahead 128 to 147 (into L1 144, 2 KiB ahead 135, 64 KiB 140), pieces of 64 KiB 103
// and 115. Non-temporal prefetches: 31.
//
//   g++ -O2 -std=c++20 -march=native -pthread reading.cc -o reading && ./reading
#include <immintrin.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <int kAhead, _mm_hint kHint>
static uint64_t read_range(const uint8_t* p, size_t bytes) {
  __m512i sums[4] = {};
  for (size_t i = 0; i < bytes; i += 256)
    for (int k = 0; k < 4; ++k) {
      if (kAhead) _mm_prefetch(reinterpret_cast<const char*>(p) + i + 64 * k + kAhead, kHint);
      sums[k] = _mm512_xor_si512(sums[k], _mm512_loadu_si512(p + i + 64 * k));
    }
  const __m512i a = _mm512_xor_si512(sums[0], sums[1]), b = _mm512_xor_si512(sums[2], sums[3]);
  return uint64_t(_mm512_reduce_add_epi64(_mm512_xor_si512(a, b)));
}

struct Pattern {
  const char* name;
  uint64_t (*read)(const uint8_t*, size_t);
  size_t piece;  // 0: equal shares
};
static const Pattern kPatterns[] = {
    {"equal shares", read_range<0, _MM_HINT_T0>, 0},
    {"equal shares, L2 8 KiB ahead", read_range<8192, _MM_HINT_T1>, 0},
    {"64 KiB", read_range<0, _MM_HINT_T0>, 64 << 10},
    {"64 KiB, L2 8 KiB ahead", read_range<8192, _MM_HINT_T1>, 64 << 10},
    {"1 MiB", read_range<0, _MM_HINT_T0>, 1 << 20},
    {"1 MiB, L1 8 KiB ahead", read_range<8192, _MM_HINT_T0>, 1 << 20},
    {"1 MiB, L2 2 KiB ahead", read_range<2048, _MM_HINT_T1>, 1 << 20},
    {"1 MiB, L2 8 KiB ahead", read_range<8192, _MM_HINT_T1>, 1 << 20},
    {"1 MiB, L2 64 KiB ahead", read_range<65536, _MM_HINT_T1>, 1 << 20},
    {"1 MiB, not temporal", read_range<4096, _MM_HINT_NTA>, 1 << 20},
};

int main() {
  constexpr size_t kBytes = size_t{3} << 30, kRoom = kBytes + (size_t{4} << 20);
  constexpr int kRounds = 7;
  const int cpus = int(std::thread::hardware_concurrency());
  auto* data = static_cast<uint8_t*>(mmap(nullptr, kRoom, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  madvise(data, kRoom, MADV_HUGEPAGE);
  std::vector<std::vector<double>> rates(std::size(kPatterns));
  std::barrier meeting(cpus);
  std::atomic<size_t> next = 0;
  std::atomic<uint64_t> seen = 0;
  double start = 0;
  const auto work = [&](int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    const size_t share = kBytes / size_t(cpus) / 4096 * 4096;
    const uint8_t* own = data + size_t(cpu) * share;
    memset(data + size_t(cpu) * share, cpu + 1, share);
    for (int round = 0; round < kRounds; ++round)
      for (size_t i = 0; i < std::size(kPatterns); ++i) {
        const Pattern& pattern = kPatterns[i];
        meeting.arrive_and_wait();
        if (cpu == 0) next = 0, start = now();
        meeting.arrive_and_wait();
        if (!pattern.piece) seen ^= pattern.read(own, share);
        while (pattern.piece) {
          const size_t at = next.fetch_add(pattern.piece);
          if (at >= kBytes) break;
          seen ^= pattern.read(data + at, std::min(pattern.piece, kBytes - at));
        }
        meeting.arrive_and_wait();
        if (cpu == 0) rates[i].push_back(double(kBytes) / (now() - start) / 1e9);
      }
  };
  std::vector<std::thread> threads;
  for (int cpu = 0; cpu < cpus; ++cpu) threads.emplace_back(work, cpu);
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < std::size(kPatterns); ++i) {
    std::sort(rates[i].begin(), rates[i].end());
    printf("%-30s %6.1f GB/s (%.0f to %.0f)\n", kPatterns[i].name, rates[i][kRounds / 2], rates[i].front(),
           rates[i].back());
  }
  return seen == 42;
}
