// Why tiles are zeroed after their last use: nanoseconds per TDPBF16PS of patterns of loads and products, all operands
// in L1, each CPU for itself and all together. `tiles`: how many of the eight hold something.
//
// Xeon (Sapphire or Emerald Rapids, 16 virtual CPUs): where nobody else uses the core every pattern takes what the
// multiplier takes (5.6 to 7.0 ns). Where the other hyperthread is busy, whatever it does, a pattern with eight live
// tiles takes 22 to 26 ns (even without loads 16), with unused tiles zeroed 16, with four live ones 14: zeroing gives a
// tile's physical register back, and there seem to be nine for each of two threads.
//
//   g++ -O2 -std=c++20 -march=sapphirerapids -pthread amx_renaming.cc -o amx_renaming && ./amx_renaming
#include <immintrin.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#define LOAD(tile, index) _tile_loadd(tile, p + 1024 * ((index) & 15), 64)
#define DP _tile_dpbf16ps
#define ZERO _tile_zero

// Each: 4 products per round.
static void registers(const uint8_t* p, long rounds) {
  LOAD(4, 0);
  LOAD(5, 1);
  LOAD(6, 2);
  LOAD(7, 3);
  for (long i = 0; i < rounds; ++i) {
    DP(0, 4, 6);
    DP(1, 4, 7);
    DP(2, 5, 6);
    DP(3, 5, 7);
  }
}
template <bool kZero>
static void block(const uint8_t* p, long rounds) {
  for (long i = 0; i < rounds; ++i) {
    LOAD(4, 4 * i);
    LOAD(6, 4 * i + 1);
    DP(0, 4, 6);
    LOAD(7, 4 * i + 2);
    DP(1, 4, 7);
    if (kZero) ZERO(4);
    LOAD(5, 4 * i + 3);
    DP(2, 5, 6);
    DP(3, 5, 7);
    if (kZero) {
      ZERO(5);
      ZERO(6);
      ZERO(7);
    }
  }
}
static void one_and_one(const uint8_t* p, long rounds) {
  for (long i = 0; i < rounds; ++i) {
    LOAD(4, 5 * i);
    LOAD(6, 5 * i + 1);
    DP(0, 4, 6);
    LOAD(6, 5 * i + 2);
    DP(1, 4, 6);
    LOAD(4, 5 * i + 3);
    DP(3, 4, 6);
    LOAD(6, 5 * i + 4);
    DP(2, 4, 6);
  }
}
static void two_sums(const uint8_t* p, long rounds) {
  for (long i = 0; i < 2 * rounds; ++i) {
    LOAD(6, 3 * i);
    LOAD(4, 3 * i + 1);
    DP(0, 4, 6);
    LOAD(4, 3 * i + 2);
    DP(1, 4, 6);
  }
}

template <int kSums>
static void nothing_loaded(const uint8_t* p, long rounds) {
  LOAD(4, 0);
  LOAD(6, 1);
  for (long i = 0; i < rounds; ++i) {
    DP(0, 4, 6);
    DP(1, 4, 6);
    if (kSums == 4) {
      DP(2, 4, 6);
      DP(3, 4, 6);
    } else {
      DP(0, 4, 6);
      DP(1, 4, 6);
    }
  }
  ZERO(4);
  ZERO(6);
}
// 2 to 5 tiles of rows by one panel.
template <int kSums>
static void one_panel(const uint8_t* p, long rounds) {
  for (long i = 0; i < 4 * rounds / kSums; ++i) {
    LOAD(6, i);
    LOAD(5, i + 1);
    DP(0, 5, 6);
    ZERO(5);
    LOAD(5, i + 2);
    DP(1, 5, 6);
    ZERO(5);
    if (kSums > 2) {
      LOAD(5, i + 3);
      DP(2, 5, 6);
      ZERO(5);
    }
    if (kSums > 3) {
      LOAD(5, i + 4);
      DP(3, 5, 6);
      ZERO(5);
    }
    if (kSums > 4) {
      LOAD(5, i + 5);
      DP(4, 5, 6);
      ZERO(5);
    }
    ZERO(6);
  }
}

struct Pattern {
  const char* name;
  void (*run)(const uint8_t*, long);
  int tiles;
};
static const Pattern kPatterns[] = {{"registers only", registers, 8},
                                    {"2 x 2", block<false>, 8},
                                    {"2 x 2, zeroed after use", block<true>, 8},
                                    {"2 x 2, one a and one b at a time", one_and_one, 6},
                                    {"2 x 1", two_sums, 4},
                                    {"2 sums, nothing loaded", nothing_loaded<2>, 4},
                                    {"4 sums, nothing loaded", nothing_loaded<4>, 6},
                                    {"2 x 1, zeroed after use", one_panel<2>, 4},
                                    {"3 x 1, zeroed after use", one_panel<3>, 5},
                                    {"4 x 1, zeroed after use", one_panel<4>, 6},
                                    {"5 x 1, zeroed after use", one_panel<5>, 7}};

// Median nanoseconds of a product on `cpu`, once all `threads` have come.
static double measured(const Pattern& pattern, int cpu, std::atomic<int>& ready, int threads) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  auto* p = static_cast<uint8_t*>(aligned_alloc(4096, 16384));
  for (int i = 0; i < 8192; ++i) reinterpret_cast<uint16_t*>(p)[i] = uint16_t(0x3f80 ^ i % 256);
  static const Config config;
  _tile_loadconfig(&config);
  ++ready;
  while (ready < threads) {
  }
  std::vector<double> times;
  for (const double end = now() + 0.05; now() < end || times.size() < 3;) {
    constexpr long kRounds = 2400;
    const double begin = now();
    pattern.run(p, kRounds);
    times.push_back((now() - begin) / kRounds / 4 * 1e9);
  }
  _tile_release();
  free(p);
  std::nth_element(times.begin(), times.begin() + long(times.size() / 2), times.end());
  return times[times.size() / 2];
}

int main() {
  constexpr int kArchRequestXcompPerm = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kArchRequestXcompPerm, kTileData)) return puts("no AMX here"), 1;
  const int cpus = int(std::thread::hardware_concurrency());
  for (const Pattern& pattern : kPatterns) {
    printf("%-34s %d tiles, ns\n  alone    ", pattern.name, pattern.tiles);
    for (int cpu = 0; cpu < cpus; ++cpu) {
      std::atomic<int> ready = 0;
      std::thread([&] { printf(" %4.1f", measured(pattern, cpu, ready, 1)); }).join();
    }
    std::vector<double> ns(static_cast<size_t>(cpus));
    std::vector<std::thread> threads;
    std::atomic<int> ready = 0;
    for (int cpu = 0; cpu < cpus; ++cpu)
      threads.emplace_back([&, cpu] { ns[size_t(cpu)] = measured(pattern, cpu, ready, cpus); });
    for (std::thread& thread : threads) thread.join();
    double tflops = 0;
    printf("\n  together ");
    for (const double each : ns) printf(" %4.1f", each), tflops += 16384 / each / 1e3;
    printf("   %.1f TFLOPS\n", tflops);
  }
}
