// Kernels of the AMX tier alone: nanoseconds for a pair of panels by format, algorithm and rows, weights in each
// worker's own L2, all workers at once. Says what a kernel could read if memory gave more, and what it costs beside it.
//
// From the root, after `make ext`, in a directory O=build/dev/CMakeFiles/_core.dir/csrc:
//   g++ -O2 -std=c++20 -Icsrc benchmarks/probes/kernels_in_l2.cc $O/tier/*/*.o $O/runtime/{tiers,cpu_features}.cc.o
//   $O/format/*.o -o kernels_in_l2 -pthread
//   ./kernels_in_l2 THREADS SECONDS DEPTH PAIRS [FORMATS [ALGORITHMS [ROWS]]]    16 0.012 2048 4 int4,fp8, tdg 1,4,16,
// ALGORITHMS: t tiles, d dot_rows, g digits.
#include <pthread.h>
#include <sched.h>
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
#include <utility>
#include <vector>

#include "format/digit_row.h"
#include "made_up_panels.h"
#include "runtime/tiers.h"

using Clock = std::chrono::steady_clock;

namespace {

constexpr int kMostRows = 512;
constexpr int64_t kYStride = 528;

const KernelTable& table() { return table_of_tier("amx"); }

MatmulFn kernel_of(Format format, char algorithm) {
  const FormatKernels& kernels = table().formats[int(format)];
  return algorithm == 'd' ? kernels.dot_rows : algorithm == 't' ? kernels.tile_mm : table().digits[int(format)].rows;
}

// One worker's weights, rows and scratch.
struct Bench {
  WeightView weights;
  std::vector<const void*> rows;
  MatmulArgs args;

  Bench(WeightView view, int count, char algorithm) : weights(view), rows(size_t(count)) {
    const int64_t row_bytes = view.padded_depth * 2 + 64 + (view.padded_depth / 32 % 2 ? 64 : 0);
    const int64_t digit_bytes = digit_row_layout(view).bytes;
    uint8_t* memory = huge(whole_pages(packed_bytes(view)) + whole_pages(kMostRows * row_bytes) +
                           whole_pages(kMostRows * digit_bytes) + kMatmulScratchBytes + kMostRows * kYStride * 4);
    const auto take = [&](int64_t bytes) { return std::exchange(memory, memory + whole_pages(bytes)); };
    uint8_t* const panels = take(packed_bytes(view));
    weights.panels = panels;
    for (int64_t p = 0; p < 2 * view.pairs; ++p) fill_panel(view, panels + p * view.panel_bytes);
    uint8_t* const x = take(kMostRows * row_bytes);
    for (int64_t i = 0; i < kMostRows * row_bytes / 2; ++i)
      reinterpret_cast<uint16_t*>(x)[i] = uint16_t(0x3f00 + i % 64);
    uint8_t* const digits = take(kMostRows * digit_bytes);
    for (int r = 0; r < count; ++r) {
      rows[size_t(r)] = x + r * row_bytes;
      if (algorithm != 'g') continue;
      const IntegerKernels& integers = table().digits[int(view.format)];
      const IntegerRowArgs row{view,          rows[size_t(r)], DType::bf16, digits + r * digit_bytes, integers.offset,
                               integers.split};
      table().cut_row(&row);
      rows[size_t(r)] = row.to;
    }
    uint8_t* const scratch = take(kMatmulScratchBytes);
    args = {weights, rows.data(), reinterpret_cast<float*>(memory), kYStride, scratch, count, 0, view.pairs, nullptr};
  }
};

// ns a pair of panels of every thread, sorted.
std::vector<double> measure(const WeightView& view, char algorithm, int rows, int threads, double seconds) {
  const MatmulFn kernel = kernel_of(view.format, algorithm);
  std::vector<double> ns(static_cast<size_t>(threads));
  std::atomic<int> ready{0};
  std::atomic<bool> go{false}, stop{false};
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t)
    workers.emplace_back([&, t] {
      cpu_set_t cpus;
      CPU_ZERO(&cpus);
      CPU_SET(t, &cpus);
      pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
      const Bench bench(view, rows, algorithm);
      kernel(&bench.args);
      ++ready;
      while (!go) continue;
      const auto start = Clock::now();
      int64_t calls = 0;
      for (; !stop.load(std::memory_order_relaxed); ++calls) kernel(&bench.args);
      ns[size_t(t)] =
          std::chrono::duration<double, std::nano>(Clock::now() - start).count() / double(calls * view.pairs);
    });
  while (ready < threads) usleep(100);
  go = true;
  usleep(useconds_t(seconds * 1e6));
  stop = true;
  for (auto& worker : workers) worker.join();
  std::sort(ns.begin(), ns.end());
  return ns;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return std::fprintf(stderr, "THREADS SECONDS DEPTH PAIRS [FORMATS [ALGORITHMS [ROWS]]]\n"), 1;
  const int threads = std::atoi(argv[1]), depth = std::atoi(argv[3]), pairs = std::atoi(argv[4]);
  const std::string formats = argc > 5 ? argv[5] : "", algorithms = argc > 6 ? argv[6] : "tdg";
  const std::string rows_list = argc > 7 ? argv[7] : "1,2,3,4,6,8,12,16,24,32,48,64,128,256,";
  syscall(SYS_arch_prctl, 0x1023, 18);  // tiles
  for (const Named& f : kFormats) {
    if (!formats.empty() && formats.find(std::string(f.name) + ",") == std::string::npos) continue;
    const WeightView view = packed_layout(f.format, pairs * kPairColumns, depth);
    for (const char algorithm : algorithms) {
      if (!kernel_of(view.format, algorithm)) continue;
      for (size_t at = 0; at < rows_list.size(); at = rows_list.find(',', at) + 1) {
        const int rows = std::atoi(rows_list.c_str() + at);
        const std::vector<double> ns = measure(view, algorithm, rows, threads, std::atof(argv[2]));
        double gbps = 0;
        for (const double each : ns) gbps += double(view.pair_bytes) / each;
        const double tflops = gbps / double(view.pair_bytes) * 2 * kPairColumns * depth * rows / 1e3;
        std::printf("%-8s K%-5d %c rows %3d: %8.0f ns a pair (%.0f..%.0f), %6.1f GB/s in all, %6.2f TFLOPS\n", f.name,
                    depth, algorithm, rows, ns[ns.size() / 2], ns.front(), ns.back(), gbps, tflops);
        std::fflush(stdout);
        if (rows_list.find(',', at) == std::string::npos) break;
      }
    }
  }
}
