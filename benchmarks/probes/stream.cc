// How fast one row times packed weights can stream from DRAM, all cores at once: static shares beside tasks of several
// sizes taken from a counter, one or two panels at a time, several prefetch distances. Prints GB/s.
//   g++ -O3 -std=c++20 -march=native -pthread stream.cc -o stream && ./stream 16 0.4
#include <immintrin.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;
static uint8_t* big(int64_t bytes) {
  void* p = mmap(nullptr, bytes + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* d = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + (2 << 20) - 1) & ~uintptr_t((2 << 20) - 1));
  madvise(d, bytes, MADV_HUGEPAGE);
  return d;
}

// `panels` streams of `bytes` each, one after the other in memory, side by side in time.
template <int P>
static float dot(const uint8_t* p, int64_t bytes, const uint32_t* x, int64_t ahead) {
  __m512 sum[P][2];
  for (auto& s : sum) s[0] = s[1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < bytes; i += 128)
    for (int q = 0; q < P; ++q)
      for (int h = 0; h < 2; ++h) {
        const uint8_t* line = p + q * bytes + i + 64 * h;
        if (ahead) _mm_prefetch(reinterpret_cast<const char*>(line + ahead), _MM_HINT_T0);
        sum[q][h] = _mm512_dpbf16_ps(sum[q][h], __m512bh(_mm512_loadu_si512(line)),
                                     __m512bh(_mm512_set1_epi32(int(x[(i / 64 + h) & 3583]))));
      }
  float all = 0;
  for (auto& s : sum) all += _mm512_reduce_add_ps(_mm512_add_ps(s[0], s[1]));
  return all;
}

int main(int argc, char** argv) {
  const int threads = argc > 1 ? atoi(argv[1]) : 16;
  const double seconds = argc > 2 ? atof(argv[2]) : 0.4;
  const int64_t gib = argc > 3 ? atoi(argv[3]) : 3, bytes = gib << 30;
  uint8_t* data = big(bytes);
  std::vector<uint32_t> x(3584, 0x3f803f80);
  const auto on_all = [&](auto body) {
    std::vector<std::thread> all;
    for (int t = 0; t < threads; ++t)
      all.emplace_back([&, t] {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(t, &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);
        body(t);
      });
    for (auto& t : all) t.join();
  };
  on_all([&](int t) { memset(data + bytes / threads * t, 0x11 + t, bytes / threads); });
  volatile float sink = 0;
  const auto report = [&](const char* name, int64_t size, int panels, int64_t ahead, auto body) {
    std::vector<double> rates;
    for (int repeat = 0; repeat < 5; ++repeat) {
      std::atomic<int64_t> next{0}, done{0};
      std::atomic<int> ready{0};
      std::vector<double> took(threads);
      on_all([&](int t) {
        ++ready;
        while (ready < threads) _mm_pause();
        const auto start = Clock::now();
        while ((took[t] = std::chrono::duration<double>(Clock::now() - start).count()) < seconds / 5)
          done += body(t, next);
      });
      rates.push_back(done / *std::max_element(took.begin(), took.end()) / 1e9);
    }
    std::sort(rates.begin(), rates.end());
    printf("%-22s task %7.0f KiB, %d panels, ahead %5ld: median %6.1f best %6.1f GB/s\n", name, size / 1024.0, panels,
           long(ahead), rates[2], rates[4]);
    fflush(stdout);
  };
  const int64_t share = bytes / threads / 4096 * 4096;
  std::vector<int64_t> at(threads * 16);
  for (int64_t ahead : {0, 1024, 4096, 8192})
    report("static shares", share, 1, ahead, [&](int t, std::atomic<int64_t>&) {
      const int64_t piece = 1 << 20;
      int64_t& here = at[t * 16];
      if (here + piece > share) here = 0;
      sink = sink + dot<1>(data + t * share + here, piece, x.data(), ahead);
      here += piece;
      return piece;
    });
  for (int64_t size : {131072, 458752, 2097152})
    for (int panels : {1, 2})
      for (int64_t ahead : {1024, 4096, 8192})
        report("tasks in order", size, panels, ahead, [&](int, std::atomic<int64_t>& next) {
          const int64_t i = next++ % (bytes / size);
          const uint8_t* p = data + i * size;
          sink = sink + (panels == 1 ? dot<1>(p, size, x.data(), ahead) : dot<2>(p, size / 2, x.data(), ahead));
          return size;
        });
  for (int panels : {1, 2})  // as gate-up of experts drawn at random: 58.7 MB each
    report("experts at random", 458752, panels, 8192, [&](int, std::atomic<int64_t>& next) {
      const int64_t i = next++, expert = (i / 128 * 2654435761u >> 7) % (bytes / 58720256);
      const uint8_t* p = data + expert * 58720256 + i % 128 * 458752;
      sink = sink + (panels == 1 ? dot<1>(p, 458752, x.data(), 8192) : dot<2>(p, 229376, x.data(), 8192));
      return int64_t{458752};
    });
  for (int64_t expert_bytes : {int64_t{58720256}, int64_t{29360128}, int64_t{6291456}})
    for (int64_t run : {int64_t{131072}, int64_t{458752}})
      for (int own : {0, 1}) {  // own: every worker has the same part of every expert, in order; else whoever is next
        std::vector<int64_t> mine(threads * 16);
        char name[64];
        snprintf(name, sizeof name, "%s %ld MB", own ? "own range of" : "next of", long(expert_bytes >> 20));
        report(name, run, 2, 8192, [&](int t, std::atomic<int64_t>& next) {
          const int64_t per = expert_bytes / run, each = per / threads;
          int64_t expert, task;
          if (own) {
            const int64_t i = mine[t * 16]++;
            expert = i / each, task = t * each + i % each;
          } else {
            const int64_t i = next++;
            expert = i / per, task = i % per;
          }
          expert = (expert * 2654435761u >> 7) % (bytes / expert_bytes);
          sink = sink + dot<2>(data + expert * expert_bytes + task * run, run / 2, x.data(), 8192);
          return run;
        });
      }
}
