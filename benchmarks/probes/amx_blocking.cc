// How a task of many rows should be blocked for AMX: R rows x C columns of K = 7168, all workers at once. Sums,
// gathered rows and panels compete for L2, and operands and sums for L1 and for what L2 delivers (64 lines a step of 2
// x 2 tiles and 64 cycles, at the very most; half of that in practice).
//   slice    k whose rows are gathered to L2 at a time       R * slice * 2 bytes, C / 32 pairs of panels pass over them
//   part     k of a pair of panels that should stay in L1: sums are loaded and stored once per part
//   group    pairs of panels that take turns on a block of 32 rows: 1, or 2 (rows then come from L2 once per 64
//   columns)
// Lines from L2 per step: rows 32 / group, sums 4096 / part.
//   g++ -O3 -std=c++20 -march=sapphirerapids -pthread amx_blocking.cc -o amx_blocking && ./amx_blocking 0.05 11
#include <immintrin.h>
#include <pthread.h>
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

#ifdef NO_AMX  // reads and writes as tiles would, to check addresses where there are none
static volatile uint8_t sink;
static void touch(const void* p, int64_t stride) {
  for (int r = 0; r < 16; ++r)
    sink = static_cast<const uint8_t*>(p)[r * stride] + static_cast<const uint8_t*>(p)[r * stride + 63];
}
#define _tile_loadd(t, p, s) touch(p, s)
#define _tile_stored(t, p, s) touch(p, s)
#define _tile_dpbf16ps(a, b, c)
#define _tile_zero(t)
#define _tile_loadconfig(p)
#define _tile_release()
#endif

using Clock = std::chrono::steady_clock;
constexpr int64_t K = 7168, kTokens = 4096, kWeightBytes = int64_t{1280} << 20, kArrangedBytes = int64_t{256} << 20;

static uint8_t* big(int64_t bytes) {
  void* p = mmap(nullptr, bytes + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* d = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + (2 << 20) - 1) & ~uintptr_t((2 << 20) - 1));
  madvise(d, bytes, MADV_HUGEPAGE);
  return d;
}
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

enum Feed {
  kResident,      // rows are in L2 already: the same slice again and again
  kGather,        // copied before each slice
  kGatherAsk,     // and the next slice's lines asked for, into L2, between the steps
  kGatherAsk0,    // into L1
  kCopy,          // the next slice copied between blocks of rows, in bursts
  kCopyAsk,       // and asked for a burst earlier
  kArranged,      // rows lie in tile order, slice after slice: tiles are loaded from there
  kArrangedAsk,   // and the next slice asked for between the steps
  kArrangedHalf,  // every second line
};
enum Weights { kHot, kPlain, kAsk, kAsk0 };
enum Order {
  kUse,    // a tile is loaded where it is first used
  kFirst,  // all four, then four products
  kEarly,  // the next step's, each as soon as its register is free
};
struct Variant {
  const char* name;
  int rows, columns, slice, part, group;
  Feed feed;
  Weights weights;
  bool sums;
  int workers, step;  // on CPUs 0, step, 2 * step, ...
  Order order = kUse;
};
struct Shared {
  uint8_t *x, *arranged, *weights;
};
constexpr int64_t kStride = 1040;  // floats between rows of sums, at most

