// What the loop of micro/tile_amx.h takes with nothing around it: rows in tile order in L2, 16 pairs of panels pass
// over them, 2 x 2 tiles. ns for a step of 32 k by
//   weights   one pair in L1 or all 16 in L2, again and again, or from memory, asked for one pair ahead
//   rows      256 or 512 of them; loaded past L1, or into it
//   steps     of a slice of K: sums change as often
//   sums      never change, or are stored and loaded, or stored to L1 and added by vectors meanwhile
// each of some CPUs for itself (the fastest: a core of one's own), and all together (the fastest, the median, the
// mean).
//   g++ -O2 -std=c++20 -march=sapphirerapids -pthread bare_tiles.cc -o bare_tiles && ./bare_tiles
#include <immintrin.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

namespace {

enum Weights { kL1, kL2, kMemory };
enum Sums { kStay, kMove, kAdded };
constexpr int kPairs = 16;
constexpr int64_t kRowBytes = 2112;  // of sums: 16 pairs of columns and a line, so that rows lie in different sets
constexpr int64_t kMiB = int64_t{1} << 20, kStreamBytes = 96 * kMiB;
constexpr int64_t kRowsAt = 0, kPanelsAt = kMiB, kSumsAt = 2 * kMiB, kAddedAt = 5 * kMiB + 8192, kStreamAt = 6 * kMiB;

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
struct Worker {
  uint8_t* memory = nullptr;
  int64_t at = 0;  // in the stream
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
void fence() { __asm__ volatile("" ::: "memory"); }

uint8_t* huge(int64_t bytes) {
  void* p = mmap(nullptr, size_t(bytes + 2 * kMiB), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* start = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + 2 * kMiB - 1) & ~uintptr_t(2 * kMiB - 1));
  madvise(start, size_t(bytes), MADV_HUGEPAGE);
  memset(start, 0, size_t(bytes));
  return start;
}

template <bool kPastL1>
void step(const uint8_t* a, const uint8_t* b0, const uint8_t* b1) {
  if (kPastL1)
    _tile_stream_loadd(4, a, 64);
  else
    _tile_loadd(4, a, 64);
  _tile_loadd(6, b0, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, b1, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_zero(4);
  if (kPastL1)
    _tile_stream_loadd(5, a + 1024, 64);
  else
    _tile_loadd(5, a + 1024, 64);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}

void load_sums(const uint8_t* y) {
  fence();
  _tile_loadd(0, y, kRowBytes);
  _tile_loadd(1, y + 64, kRowBytes);
  _tile_loadd(2, y + 16 * kRowBytes, kRowBytes);
  _tile_loadd(3, y + 16 * kRowBytes + 64, kRowBytes);
}
void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  fence();
}
void store_sums(uint8_t* y, int64_t row_bytes) {
  fence();
  _tile_stored(0, y, row_bytes);
  _tile_stored(1, y + 64, row_bytes);
  _tile_stored(2, y + 16 * row_bytes, row_bytes);
  _tile_stored(3, y + 16 * row_bytes + 64, row_bytes);
  clear_sums();
}

// Lines [first, last) of 64, of sums of a block.
void add_lines(uint8_t* y, const uint8_t* added, int first, int last) {
  for (int i = first; i < last && i < 64; ++i) {
    float* to = reinterpret_cast<float*>(y + i / 2 * kRowBytes + i % 2 * 64);
    const __m512 sum = _mm512_load_ps(reinterpret_cast<const float*>(added + 64 * i));
    _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), sum));
  }
}

template <Weights kWeights, int kBlocks, bool kPastL1, int kSteps, Sums kSums>
void slice(Worker& worker) {
  constexpr int64_t kPairBytes = 2048 * kSteps, kLinesAStep = 32 / kBlocks, kAdds = (64 + kSteps - 1) / kSteps;
  uint8_t *const memory = worker.memory, *const added = memory + kAddedAt, *before = memory + kSumsAt;
  clear_sums();
  for (int p = 0; p < kPairs; ++p) {
    const uint8_t* const b =
        memory + (kWeights == kMemory ? kStreamAt + worker.at : kPanelsAt + (kWeights == kL2) * p * kPairBytes);
    worker.at += kPairBytes;
    if (worker.at + 2 * kPairBytes > kStreamBytes) worker.at = 0;
    const uint8_t* next = memory + kStreamAt + worker.at;
    for (int block = 0; block < kBlocks; ++block) {
      uint8_t* const y = memory + kSumsAt + block * 32 * kRowBytes + p * 128;
      if (kSums == kMove) load_sums(y);
      const uint8_t* a = memory + kRowsAt + block * kPairBytes;
      for (int s = 0; s < kSteps; ++s, a += 2048) {
        step<kPastL1>(a, b + 1024 * s, b + 1024 * (s + kSteps));
        if (kWeights == kMemory)
          for (int i = 0; i < kLinesAStep; ++i, next += 64)
            _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
        if (kSums == kAdded) add_lines(before, added, int(kAdds) * s, int(kAdds) * (s + 1));
      }
      if (kSums == kMove) store_sums(y, kRowBytes);
      if (kSums == kAdded) store_sums(added, 128);
      before = y;
    }
  }
}

