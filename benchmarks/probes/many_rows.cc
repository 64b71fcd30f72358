// Many rows on matrix tiles as a layer multiplies them: weights come from memory, task after task of 16 pairs of
// panels, rows lie anywhere among 4096, or, "in place", at equal distances. Builds of the AMX tier in turn; ns for a
// step of 2 x 2 tiles and 32 k of every thread: the fastest, the fastest tenth, the median, and what all do together.
// (Cores that somebody else's hyperthread keeps busy and cores of one's own differ by two and change by the second, so
// a mean of few threads or calls says little.)
//
// From the root, with the tiles of a kind of each build (tiles_nibbles.cc.o or tiles_others.cc.o, in
// build/dev/CMakeFiles/_core.dir/csrc/tier/amx) copied to 0.o, 1.o, ...:
//   objcopy --redefine-sym _ZN6tandem15kAmxNibbleTilesE=_ZN6tandem7kTable0E 0.o; the same for 1.o with kTable1 (numbers:
//   lengths; the others' symbol is 14kAmxOtherTiles)
//   g++ -O2 -std=c++20 -DTABLES=kTable0,kTable1 -Icsrc benchmarks/probes/many_rows.cc 0.o 1.o
//   build/dev/CMakeFiles/_core.dir/csrc/format/*.o -o many_rows -pthread
//   ./many_rows THREADS SECONDS TURNS DEPTH FORMATS ROWS BUILDS    16 0.04 9 7168 int4,mxfp4, 256,512 01
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
#include <vector>

#include "abi/tiers.h"
#include "made_up_panels.h"
#include "runtime/tiers.h"

namespace tandem {
const DenseKernels& widest_kernels() { abort(); }  // what packing numbers would need, too
extern const KernelTable TABLES;
}  // namespace tandem
using Clock = std::chrono::steady_clock;

namespace {

constexpr int kMostRows = 512, kTokens = 4096, kPairs = 16, kMostDepth = 7168;
constexpr int64_t kYStride = 528;

template <class... Tables>
std::vector<const KernelTable*> addresses(const Tables&... tables) {
  return {&tables...};
}

int64_t row_bytes_of(const WeightView& w) { return (w.padded_depth * 2 / kCacheLine | 1) * kCacheLine; }

struct Case {
  int build, rows;
  bool in_place;
};

// One worker's weights and scratch.
class Bench {
 public:
  Bench(const WeightView& view, const uint8_t* x, int worker) : weights_(view), x_(x), state_(uint32_t(worker) + 1) {
    const int64_t y_bytes = kMostRows * kYStride * 4;
    uint8_t* const panels = huge(whole_pages(packed_bytes(view)) + kMatmulScratchBytes + y_bytes);
    fill_panel(view, panels);
    for (int64_t p = 1; p < 2 * view.pairs; ++p)
      std::memcpy(panels + p * view.panel_bytes, panels, size_t(view.panel_bytes));
    weights_.panels = panels;
    scratch_ = panels + whole_pages(packed_bytes(view));
    y_ = reinterpret_cast<float*>(scratch_ + kMatmulScratchBytes);
  }

  void call(MatmulFn kernel, const Case& c) {
    choose_rows(c);
    const int next = (first_pair_ + kPairs) % weights_.pairs;
    const MatmulArgs args{weights_,
                          rows_,
                          y_,
                          kYStride,
                          scratch_,
                          c.rows,
                          first_pair_,
                          kPairs,
                          weights_.panels + next * weights_.pair_bytes,
                          c.in_place ? row_bytes_of(weights_) : 0};
    kernel(&args);
    first_pair_ = next;
  }

 private:
  uint32_t random(uint32_t below) {
    state_ = state_ * 1664525u + 1013904223u;
    return (state_ >> 8) % below;
  }

  // In ascending order, as a router's.
  void choose_rows(const Case& c) {
    int64_t token = c.in_place ? random(kTokens - kMostRows) : 0;
    for (int r = 0; r < c.rows; ++r) {
      rows_[r] = x_ + token % kTokens * row_bytes_of(weights_);
      token += c.in_place ? 1 : 1 + random(uint32_t(2 * kTokens / c.rows - 2));
    }
  }

