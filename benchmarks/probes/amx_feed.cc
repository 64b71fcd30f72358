// Which way of feeding AMX tiles is fastest, all cores at once: rows of activations that lie anywhere, weights from
// DRAM. One task: 512 rows x COLUMNS of K = 7168. Prints TFLOPS per core of every variant.
//   g++ -O3 -std=c++20 -march=sapphirerapids -pthread amx_feed.cc -o amx_feed && ./amx_feed 16 0.5
#include <immintrin.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;
constexpr int64_t K = 7168, kRows = 512, kTokens = 4096, kWeightBytes = int64_t{1536} << 20;

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
enum Rows {
  kNone,
  kGather,
  kGatherAhead,
  kGatherCopyAhead,
  kArranged,
  kArrangedTouch,
  kArrangedTouchHalf,
  kArrangedCopy
};
enum Weights { wHot, wPlain, wFetch, wFetchHalf };
struct Variant {
  const char* name;
  Rows rows;
  Weights weights;
  int slice;    // k per slice
  int columns;  // of the task
  bool sums;    // load and store between slices
};
struct Shared {
  uint8_t *x, *arranged, *weights;
};

// Tile order: [slice-independent] row block of 16: K/32 tiles of 1 KiB, one after the other.
struct Core {
  Shared s;
  uint8_t *rows, *hot;  // gathered slice(s); a hot panel
  float* y;
  std::vector<const uint8_t*> x = std::vector<const uint8_t*>(kRows);
  uint32_t dice = 1;
  uint32_t next() { return dice = dice * 1664525u + 1013904223u; }

  void gather(int64_t offset, int steps, uint8_t* to) {
    for (int r = 0; r < kRows; ++r) {
      uint8_t* tile = to + r / 16 * int64_t(steps) * 1024 + r % 16 * 64;
      const uint8_t* n = r + 2 < kRows ? x[r + 2] + offset : nullptr;
      for (int i = 0; i < steps; ++i) {
        if (n) _mm_prefetch(reinterpret_cast<const char*>(n + i * 64), _MM_HINT_T0);
        _mm512_storeu_si512(tile + i * 1024, _mm512_loadu_si512(x[r] + offset + i * 64));
      }
    }
  }

