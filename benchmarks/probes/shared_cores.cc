// Whether a kernel's share of what registers give depends on who else uses the core: per thread and turn, the pace of a
// chain of additions (slower beside a busy hyperthread), the tier's peak, and its kernel of many rows, bf16, weights
// and rows in L2. Prints medians of eighths, from idle neighbours to busy ones.
//
// From the root, after `make ext`, in a directory O=build/dev/CMakeFiles/_core.dir/csrc:
//   g++ -O2 -std=c++20 -Icsrc benchmarks/probes/shared_cores.cc $O/tier/*/*.o $O/runtime/{tiers,cpu_features}.cc.o
//   $O/format/*.o -o shared_cores -pthread
//   ./shared_cores THREADS TURNS ROWS TIER    16 30 256 avx512
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "format/pack.h"
#include "runtime/files/readable_file.h"
#include "runtime/tiers.h"

namespace tandem {  // what packing numbers would need
bool ReadableFile::read(const uint8_t*, int64_t, uint8_t*) { abort(); }
}  // namespace tandem

using namespace tandem;

namespace {

constexpr int kDepth = 2048, kPairs = 8, kMostRows = 512;
constexpr int64_t kYStride = 528, kHugePage = int64_t{2} << 20;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

uint8_t* huge(int64_t bytes) {
  void* p = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const uintptr_t start = (reinterpret_cast<uintptr_t>(p) + kHugePage - 1) & ~uintptr_t(kHugePage - 1);
  madvise(reinterpret_cast<void*>(start), bytes, MADV_HUGEPAGE);
  return reinterpret_cast<uint8_t*>(start);
}

struct Reading {
  double addition_ns, peak, kernel;  // GFLOPS
};

// One worker's weights, rows and scratch.
struct Bench {
  const KernelTable& table;
  std::vector<const void*> rows = std::vector<const void*>(kMostRows);
  MatmulArgs args;

  Bench(const KernelTable& of, int count) : table(of) {
    WeightView w = packed_layout({Format::bf16, 0, ScaleType::f32}, kPairs * kPairColumns, kDepth);
    const int64_t element = table.lane_type == DType::f32 ? 4 : 2, stride = kDepth * element + 64;
    uint8_t *const panels = huge(packed_bytes(w)), *const x = huge(kMostRows * stride);
    for (int64_t i = 0; i < packed_bytes(w) / 2; ++i)
      reinterpret_cast<uint16_t*>(panels)[i] = uint16_t(0x3c00 + i % 128);
    for (int64_t i = 0; i < kMostRows * stride / 2; ++i)  // 0.5 to 1, as floats, too
      reinterpret_cast<uint16_t*>(x)[i] = uint16_t(0x3f00 + i % 64);
    for (int r = 0; r < kMostRows; ++r) rows[size_t(r)] = x + r * stride;
    w.panels = panels;
    float* const y = reinterpret_cast<float*>(huge(kMostRows * kYStride * 4));
    args = {w, rows.data(), y, kYStride, huge(kMatmulScratchBytes), count, 0, kPairs, nullptr};
  }

  template <class Work>
  static double rate(double seconds, Work work) {  // of what work returns, in 1e9 a second
    double done = 0, end;
    const double start = now();
    do done += double(work()), end = now();
    while (end - start < seconds);
    return done / (end - start) / 1e9;
  }

  Reading read() const {
    const auto peak = [&] { return rate(0.003, [&] { return table.peak(2000, args.scratch); }); };
    const auto additions = [] {
      uint64_t sum = 1;
      for (int i = 0; i < 1000000; ++i) __asm__ volatile("add $1, %0" : "+r"(sum));
      return 1000000;
    };
    const auto multiply = [&] {
      table.formats[int(Format::bf16)].tile_mm(&args);
      return int64_t{2} * kDepth * kPairs * kPairColumns * args.rows;
    };
    const double before = peak(), kernel = rate(0.006, multiply);
    return {1 / rate(0.001, additions), (before + peak()) / 2, kernel};
  }
};

std::vector<Reading> measure(const KernelTable& table, int threads, int turns, int rows) {
  std::vector<Reading> readings(size_t(threads * turns));
  std::atomic<int> ready{0};
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t)
    workers.emplace_back([&, t] {
      cpu_set_t cpus;
      CPU_ZERO(&cpus);
      CPU_SET(t, &cpus);
      pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
      const Bench bench(table, rows);
      for (++ready; ready < threads;) continue;
      for (int turn = 0; turn < turns; ++turn) readings[size_t(t * turns + turn)] = bench.read();
    });
  for (auto& worker : workers) worker.join();
  return readings;
}

template <class Of>
double median(const Reading* from, const Reading* to, Of of) {
  std::vector<double> values;
  for (; from < to; ++from) values.push_back(of(*from));
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return std::fprintf(stderr, "THREADS TURNS ROWS TIER\n"), 1;
  syscall(SYS_arch_prctl, 0x1023, 18);  // tiles
  std::vector<Reading> all = measure(table_of_tier(argv[4]), std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]));
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.addition_ns < b.addition_ns; });
  for (size_t e = 0; e < 8; ++e) {
    const Reading *from = &all[all.size() * e / 8], *to = all.data() + all.size() * (e + 1) / 8;
    std::printf("an addition %.3f ns, peak %7.1f GFLOPS, kernel %7.1f, share %.3f\n",
                median(from, to, [](const Reading& r) { return r.addition_ns; }),
                median(from, to, [](const Reading& r) { return r.peak; }),
                median(from, to, [](const Reading& r) { return r.kernel; }),
                median(from, to, [](const Reading& r) { return r.kernel / r.peak; }));
  }
}