  WeightView weights_;
  const uint8_t* x_;
  uint32_t state_;
  const void* rows_[kMostRows];
  uint8_t* scratch_;
  float* y_;
  int first_pair_ = 0;
};

// ns a step of every thread.
std::vector<double> measure(std::vector<Bench>& benches, MatmulFn kernel, const Case& c, int64_t depth,
                            double seconds) {
  std::vector<double> ns(benches.size());
  std::atomic<size_t> ready{0};
  std::atomic<bool> go{false}, stop{false};
  std::vector<std::thread> workers;
  for (size_t t = 0; t < benches.size(); ++t)
    workers.emplace_back([&, t] {
      cpu_set_t cpus;
      CPU_ZERO(&cpus);
      CPU_SET(t, &cpus);
      pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
      benches[t].call(kernel, c);
      for (++ready; !go;) continue;
      const auto start = Clock::now();
      int64_t calls = 0;
      for (; !stop.load(std::memory_order_relaxed); ++calls) benches[t].call(kernel, c);
      const double steps = double(calls) * kPairs * c.rows / 32 * double(depth) / 32;
      ns[t] = std::chrono::duration<double, std::nano>(Clock::now() - start).count() / steps;
    });
  while (ready < benches.size()) usleep(50);
  go = true;
  usleep(useconds_t(seconds * 1e6));
  stop = true;
  for (auto& worker : workers) worker.join();
  return ns;
}

std::vector<Case> cases_of(const char* rows, const char* builds) {
  std::vector<Case> cases;
  for (const char* at = rows; at; at = std::strchr(at, ',') ? std::strchr(at, ',') + 1 : nullptr)
    for (const char* build = builds; *build; ++build)
      for (const bool in_place : {false, true}) cases.push_back({*build - '0', std::atoi(at), in_place});
  return cases;
}

void print(const char* format, int64_t depth, const Case& c, std::vector<double>& ns) {
  std::sort(ns.begin(), ns.end());
  double rate = 0;
  for (const double each : ns) rate += 1 / each;
  std::printf("%-8s K%-5d build %d %3d rows %-9s: fastest %6.1f, tenth %6.1f, median %6.1f, together %6.1f\n", format,
              int(depth), c.build, c.rows, c.in_place ? "in place" : "", ns[0], ns[ns.size() / 10], ns[ns.size() / 2],
              double(ns.size()) / rate);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 8) return std::fprintf(stderr, "THREADS SECONDS TURNS DEPTH FORMATS ROWS BUILDS\n"), 1;
  const int threads = std::atoi(argv[1]), turns = std::atoi(argv[3]), depth = std::atoi(argv[4]);
  const std::string formats = argv[5];
  const std::vector<const KernelTable*> tables = addresses(TABLES);
  syscall(SYS_arch_prctl, 0x1023, 18);  // tiles
  const int64_t x_bytes = int64_t{kTokens} * (2 * kMostDepth + kCacheLine);
  uint8_t* const x = huge(x_bytes);
  for (int64_t i = 0; i < x_bytes / 2; ++i) reinterpret_cast<uint16_t*>(x)[i] = uint16_t(0x3f00 + i % 64);
  for (const Named& f : kFormats) {
    if (formats.find(std::string(f.name) + ",") == std::string::npos) continue;
    const WeightView view = packed_layout(f.format, (depth > 4096 ? 64 : 224) * kPairColumns, depth);
    std::vector<Bench> benches;
    for (int t = 0; t < threads; ++t) benches.emplace_back(view, x, t);
    const std::vector<Case> cases = cases_of(argv[6], argv[7]);
    std::vector<std::vector<double>> found(cases.size());
    for (int turn = 0; turn < turns; ++turn)
      for (size_t i = 0; i < cases.size(); ++i) {
        const size_t at = turn % 2 ? cases.size() - 1 - i : i;  // forth and back
        const MatmulFn kernel = tables[size_t(cases[at].build)]->formats[int(view.format)].tile_mm;
        const std::vector<double> ns = measure(benches, kernel, cases[at], depth, std::atof(argv[2]));
        found[at].insert(found[at].end(), ns.begin(), ns.end());
      }
    for (size_t i = 0; i < cases.size(); ++i) print(f.name, depth, cases[i], found[i]);
    std::fflush(stdout);
  }
}