  void task(const Variant& v) {
    for (int r = 0; r < kRows; ++r) x[r] = s.x + (next() >> 8) % kTokens * (K * 2);
    const uint8_t* arranged = s.arranged + (next() >> 8) % 64 * (kRows * K * 2);
    const uint8_t* w = s.weights + (next() >> 8) % (kWeightBytes / (4 << 20) - 8) * (4 << 20);
    const int steps = v.slice / 32, slices = K / v.slice, pairs = v.columns / 32;
    const int64_t panel = K * 32, slice_bytes = kRows * int64_t(v.slice) * 2;
    const bool arr = v.rows >= kArranged;
    uint8_t* buffers[2] = {rows, rows + slice_bytes};
    if (v.rows == kGatherCopyAhead || v.rows == kArrangedCopy) gather(0, steps, buffers[0]);
    for (int sl = 0; sl < slices; ++sl) {
      const int64_t offset = int64_t(sl) * v.slice * 2;
      if (v.rows == kGather || v.rows == kGatherAhead) gather(offset, steps, buffers[0]);
      uint8_t* here = buffers[v.rows == kGatherCopyAhead || v.rows == kArrangedCopy ? sl % 2 : 0];
      int64_t side = 0;  // lines of the next slice that were asked for
      const bool more = sl + 1 < slices;
      const int64_t lines = slice_bytes / 64, all_steps = int64_t(pairs) * (kRows / 32) * steps;
      int64_t done_steps = 0;
      for (int p = 0; p < pairs; ++p) {
        const uint8_t* b0 = v.weights == wHot ? hot : w + (2 * p) * panel + sl * int64_t(v.slice) * 32;
        const uint8_t* b1 = v.weights == wHot ? hot + v.slice * 32 : b0 + panel;
        const uint8_t *n0 = p + 1 < pairs ? b0 + 2 * panel : w + (sl + 1) * int64_t(v.slice) * 32, *n1 = n0 + panel;
        for (int b = 0; b < kRows / 32; ++b) {
          float *y0 = y + (b * 32) * 528 + p * 32, *y1 = y0 + 16 * 528;
          if (v.sums && sl) {
            _tile_loadd(0, y0, 528 * 4);
            _tile_loadd(1, y0 + 16, 528 * 4);
            _tile_loadd(2, y1, 528 * 4);
            _tile_loadd(3, y1 + 16, 528 * 4);
          } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
          }
          const uint8_t *a0, *a1;
          if (arr && v.rows != kArrangedCopy) {
            a0 = arranged + (2 * b) * (K / 32) * 1024 + int64_t(sl) * steps * 1024;
            a1 = a0 + K / 32 * 1024;
          } else {
            a0 = here + (2 * b) * steps * 1024;
            a1 = a0 + steps * 1024;
          }
          for (int i = 0; i < steps; ++i) {
            _tile_loadd(4, a0 + i * 1024, 64);
            _tile_loadd(6, b0 + i * 1024, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b1 + i * 1024, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a1 + i * 1024, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            if (v.weights == wFetch || v.weights == wFetchHalf) {
              // 2 * slice/2 lines of the next pair over kRows/32 * steps steps
              const int stride = v.weights == wFetch ? 1 : 2;
              const int64_t total = v.slice, at = int64_t(b) * steps + i, per = (kRows / 32) * steps;
              for (int64_t l = total * at / per; l < total * (at + 1) / per; ++l)
                if (l % stride == 0) {
                  const uint8_t* q = l < total / 2 ? n0 + l * 64 : n1 + (l - total / 2) * 64;
                  _mm_prefetch(reinterpret_cast<const char*>(q), _MM_HINT_T1);
                }
            }
            ++done_steps;
            if (!more) continue;
            const int64_t until = lines * done_steps / all_steps;
            if (v.rows == kGatherAhead) {
              for (; side < until; ++side) {
                const int64_t r = side / steps, c = side % steps;
                _mm_prefetch(reinterpret_cast<const char*>(x[r] + offset + v.slice * 2 + c * 64), _MM_HINT_T1);
              }
            } else if (v.rows == kGatherCopyAhead || v.rows == kArrangedCopy) {
              // fetched half a slice before it is copied
              for (; side < until; ++side) {
                const int64_t f = side + lines / 4;
                if (f < lines)
                  _mm_prefetch(reinterpret_cast<const char*>(x[f / steps] + offset + v.slice * 2 + f % steps * 64),
                               _MM_HINT_T1);
                const int64_t r = side / steps, c = side % steps;
                _mm512_storeu_si512(buffers[(sl + 1) % 2] + r / 16 * steps * 1024 + c * 1024 + r % 16 * 64,
                                    _mm512_loadu_si512(x[r] + offset + v.slice * 2 + c * 64));
              }
            } else if (v.rows == kArrangedTouch || v.rows == kArrangedTouchHalf) {
              const int stride = v.rows == kArrangedTouch ? 1 : 2;
              for (; side < until; ++side)
                if (side % stride == 0) {
                  const int64_t per_block = steps * 16, block = side / per_block, in = side % per_block;
                  _mm_prefetch(reinterpret_cast<const char*>(arranged + block * (K / 32) * 1024 +
                                                             (sl + 1) * steps * 1024 + in * 64),
                               _MM_HINT_T1);
                }
            }
          }
          if (v.sums) {
            _tile_stored(0, y0, 528 * 4);
            _tile_stored(1, y0 + 16, 528 * 4);
            _tile_stored(2, y1, 528 * 4);
            _tile_stored(3, y1 + 16, 528 * 4);
          }
        }
      }
    }
  }
};