// 2 x 2 tiles times 32 k. kEarly: `more` steps follow 1 KiB behind.
static inline void multiply_step(Order order, const uint8_t* a0, const uint8_t* a1, const uint8_t* b0,
                                 const uint8_t* b1, bool first, bool more) {
  if (order == kUse) {
    _tile_loadd(4, a0, 64);
    _tile_loadd(6, b0, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    return;
  }
  if (order == kFirst || first) {
    _tile_loadd(4, a0, 64);
    _tile_loadd(6, b0, 64);
    _tile_loadd(7, b1, 64);
    _tile_loadd(5, a1, 64);
  }
  const bool early = order == kEarly && more;
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (early) _tile_loadd(4, a0 + 1024, 64);
  _tile_dpbf16ps(2, 5, 6);
  if (early) _tile_loadd(6, b0 + 1024, 64);
  _tile_dpbf16ps(3, 5, 7);
  if (early) {
    _tile_loadd(7, b1 + 1024, 64);
    _tile_loadd(5, a1 + 1024, 64);
  }
}

struct Core {
  Shared s;
  uint8_t *rows, *hot;
  float* y;
  std::vector<const uint8_t*> x = std::vector<const uint8_t*>(1024);
  uint32_t dice = 1;
  double gathering = 0;
  uint32_t next() { return dice = dice * 1664525u + 1013904223u; }

  // Lines [from, to) of a slice: 16 rows' lines of a step lie together.
  void copy(const Variant& v, int64_t offset, int64_t from, int64_t to, uint8_t* buffer, int64_t ahead) {
    const int64_t steps = v.slice / 32;
    for (int64_t l = from; l < to; ++l) {
      const int64_t r = l / steps, c = l % steps;
      if (ahead && l + ahead < v.rows * steps)
        _mm_prefetch(reinterpret_cast<const char*>(x[(l + ahead) / steps] + offset + (l + ahead) % steps * 64),
                     _MM_HINT_T0);
      _mm512_storeu_si512(buffer + r / 16 * steps * 1024 + c * 1024 + r % 16 * 64,
                          _mm512_loadu_si512(x[r] + offset + c * 64));
    }
  }

  void task(const Variant& v) {
    const int64_t slice_bytes = int64_t(v.rows) * v.slice * 2, steps_of_slice = v.slice / 32, slices = K / v.slice;
    const int64_t lines = slice_bytes / 64, y_stride = v.columns + 16, pairs = v.columns / 32, blocks = v.rows / 32;
    const int64_t parts = v.slice / v.part, steps = v.part / 32, panel = K * 32;
    for (int r = 0; r < v.rows; ++r) x[r] = s.x + (next() >> 8) % kTokens * (K * 2);
    const bool arranged = v.feed >= kArranged, copies = v.feed == kCopy || v.feed == kCopyAsk;
    const uint8_t* tiles = s.arranged + (next() >> 8) % (kArrangedBytes / (2 * K * v.rows)) * (2 * K * v.rows);
    const uint8_t* w = s.weights + (next() >> 8) % ((kWeightBytes - panel * v.columns / 16) / (4 << 20)) * (4 << 20);
    uint8_t* buffers[2] = {rows, rows + slice_bytes};
    if (copies) copy(v, 0, 0, lines, buffers[0], 2 * steps_of_slice);
    for (int64_t sl = 0; sl < slices; ++sl) {
      const int64_t offset = sl * v.slice * 2;
      if (v.feed == kGather || v.feed == kGatherAsk || v.feed == kGatherAsk0) {
        const auto start = Clock::now();
        copy(v, offset, 0, lines, buffers[0], 2 * steps_of_slice);
        gathering += seconds_since(start);
      }
      const uint8_t* here = arranged ? tiles + sl * slice_bytes : buffers[copies ? sl % 2 : 0];
      const bool more = sl + 1 < slices;
      const int64_t all = pairs * blocks * (v.slice / 32);
      int64_t done = 0, asked = 0;
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t g = 0; g < pairs; g += v.group) {
          const int64_t at = (sl * v.slice + part * v.part) * 32,
                        of_part = int64_t(v.part) * 32 / 64;  // lines of a panel
          int64_t ask = 0;
          const uint8_t* after = g + v.group < pairs        ? w + 2 * (g + v.group) * panel + at
                                 : part + 1 < parts || more ? w + at + v.part * 32
                                                            : nullptr;
          for (int64_t b = 0; b < blocks; ++b) {
            const uint8_t* a0 = here + 2 * b * steps_of_slice * 1024 + part * steps * 1024;
            const uint8_t* a1 = a0 + steps_of_slice * 1024;
            for (int64_t p = g; p < g + v.group; ++p) {
              const uint8_t* b0 = v.weights == kHot ? hot + (p % 2) * 2 * v.part * 32 : w + 2 * p * panel + at;
              const uint8_t* b1 = v.weights == kHot ? b0 + v.part * 32 : b0 + panel;
              float *y0 = y + b * 32 * y_stride + p * 32, *y1 = y0 + 16 * y_stride;
              if (v.sums && (sl || part)) {
                _tile_loadd(0, y0, 4 * y_stride);
                _tile_loadd(1, y0 + 16, 4 * y_stride);
                _tile_loadd(2, y1, 4 * y_stride);
                _tile_loadd(3, y1 + 16, 4 * y_stride);
              } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
              }
              for (int64_t i = 0; i < steps; ++i) {
                multiply_step(v.order, a0 + i * 1024, a1 + i * 1024, b0 + i * 1024, b1 + i * 1024, i == 0,
                              i + 1 < steps);
                ++done;
                if (v.weights >= kAsk && after) {
                  const int64_t total = 2 * v.group * of_part, turn = (b * v.group + p - g) * steps + i + 1;
                  for (const int64_t until = total * turn / (blocks * v.group * steps); ask < until; ++ask) {
                    const char* q = reinterpret_cast<const char*>(after + ask / of_part * panel + ask % of_part * 64);
                    v.weights == kAsk ? _mm_prefetch(q, _MM_HINT_T1) : _mm_prefetch(q, _MM_HINT_T0);
                  }
                }
                if (!more) continue;
                const int64_t until = lines * done / all;
                if (v.feed == kGatherAsk || v.feed == kGatherAsk0)
                  for (; asked < until; ++asked) {
                    const char* q = reinterpret_cast<const char*>(x[asked / steps_of_slice] + offset + v.slice * 2 +
                                                                  asked % steps_of_slice * 64);
                    v.feed == kGatherAsk ? _mm_prefetch(q, _MM_HINT_T1) : _mm_prefetch(q, _MM_HINT_T0);
                  }
                else if (v.feed == kArrangedAsk || v.feed == kArrangedHalf)
                  for (; asked < until; ++asked)
                    if (v.feed == kArrangedAsk || asked % 2 == 0)
                      _mm_prefetch(reinterpret_cast<const char*>(tiles + (sl + 1) * slice_bytes + asked * 64),
                                   _MM_HINT_T1);
              }
              if (v.sums) {
                _tile_stored(0, y0, 4 * y_stride);
                _tile_stored(1, y0 + 16, 4 * y_stride);
                _tile_stored(2, y1, 4 * y_stride);
                _tile_stored(3, y1 + 16, 4 * y_stride);
              }
              if (copies && more) {  // a burst: its loads are all on their way together, beside the next block's tiles
                const int64_t until = lines * done / all;
                copy(v, offset + v.slice * 2, asked, until, buffers[(sl + 1) % 2],
                     v.feed == kCopyAsk ? until - asked : 0);
                asked = until;
              }
            }
          }
        }
    }
  }
};

