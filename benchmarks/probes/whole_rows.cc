// How fast bf16 rows as a checkpoint has them are multiplied (micro/whole_rows.h), beside packed panels, for several
// ways of asking for what comes next; in pages of 4 KiB (a file's) and of 2 MiB.
//
// Xeon, 16 virtual CPUs, rows of 4 KiB, GB/s, small | large pages: packed 91 | 109, the next 256 bytes of every row
// into L2 92 | 114 (taken), into L1 92 | 111, the next 1 KiB 75 | 94, a pair of panels ahead in the order of addresses
// 81 | 98, no prefetches 89 | 70. Rows 8 bytes off a cache line: 88 | -. One core of a Zen 5: packed 35 | 36, rows 20
// | 21.
//
//   g++ -O3 -std=c++20 -march=sapphirerapids -pthread -I ../../csrc whole_rows.cc -o whole_rows
//   ./whole_rows THREADS DEPTH HUGE_PAGES BYTES_OFF_A_LINE ROWS
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "abi/kernel_table.h"
#include "isa/avx512_bf16.h"
#include "micro/dot_rows.h"
#include "micro/whole_rows.h"

namespace tandem {
namespace {

using Isa = Avx512Bf16Isa;
enum class Ahead { none, rows_l2, rows_l1, in_order };

struct Call {
  MatmulArgs args;
  int64_t row_bytes;
};

template <Ahead kAhead, int kPairs>
void whole_rows(const Call& call) {
  const MatmulArgs& a = call.args;
  const int64_t row = call.row_bytes, depth = a.weights.padded_depth / 2;
  for (int p = 0; p < a.pairs; ++p) {
    const PairOfPanels here = pair_of_panels(a.weights, p), next = pair_of_panels(a.weights, p + 1);
    for (int64_t first = 0; first < depth; first += kPairs) {
      for (int q = 0; q < 2; ++q) {
        const uint8_t* after = first + kPairs < depth ? here.payload[q] + 4 * (first + kPairs) : next.payload[q];
        for (int r = 0; r < 16 && (kAhead == Ahead::rows_l2 || kAhead == Ahead::rows_l1); ++r)
          for (int at = 0; at < 4 * kPairs; at += 64)
            kAhead == Ahead::rows_l2 ? Isa::prefetch_l2(after + r * row + at) : Isa::prefetch(after + r * row + at);
        if (kAhead == Ahead::in_order)
          for (int64_t at = 64 * first; at < 64 * (first + kPairs); at += 64) Isa::prefetch_l2(next.payload[q] + at);
        unpack_rows<Isa>(here.payload[q], row, first, first + kPairs, a.scratch + q * kPairs * 64);
      }
      const ScratchSource<Isa::Lane> source{{a.scratch, a.scratch + kPairs * 64}};
      const Scales none{};
      block_of<Isa, ScratchSource<Isa::Lane>, false, Isa::kTileRows>(a.rows, source, first,
                                                                     reinterpret_cast<const uint8_t* const*>(a.x_rows),
                                                                     first, first + kPairs, &none, a.y, a.y_stride);
    }
  }
}

void packed(const Call& call) {
  MatmulArgs args = call.args;
  for (int p = 0; p < call.args.pairs; ++p) {
    args.first_pair = p;
    args.pairs = 1;
    args.next_panel = args.weights.panels + (p + 1) * args.weights.pair_bytes;
    dot_rows<Isa, Bf16Format>(&args);
  }
}

struct Way {
  const char* name;
  void (*run)(const Call&);
};
const Way kWays[] = {{"packed", packed},
                     {"rows, 256 bytes ahead into L2", whole_rows<Ahead::rows_l2, 64>},
                     {"rows, 256 bytes ahead into L1", whole_rows<Ahead::rows_l1, 64>},
                     {"rows, 1 KiB ahead into L2", whole_rows<Ahead::rows_l2, 256>},
                     {"rows, a pair ahead in order", whole_rows<Ahead::in_order, 64>},
                     {"rows, nothing ahead", whole_rows<Ahead::none, 64>}};

// One thread's share.
void run(const Way& way, int cpu, const uint8_t* memory, int64_t bytes, int depth, int rows) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(size_t(cpu), &set);
  sched_setaffinity(0, sizeof set, &set);
  std::vector<uint8_t> x(size_t(2 * depth)), scratch(kMatmulScratchBytes + 64);
  std::vector<float> y(32 * 32 + 16);
  const std::vector<const void*> each(size_t(rows), x.data());
  WeightView w{};
  w.panels = memory;
  w.panel_bytes = w.second = 32 * int64_t{depth};
  w.pair_bytes = 2 * w.panel_bytes;
  w.format = Format::bf16;
  w.depth = w.padded_depth = depth;
  w.pairs = int32_t(bytes / w.pair_bytes) - 1;
  const auto aligned = [](auto* p) {
    return reinterpret_cast<decltype(p)>((reinterpret_cast<uintptr_t>(p) + 63) & ~63);
  };
  way.run({{w, each.data(), aligned(y.data()), 32, aligned(scratch.data()), rows, 0, w.pairs, nullptr}, 2 * depth});
}

double gigabytes_a_second(const Way& way, int threads, const uint8_t* memory, int64_t bytes, int depth, int rows) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i)
    all.emplace_back(run, way, i, memory + bytes / threads * i, bytes / threads, depth, rows);
  for (std::thread& thread : all) thread.join();
  return double(bytes) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / 1e9;
}

}  // namespace
}  // namespace tandem

int main(int count, char** given) {
  const auto argument = [&](int i, int otherwise) { return count > i ? std::atoi(given[i]) : otherwise; };
  const int threads = argument(1, 1), depth = argument(2, 2048), huge = argument(3, 0), off = argument(4, 8);
  constexpr int64_t kBytes = int64_t{768} << 20, kHuge = int64_t{2} << 20;
  void* mapped = mmap(nullptr, kBytes + 2 * kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  uint8_t* memory = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(mapped) + kHuge - 1) & ~(kHuge - 1));
  madvise(memory, kBytes + kHuge, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  std::memset(memory, 0, kBytes + 4096);
  for (int turn = 0; turn < 3; ++turn)
    for (const tandem::Way& way : tandem::kWays)
      std::printf("%-32s %.1f GB/s\n", way.name,
                  tandem::gigabytes_a_second(way, threads, memory + off, kBytes, depth, argument(5, 1)));
}
