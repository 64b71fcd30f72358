// What matrix tiles take by where their operands lie: ns for a line (tile loads alone, vector loads alone) by the size
// of what is read again and again, and for a step of 2 x 2 tiles and 32 k by the sizes of rows and weights and by how
// often sums are loaded and stored. One thread, then all at once, medians over threads and turns; and the least and the
// most.
//   g++ -O2 -std=c++20 -march=sapphirerapids -pthread tile_operands.cc -o tile_operands && ./tile_operands 16 0.02 3
#include <immintrin.h>
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
#include <functional>
#include <string>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;
constexpr int64_t K = 1024, kHugePage = int64_t{2} << 20, kBytes = int64_t{64} << 20, kCalls = 64;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// bf16 in +-[1, 2): with zeros tiles multiply at a clock that real data does not allow.
static uint8_t* numbers(int64_t bytes) {
  void* p = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* data = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(p) + kHugePage - 1) & ~(kHugePage - 1));
  madvise(data, bytes, MADV_HUGEPAGE);
  uint32_t state = 1;
  for (int64_t i = 0; i < bytes / 2; ++i) {
    state = state * 1664525u + 1013904223u;
    data[i] = uint16_t(0x3f80 | (state >> 16 & 0x807f));
  }
  return reinterpret_cast<uint8_t*>(data);
}

struct Memory {
  uint8_t *rows, *weights, *sums;
  int64_t at_row = 0, at_weight = 0, at_sum = 0;  // where each goes on
};
static void step_on(int64_t& at, int64_t bytes, int64_t size) { at = at + bytes >= size ? 0 : at + bytes; }
static void fence() { __asm__ volatile("" ::: "memory"); }

// Each returns the steps or lines that it did.
static int64_t tile_lines(Memory& m, int64_t size) {
  fence();
  for (int64_t i = 0; i < 16 * kCalls; ++i, step_on(m.at_row, 2048, size)) {
    _tile_loadd(4, m.rows + m.at_row, 64);
    _tile_zero(4);
    _tile_loadd(5, m.rows + m.at_row + 1024, 64);
    _tile_zero(5);
  }
  fence();
  return 16 * kCalls * 32;
}
static int64_t vector_lines(Memory& m, int64_t size) {
  for (int64_t i = 0; i < 16 * kCalls; ++i, step_on(m.at_row, 2048, size))
    for (int64_t line = 0; line < 32; ++line) {
      const __m512i v = _mm512_load_si512(m.rows + m.at_row + 64 * line);
      __asm__ volatile("" : : "v"(v));
    }
  return 16 * kCalls * 32;
}