// Tiles from L1 (4 steps), or nothing but registers; TFLOPS of a worker.
static double peak(bool loads, Order order, const uint8_t* l1, double seconds) {
  double n = 0;
  const auto start = Clock::now();
  do {
    for (int i = 0; i < 500; ++i)
      for (int s = 0; s < 4; ++s) {
        const uint8_t* a = l1 + s * 1024;
        if (loads) {
          multiply_step(order, a, a + 4096, a + 8192, a + 12288, s == 0, s < 3);
        } else {
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
    n += 2000.0 * 4 * 16384;
  } while (seconds_since(start) < seconds);
  return n / seconds_since(start) / 1e12;
}

template <class F>
static std::vector<double> on_all(int workers, int step, F f) {
  std::atomic<int> ready{0};
  std::vector<double> results(workers);
  std::vector<std::thread> all;
  for (int t = 0; t < workers; ++t)
    all.emplace_back([&, t] {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(t * step, &set);
      pthread_setaffinity_np(pthread_self(), sizeof set, &set);
      TileConfig config;
      (void)config;
      _tile_loadconfig(&config);
      results[t] = f(t, [&] {
        ++ready;
        while (ready < workers) _mm_pause();
      });
      _tile_release();
    });
  for (auto& t : all) t.join();
  return results;
}
static double sum(const std::vector<double>& v) {
  double s = 0;
  for (double x : v) s += x;
  return s;
}

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? atof(argv[1]) : 0.2;
  const int rounds = argc > 2 ? atoi(argv[2]) : 11;
  const int cpus = argc > 3 ? atoi(argv[3]) : int(sysconf(_SC_NPROCESSORS_ONLN));
  const char* only = argc > 4 ? argv[4] : nullptr;
  syscall(SYS_arch_prctl, 0x1023, 18);  // permission for tiles
  if (!only)
    if (system("for i in 0 1 2 8; do echo cpu$i siblings $(cat "
               "/sys/devices/system/cpu/cpu$i/topology/thread_siblings_list) L2 "
               "$(cat /sys/devices/system/cpu/cpu$i/cache/index2/shared_cpu_list) $(cat "
               "/sys/devices/system/cpu/cpu$i/cache/index2/size); done; "
               "lscpu | grep -iE 'model name|thread|L1d|L2|L3|MHz'"))
      return 1;
  Shared s{big(kTokens * K * 2), big(kArrangedBytes), big(kWeightBytes)};
  on_all(cpus, 1, [&](int t, auto) {
    uint64_t state = t + 1;
    const auto fill = [&](uint8_t* p, int64_t bytes) {
      for (int64_t i = bytes * t / cpus / 8 * 8; i < bytes * (t + 1) / cpus / 8 * 8; i += 8) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint64_t v = 0x3f803f803f803f80u | (state >> 7 & 0x807f807f807f807fu);
        memcpy(p + i, &v, 8);
      }
    };
    fill(s.x, kTokens * K * 2), fill(s.arranged, kArrangedBytes), fill(s.weights, kWeightBytes);
    return 0.0;
  });
  std::vector<uint8_t*> rows, hot;
  std::vector<float*> ys;
  for (int t = 0; t < cpus; ++t) {
    rows.push_back(big(4 << 20)), hot.push_back(big(1 << 20)),
        ys.push_back(reinterpret_cast<float*>(big(1024 * kStride * 4)));
    memcpy(rows[t], s.weights, 4 << 20), memcpy(hot[t], s.weights, 1 << 20), memset(ys[t], 0, 1024 * kStride * 4);
  }
  if (!only) {
    const auto read = on_all(cpus, 1, [&](int t, auto go) {  // 4 MiB at a time: from L3 and memory
      go();
      double n = 0;
      const auto start = Clock::now();
      __m512i v = _mm512_setzero_si512();
      for (int64_t at = (int64_t(t) << 25) % (kWeightBytes - (64 << 20)); seconds_since(start) < 0.2;) {
        for (int64_t i = 0; i < (4 << 20); i += 64) {
          _mm_prefetch(reinterpret_cast<const char*>(s.weights + at + i + 4096), _MM_HINT_T0);
          v = _mm512_xor_si512(v, _mm512_load_si512(s.weights + at + i));
        }
        n += 4 << 20, at = (at + (4 << 20)) % (kWeightBytes - (64 << 20));
      }
      if (_mm512_reduce_add_epi64(v) == 77) printf(" ");
      return n / seconds_since(start) / 1e9;
    });
    printf("read, %d workers: %.1f GB/s\n", cpus, sum(read));
  }
  const int n = cpus, h = cpus / 2;
  const Variant variants[] = {
      // rows, columns, slice, part, group
      {"peak, registers", 0, 0, 0, 0, 0, kResident, kHot, false, n, 1},
      {"peak, tiles from L1", 0, 0, 0, 0, 1, kResident, kHot, false, n, 1, kUse},
      {"peak, tiles from L1, first", 0, 0, 0, 0, 1, kResident, kHot, false, n, 1, kFirst},
      {"peak, tiles from L1, early", 0, 0, 0, 0, 1, kResident, kHot, false, n, 1, kEarly},
      {"L2, no sums", 512, 512, 256, 256, 1, kResident, kHot, false, n, 1},
      {"L2", 512, 512, 256, 256, 1, kResident, kHot, true, n, 1},
      {"L2, early", 512, 512, 256, 256, 1, kResident, kHot, true, n, 1, kEarly},
      {"L2, first", 512, 512, 256, 256, 1, kResident, kHot, true, n, 1, kFirst},
      {"L2", 256, 512, 512, 512, 1, kResident, kHot, true, n, 1},
      {"L2", 256, 512, 512, 256, 1, kResident, kHot, true, n, 1},
      {"L2, early", 256, 512, 512, 256, 1, kResident, kHot, true, n, 1, kEarly},
      {"weights", 512, 512, 256, 256, 1, kResident, kPlain, true, n, 1},
      {"weights asked", 512, 512, 256, 256, 1, kResident, kAsk, true, n, 1},
      {"gather (as is)", 512, 512, 256, 256, 1, kGather, kAsk, true, n, 1},
      {"gather, early", 512, 512, 256, 256, 1, kGather, kAsk, true, n, 1, kEarly},
      {"gather, weights plain", 512, 512, 256, 256, 1, kGather, kPlain, true, n, 1},
      {"gather", 256, 512, 512, 256, 1, kGather, kAsk, true, n, 1},
      {"gather", 256, 512, 512, 512, 1, kGather, kAsk, true, n, 1},
      {"gather, next asked", 512, 512, 256, 256, 1, kGatherAsk, kAsk, true, n, 1},
      {"copy, asked", 512, 512, 256, 256, 1, kCopyAsk, kAsk, true, n, 1},
      {"copy, asked", 256, 512, 256, 256, 1, kCopyAsk, kAsk, true, n, 1},
      {"arranged, asked", 512, 512, 256, 256, 1, kArrangedAsk, kAsk, true, n, 1},
      {"arranged, asked, early", 512, 512, 256, 256, 1, kArrangedAsk, kAsk, true, n, 1, kEarly},
      {"arranged, asked half", 512, 512, 256, 256, 1, kArrangedHalf, kAsk, true, n, 1},
      {"arranged", 512, 512, 256, 256, 1, kArranged, kAsk, true, n, 1},
      {"gather, half the workers", 512, 512, 256, 256, 1, kGather, kAsk, true, h, 2},
      {"arranged, half the workers", 512, 512, 256, 256, 1, kArrangedAsk, kAsk, true, h, 2},
  };
  // Neighbours on the host change its speed by the second, so all variants take turns.
  constexpr int kVariants = sizeof variants / sizeof *variants;
  std::vector<std::vector<double>> rates(kVariants);
  double gathering[kVariants] = {};
  for (int round = 0; round < rounds; ++round)
    for (int i = 0; i < kVariants; ++i) {
      const Variant& v = variants[i];
      if (only && std::string(v.name).find(only) == std::string::npos) continue;
      rates[i].push_back(sum(on_all(v.workers, v.step, [&](int t, auto go) {
        if (!v.rows) {
          go();
          return peak(v.group, v.order, hot[t], seconds);
        }
        Core core{s, rows[t], hot[t], ys[t]};
        core.dice = uint32_t(t * 7919 + 77 + round);
        go();
        const auto start = Clock::now();
        double tasks = 0;
        do {
          core.task(v);
          ++tasks;
        } while (seconds_since(start) < seconds);
        const double took = seconds_since(start);
        if (t == 0) gathering[i] += core.gathering / took / rounds;
        return tasks * 2 * v.rows * v.columns * K / took / 1e12;
      })));
    }
  printf("%-28s rows cols slice part group workers TFLOPS: median, best; gathering's share\n", "");
  for (int i = 0; i < kVariants; ++i) {
    if (rates[i].empty()) continue;
    const Variant& v = variants[i];
    std::sort(rates[i].begin(), rates[i].end());
    printf("%-28s %4d %4d %5d %4d %5d %4d/%d %7.2f %6.2f  %4.2f\n", v.name, v.rows, v.columns, v.slice, v.part, v.group,
           v.workers, v.step, rates[i][rates[i].size() / 2], rates[i].back(), gathering[i]);
  }
}