struct Case {
  const char *weights, *loads, *sums;
  int blocks, steps;
  void (*run)(Worker&);
};
template <Weights kWeights, int kBlocks, bool kPastL1, int kSteps>
void add_cases(std::vector<Case>& cases) {
  const char* const weights = kWeights == kL1 ? "L1" : kWeights == kL2 ? "L2" : "memory";
  const char* const loads = kPastL1 ? "past L1" : "into L1";
  cases.push_back({weights, loads, "stay", kBlocks, kSteps, slice<kWeights, kBlocks, kPastL1, kSteps, kStay>});
  cases.push_back(
      {weights, loads, "stored and loaded", kBlocks, kSteps, slice<kWeights, kBlocks, kPastL1, kSteps, kMove>});
  cases.push_back(
      {weights, loads, "added by vectors", kBlocks, kSteps, slice<kWeights, kBlocks, kPastL1, kSteps, kAdded>});
}
template <Weights kWeights>
std::vector<Case> cases_of() {
  std::vector<Case> cases;
  add_cases<kWeights, 8, true, 8>(cases);
  add_cases<kWeights, 8, true, 12>(cases);
  add_cases<kWeights, 8, true, 16>(cases);
  add_cases<kWeights, 8, true, 24>(cases);
  add_cases<kWeights, 8, false, 16>(cases);
  add_cases<kWeights, 16, true, 16>(cases);
  return cases;
}

// The median of a step on `cpu`, once all `threads` have come.
double measured(const Case& c, int cpu, Worker& worker, std::atomic<int>& ready, int threads) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  if (!worker.memory) worker.memory = huge(kStreamAt + kStreamBytes);
  static const Config config;
  _tile_loadconfig(&config);
  ++ready;
  while (ready < threads) {
  }
  std::vector<double> times;
  for (const double end = now() + 0.02; now() < end || times.size() < 5;) {
    const double begin = now();
    c.run(worker);
    times.push_back((now() - begin) / (kPairs * c.blocks * c.steps) * 1e9);
  }
  _tile_release();
  std::nth_element(times.begin(), times.begin() + long(times.size() / 2), times.end());
  return times[times.size() / 2];
}

void print(const Case& c, std::vector<Worker>& workers) {
  const int cpus = int(workers.size());
  std::vector<double> ns(workers.size());
  double alone = 1e9, paces = 0;
  for (int cpu = 0; cpu < cpus; cpu += 4) {
    std::atomic<int> ready = 0;
    std::thread([&] { alone = std::min(alone, measured(c, cpu, workers[size_t(cpu)], ready, 1)); }).join();
  }
  std::vector<std::thread> threads;
  std::atomic<int> ready = 0;
  for (int cpu = 0; cpu < cpus; ++cpu)
    threads.emplace_back([&, cpu] { ns[size_t(cpu)] = measured(c, cpu, workers[size_t(cpu)], ready, cpus); });
  for (std::thread& thread : threads) thread.join();
  std::sort(ns.begin(), ns.end());
  for (const double each : ns) paces += 1 / each;
  printf(
      "weights from %-6s %d rows, %s, %2d steps, sums %-17s: alone %5.1f, together %5.1f, median %5.1f, mean %5.1f\n",
      c.weights, 32 * c.blocks, c.loads, c.steps, c.sums, alone, ns[0], ns[ns.size() / 2], cpus / paces);
  fflush(stdout);
}

}  // namespace

int main() {
  constexpr int kArchRequestXcompPerm = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kArchRequestXcompPerm, kTileData)) return puts("no AMX here"), 1;
  std::vector<Worker> workers(std::thread::hardware_concurrency());
  for (int turn = 0; turn < 3; ++turn)
    for (const auto& cases : {cases_of<kL1>(), cases_of<kL2>(), cases_of<kMemory>()})
      for (const Case& c : cases) print(c, workers);
}