struct Product {
  int64_t rows, weights;         // bytes
  bool asks = false;             // for the next step's weights
  int64_t block = 32, sums = 0;  // steps between loading and storing sums of so many bytes; 0: never
};
static void ask(const uint8_t* lines) {
  for (int i = 0; i < 32; ++i) _mm_prefetch(reinterpret_cast<const char*>(lines + 64 * i), _MM_HINT_T0);
}
static void load_sums(const float* y) {
  _tile_loadd(0, y, 128);
  _tile_loadd(1, y + 16, 128);
  _tile_loadd(2, y + 512, 128);
  _tile_loadd(3, y + 528, 128);
}
static void store_sums(float* y) {
  _tile_stored(0, y, 128);
  _tile_stored(1, y + 16, 128);
  _tile_stored(2, y + 512, 128);
  _tile_stored(3, y + 528, 128);
}
static void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
static int64_t products(Memory& m, const Product& p) {
  fence();
  clear_sums();
  for (int64_t call = 0; call < kCalls; ++call) {
    float* const y = reinterpret_cast<float*>(m.sums + m.at_sum);
    if (p.sums) load_sums(y);
    for (int64_t s = 0; s < p.block; ++s) {
      const uint8_t *a = m.rows + m.at_row, *b = m.weights + m.at_weight;
      step_on(m.at_row, 2048, p.rows);
      step_on(m.at_weight, 2048, p.weights);
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 1024, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_zero(4);
      _tile_loadd(5, a + 1024, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      _tile_zero(5);
      _tile_zero(6);
      _tile_zero(7);
      if (p.asks) ask(m.weights + m.at_weight);
    }
    if (!p.sums) continue;
    store_sums(y);
    step_on(m.at_sum, 4096, p.sums);
    clear_sums();
  }
  fence();
  return kCalls * p.block;
}

struct Case {
  std::string name;
  std::function<int64_t(Memory&)> run;
};
static std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int64_t size : {16, 64, 512, 1024, 1536, 2048, 4096, 16384, 65536}) {
    const std::string of = " of " + std::to_string(size) + " KiB, a line";
    all.push_back({"vectors" + of, [=](Memory& m) { return vector_lines(m, size * K); }});
    all.push_back({"tiles" + of, [=](Memory& m) { return tile_lines(m, size * K); }});
  }
  const auto add = [&](const Product& p) {
    std::string name = "rows " + std::to_string(p.rows / K) + " KiB, weights " + std::to_string(p.weights / K);
    if (p.asks) name += " asked for";
    if (p.sums) name += ", sums " + std::to_string(p.sums / K) + " every " + std::to_string(p.block);
    all.push_back({name + ", a step", [=](Memory& m) { return products(m, p); }});
  };
  for (const int64_t rows : {8, 128, 512, 1024, 1536})
    for (const int64_t weights : {8, 16, 32, 64}) add({rows * K, weights * K, weights == 64});
  for (const int64_t block : {4, 8, 16, 32})
    for (const int64_t sums : {4, 256, 1024}) add({8 * K, 8 * K, false, block, sums * K});
  return all;
}

// ns of every thread, sorted.
static std::vector<double> measure(const Case& c, std::vector<Memory>& memory, size_t threads, double seconds) {
  std::vector<double> ns(threads);
  std::atomic<size_t> ready{0};
  std::atomic<bool> go{false}, stop{false};
  std::vector<std::thread> workers;
  for (size_t t = 0; t < threads; ++t)
    workers.emplace_back([&, t] {
      cpu_set_t cpus;
      CPU_ZERO(&cpus);
      CPU_SET(t, &cpus);
      pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
      static const TileConfig config;
      _tile_loadconfig(&config);
      for (int i = 0; i < 40; ++i) c.run(memory[t]);
      for (++ready; !go;) continue;
      const auto start = Clock::now();
      int64_t done = 0;
      while (!stop.load(std::memory_order_relaxed)) done += c.run(memory[t]);
      ns[t] = std::chrono::duration<double, std::nano>(Clock::now() - start).count() / double(done);
      _tile_release();
    });
  while (ready < threads) usleep(50);
  go = true;
  usleep(useconds_t(seconds * 1e6));
  stop = true;
  for (auto& worker : workers) worker.join();
  std::sort(ns.begin(), ns.end());
  return ns;
}

int main(int argc, char** argv) {
  if (argc < 4) return std::fprintf(stderr, "THREADS SECONDS TURNS\n"), 1;
  const size_t threads = size_t(std::atoi(argv[1])), turns = size_t(std::atoi(argv[3]));
  const double seconds = std::atof(argv[2]);
  syscall(SYS_arch_prctl, 0x1023, 18);  // tiles
  std::vector<Memory> memory;
  for (size_t t = 0; t < threads; ++t) memory.push_back({numbers(kBytes), numbers(K * K), numbers(2 * K * K)});
  for (const Case& c : cases()) {
    std::vector<double> one, all;
    for (size_t turn = 0; turn < turns; ++turn) {
      one.push_back(measure(c, memory, 1, seconds)[0]);
      const std::vector<double> ns = measure(c, memory, threads, seconds);
      all.insert(all.end(), ns.begin(), ns.end());
    }
    std::sort(one.begin(), one.end());
    std::sort(all.begin(), all.end());
    std::printf("%-52s one thread %6.2f ns, all %6.2f (%.2f to %.2f)\n", c.name.c_str(), one[one.size() / 2],
                all[all.size() / 2], all.front(), all.back());
    std::fflush(stdout);
  }
}
