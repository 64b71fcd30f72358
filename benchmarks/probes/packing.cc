// Ways of packing bf16 rows into new memory, all threads at once: 16 rows of 4 KiB are read out of a file into a buffer
// that stays in the cache, and their pairs of k become lines of 16 rows. Prints GB/s and the processor time of a GB.
//   g++ -O3 -std=c++20 -msse4.1 -pthread packing.cc -o packing && ./packing /dev/shm 16 12
#include <emmintrin.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

constexpr int64_t kHuge = 2 << 20, kRow = 4096, kPanel = 16 * kRow, kFile = int64_t{1} << 30;
static int threads = 16;
static int64_t gib = 12;
static std::vector<int> files;

static double seconds_of(const timeval& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); }

static void measure(const char* what, const std::function<void(int64_t, uint8_t*, uint8_t*)>& body, uint8_t* memory) {
  std::atomic<int64_t> next{0};
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t)
    all.emplace_back([&] {
      std::vector<uint8_t> own(size_t(kPanel) + 64);
      for (int64_t at; (at = next.fetch_add(kHuge)) < gib << 30;) {
        *(volatile uint8_t*)(memory + at) = 0;
        for (int64_t p = at; p < at + kHuge; p += kPanel) {
          if (pread(files[size_t(p / kFile)], own.data(), kPanel, p % kFile) != kPanel) std::abort();
          body(p, own.data(), memory + p);
        }
      }
      _mm_sfence();
    });
  for (auto& t : all) t.join();
  const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  getrusage(RUSAGE_SELF, &after);
  const double gb = double(gib << 30) / 1e9;
  std::printf("%-52s %6.1f GB/s  %6.1f ms system %6.1f ms user per GB\n", what, gb / s,
              1e3 * (seconds_of(after.ru_stime) - seconds_of(before.ru_stime)) / gb,
              1e3 * (seconds_of(after.ru_utime) - seconds_of(before.ru_utime)) / gb);
  std::fflush(stdout);
}

struct Ordinary {
  static void put(uint8_t* to, __m128i v) { _mm_store_si128((__m128i*)to, v); }
};
struct Streamed {
  static void put(uint8_t* to, __m128i v) { _mm_stream_si128((__m128i*)to, v); }
};

// Four rows x four pairs, transposed.
template <class Store>
static void transpose4(const uint8_t* rows, uint8_t* out) {
  const auto at = [&](int r) { return _mm_loadu_si128((const __m128i*)(rows + r * kRow)); };
  const __m128i a = at(0), b = at(1), c = at(2), d = at(3);
  const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
  const __m128i ab2 = _mm_unpackhi_epi32(a, b), cd2 = _mm_unpackhi_epi32(c, d);
  Store::put(out, _mm_unpacklo_epi64(ab, cd));
  Store::put(out + 64, _mm_unpackhi_epi64(ab, cd));
  Store::put(out + 128, _mm_unpacklo_epi64(ab2, cd2));
  Store::put(out + 192, _mm_unpackhi_epi64(ab2, cd2));
}

// Four lines of output at a time: all 16 rows for 16 bytes of k.
template <class Store>
static void by_output(const uint8_t* rows, uint8_t* out) {
  for (int64_t i = 0; i < kRow / 16; ++i)
    for (int64_t r = 0; r < 16; r += 4) transpose4<Store>(rows + r * kRow + i * 16, out + i * 256 + r * 4);
}

// Four lines of input at a time: four rows for 64 bytes of k. Rows 4 KiB apart share a set of the cache.
template <class Store>
static void by_input(const uint8_t* rows, uint8_t* out) {
  for (int64_t i = 0; i < kRow / 16; i += 4)
    for (int64_t r = 0; r < 16; r += 4)
      for (int64_t j = i; j < i + 4; ++j) transpose4<Store>(rows + r * kRow + j * 16, out + j * 256 + r * 4);
}

// By input into 1 KiB that stays in the cache, then whole lines are streamed.
static void in_two_steps(const uint8_t* rows, uint8_t* out) {
  alignas(64) uint8_t lines[1024];
  for (int64_t i = 0; i < kRow / 16; i += 4) {
    for (int64_t r = 0; r < 16; r += 4)
      for (int64_t j = 0; j < 4; ++j) transpose4<Ordinary>(rows + r * kRow + (i + j) * 16, lines + j * 256 + r * 4);
    for (int64_t k = 0; k < 1024; k += 16)
      Streamed::put(out + i * 256 + k, _mm_load_si128((const __m128i*)(lines + k)));
  }
}

static uint8_t* anonymous() {
  void* p = mmap(nullptr, size_t(gib << 30) + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* d = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + kHuge - 1) & ~uintptr_t(kHuge - 1));
  madvise(d, size_t(gib << 30), MADV_HUGEPAGE);
  return d;
}

int main(int argc, char** argv) {
  const std::string directory = argc > 1 ? argv[1] : "/dev/shm";
  if (argc > 2) threads = std::atoi(argv[2]);
  if (argc > 3) gib = std::atoi(argv[3]);
  std::vector<uint8_t> noise(4 << 20, 3);
  for (int64_t i = 0; i < gib; ++i) {
    const std::string name = directory + "/packing-" + std::to_string(i);
    files.push_back(open(name.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600));
    unlink(name.c_str());
  }
  std::atomic<int64_t> next{0};
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t)
    all.emplace_back([&] {
      for (int64_t f; (f = next.fetch_add(1)) < gib;)
        for (int64_t at = 0; at < kFile; at += int64_t(noise.size()))
          if (pwrite(files[size_t(f)], noise.data(), noise.size(), at) < 0) std::abort();
    });
  for (auto& t : all) t.join();
  const auto run = [&](const char* what, auto body) {
    uint8_t* memory = anonymous();
    measure(what, [&](int64_t, uint8_t* from, uint8_t* to) { body(from, to); }, memory);
    munmap(memory, size_t(gib << 30));
  };
  run("(first use of this memory)", by_output<Ordinary>);
  for (int i = 0; i < 2; ++i) {
    run("read only, page faults", [](const uint8_t*, uint8_t*) {});
    run("copied", [](const uint8_t* from, uint8_t* to) { std::memcpy(to, from, kPanel); });
    run("by output lines", by_output<Ordinary>);
    run("by output lines, streamed", by_output<Streamed>);
    run("by input lines", by_input<Ordinary>);
    run("by input lines, streamed", by_input<Streamed>);
    run("by input lines to 1 KiB, then streamed", in_two_steps);
  }
}