int main(int argc, char** argv) {
  const int threads = argc > 1 ? atoi(argv[1]) : 16;
  const double seconds = argc > 2 ? atof(argv[2]) : 0.5;
  syscall(SYS_arch_prctl, 0x1023, 18);  // permission for tiles
  Shared s{big(kTokens * K * 2), big(int64_t{64} * kRows * K * 2), big(kWeightBytes)};
  {
    std::vector<std::thread> all;
    for (int t = 0; t < threads; ++t)
      all.emplace_back([&, t] {
        uint32_t state = t + 1;
        const auto fill = [&](uint8_t* p, int64_t bytes) {
          for (int64_t i = bytes * t / threads / 2 * 2; i < bytes * (t + 1) / threads / 2 * 2; i += 2) {
            state = state * 1664525u + 1013904223u;
            const uint16_t v = uint16_t(0x3f80 | (state >> 16 & 0x807f));
            memcpy(p + i, &v, 2);
          }
        };
        fill(s.x, kTokens * K * 2), fill(s.arranged, int64_t{64} * kRows * K * 2), fill(s.weights, kWeightBytes);
      });
    for (auto& t : all) t.join();
  }
  const Variant variants[] = {
      {"rows in L2, weights hot, no sums", kNone, wHot, 256, 512, false},
      {"rows in L2, weights hot", kNone, wHot, 256, 512, true},
      {"rows in L2, weights DRAM", kNone, wPlain, 256, 512, true},
      {"rows in L2, weights fetched", kNone, wFetch, 256, 512, true},
      {"rows in L2, weights fetched, half", kNone, wFetchHalf, 256, 512, true},
      {"gather, weights fetched (as is)", kGather, wFetch, 256, 512, true},
      {"gather, weights fetched half", kGather, wFetchHalf, 256, 512, true},
      {"gather 128", kGather, wFetch, 128, 512, true},
      {"gather 512", kGather, wFetch, 512, 512, true},
      {"gather, next slice fetched", kGatherAhead, wFetch, 256, 512, true},
      {"gather, next slice fetched, weights half", kGatherAhead, wFetchHalf, 256, 512, true},
      {"gather, next slice copied between", kGatherCopyAhead, wFetch, 256, 512, true},
      {"gather, next slice copied between, w half", kGatherCopyAhead, wFetchHalf, 256, 512, true},
      {"gather, next copied between, 128", kGatherCopyAhead, wFetchHalf, 128, 512, true},
      {"arranged", kArranged, wFetch, 256, 512, true},
      {"arranged, w half", kArranged, wFetchHalf, 256, 512, true},
      {"arranged, next touched", kArrangedTouch, wFetch, 256, 512, true},
      {"arranged, next touched half, w half", kArrangedTouchHalf, wFetchHalf, 256, 512, true},
      {"arranged, next touched, w plain", kArrangedTouch, wPlain, 256, 512, true},
      {"arranged, touched half, w half, 512", kArrangedTouchHalf, wFetchHalf, 512, 512, true},
      {"arranged, touched half, w half, 128", kArrangedTouchHalf, wFetchHalf, 128, 512, true},
      {"arranged, touched half, w half, 256 columns", kArrangedTouchHalf, wFetchHalf, 256, 256, true},
  };
  for (const Variant& v : variants) {
    std::atomic<int> ready{0};
    std::vector<double> rates(threads);
    std::vector<std::thread> all;
    for (int t = 0; t < threads; ++t)
      all.emplace_back([&, t] {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(t, &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);
        Core core{s, big(4 << 20), big(1 << 20), reinterpret_cast<float*>(big(kRows * 528 * 4))};
        core.dice = t + 77;
        memset(core.rows, 0x3f, 4 << 20), memset(core.hot, 0x3f, 1 << 20), memset(core.y, 0, kRows * 528 * 4);
        TileConfig config;
        _tile_loadconfig(&config);
        core.task(v);
        ++ready;
        while (ready < threads) _mm_pause();
        const auto start = Clock::now();
        double tasks = 0, took = 0;
        do {
          core.task(v);
          ++tasks;
          took = std::chrono::duration<double>(Clock::now() - start).count();
        } while (took < seconds);
        rates[t] = tasks * 2 * kRows * v.columns * K / took / 1e12;
        _tile_release();
        munmap(core.rows, 4 << 20);
      });
    for (auto& t : all) t.join();
    double sum = 0;
    for (double r : rates) sum += r;
    printf("%-45s %6.2f TFLOPS a core, %6.1f in all\n", v.name, sum / threads, sum);
    fflush(stdout);
  }
}
