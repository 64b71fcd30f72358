// What loading is made of, phase by phase, all threads at once: reading files, new memory, mapping files, checksums.
// Prints GB/s and the processor time of a GB (system, user). Writes and removes `gib` GiB in `directory`.
//   g++ -O3 -std=c++20 -march=native -pthread loading.cc -o loading && ./loading /dev/shm 16 16
#include <fcntl.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

constexpr int64_t kFile = int64_t{1} << 30, kHuge = 2 << 20;
constexpr int kPopulateRead = 22, kPopulateWrite = 23;

static int threads = 16;
static int64_t gib = 16;
static std::vector<int> files;
static std::atomic<uint64_t> sink;

static double seconds_of(const timeval& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); }

// body(thread, offset) for every `step` bytes of gib GiB, by whoever is free.
static void measure(const char* what, int64_t step, const std::function<void(int, int64_t)>& body) {
  std::atomic<int64_t> next{0};
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t)
    all.emplace_back([&, t] {
      for (int64_t at; (at = next.fetch_add(step)) < gib << 30;) body(t, at);
    });
  for (auto& t : all) t.join();
  const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  getrusage(RUSAGE_SELF, &after);
  const double gb = double(gib << 30) / 1e9;
  std::printf("%-58s %7.1f GB/s   %6.1f ms system %6.1f ms user per GB\n", what, gb / s,
              1e3 * (seconds_of(after.ru_stime) - seconds_of(before.ru_stime)) / gb,
              1e3 * (seconds_of(after.ru_utime) - seconds_of(before.ru_utime)) / gb);
  std::fflush(stdout);
}

static uint8_t* anonymous() {
  void* p = mmap(nullptr, size_t(gib << 30) + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* d = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + kHuge - 1) & ~uintptr_t(kHuge - 1));
  madvise(d, size_t(gib << 30), MADV_HUGEPAGE);
  return d;
}

static uint8_t* mapped() {
  auto* all = static_cast<uint8_t*>(
      mmap(nullptr, size_t(gib << 30), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (int64_t i = 0; i < gib; ++i)
    mmap(all + i * kFile, kFile, PROT_READ, MAP_SHARED | MAP_FIXED, files[size_t(i)], 0);
  return all;
}

static void unmap(uint8_t* p) { munmap(p, size_t(gib << 30)); }

static void read_at(int64_t at, int64_t bytes, uint8_t* to) {
  if (pread(files[size_t(at / kFile)], to, size_t(bytes), at % kFile) != bytes) std::abort();
}

static uint64_t plain_sum(const uint8_t* p, int64_t bytes) {
  uint64_t s[8] = {};
  for (int64_t i = 0; i < bytes; i += 64)
    for (int j = 0; j < 8; ++j) s[j] ^= reinterpret_cast<const uint64_t*>(p + i)[j];
  return s[0] ^ s[1] ^ s[2] ^ s[3] ^ s[4] ^ s[5] ^ s[6] ^ s[7];
}

static uint64_t xxh64_sum(const uint8_t* p, int64_t bytes) {
  constexpr uint64_t p1 = 0x9E3779B185EBCA87, p2 = 0xC2B2AE3D27D4EB4F;
  uint64_t v[4] = {p1 + p2, p2, 0, 0 - p1};
  for (int64_t i = 0; i < bytes; i += 32)
    for (int j = 0; j < 4; ++j) {
      const uint64_t x = v[j] + reinterpret_cast<const uint64_t*>(p + i)[j] * p2;
      v[j] = (x << 31 | x >> 33) * p1;
    }
  return v[0] ^ v[1] ^ v[2] ^ v[3];
}

// The inner loop of XXH3 with what every x86-64 has.
static uint64_t sse2_sum(const uint8_t* p, int64_t bytes) {
  __m128i acc[4] = {}, key[4];
  for (int j = 0; j < 4; ++j) key[j] = _mm_set_epi64x(0x9E3779B185EBCA87 * (j + 1), 0xC2B2AE3D27D4EB4F * (j + 3));
  for (int64_t i = 0; i < bytes; i += 64)
    for (int j = 0; j < 4; ++j) {
      const __m128i data = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i + 16 * j));
      const __m128i keyed = _mm_xor_si128(data, key[j]);
      const __m128i product = _mm_mul_epu32(keyed, _mm_shuffle_epi32(keyed, 0x31));
      acc[j] = _mm_add_epi64(_mm_add_epi64(acc[j], _mm_shuffle_epi32(data, 0x4e)), product);
    }
  const __m128i all = _mm_add_epi64(_mm_add_epi64(acc[0], acc[1]), _mm_add_epi64(acc[2], acc[3]));
  return uint64_t(_mm_cvtsi128_si64(all));
}

static void reads() {
  std::vector<uint8_t*> own;
  for (int t = 0; t < threads; ++t) own.push_back(new uint8_t[4 << 20]());
  for (const int64_t kib : {4096, 4096, 2048, 256, 64}) {
    const std::string what = "pread into a buffer of each thread, " + std::to_string(kib) + " KiB";
    measure(what.c_str(), kib << 10, [&](int t, int64_t at) { read_at(at, kib << 10, own[size_t(t)]); });
  }
  measure("pread 256 KiB, xxh64 of them", 256 << 10, [&](int t, int64_t at) {
    read_at(at, 256 << 10, own[size_t(t)]);
    sink += xxh64_sum(own[size_t(t)], 256 << 10);
  });
  measure("pread 256 KiB, SSE2 sum of them", 256 << 10, [&](int t, int64_t at) {
    read_at(at, 256 << 10, own[size_t(t)]);
    sink += sse2_sum(own[size_t(t)], 256 << 10);
  });
}

static void new_memory() {
  for (const char* which : {"new memory, populated, first time", "new memory, populated, again"}) {
    uint8_t* memory = anonymous();
    measure(which, kHuge, [&](int, int64_t at) { madvise(memory + at, kHuge, kPopulateWrite); });
    measure("  the same memory, written again", kHuge, [&](int, int64_t at) { std::memset(memory + at, 1, kHuge); });
    unmap(memory);
  }
  for (int i = 0; i < 2; ++i) {
    uint8_t* memory = anonymous();
    measure("new memory, a byte of each huge page written", kHuge, [&](int, int64_t at) { memory[at] = 1; });
    unmap(memory);
  }
  uint8_t* memory = anonymous();
  measure("new memory, touched, pread 2 MiB into it", kHuge, [&](int, int64_t at) {
    madvise(memory + at, kHuge, kPopulateWrite);
    read_at(at, kHuge, memory + at);
  });
  measure("known memory, pread 2 MiB into it", kHuge, [&](int, int64_t at) { read_at(at, kHuge, memory + at); });
  unmap(memory);
  memory = anonymous();
  measure("new memory, a byte written, pread 2 MiB into it", kHuge, [&](int, int64_t at) {
    memory[at] = 1;
    read_at(at, kHuge, memory + at);
  });
  unmap(memory);
}

static void mappings() {
  const auto sum = [](const char* what, const uint8_t* p, auto f) {
    measure(what, kHuge, [&](int, int64_t at) { sink += f(p + at, kHuge); });
  };
  uint8_t* p = mapped();
  sum("mapping, touched by summing it", p, plain_sum);
  sum("  the same, mapped already: sum", p, plain_sum);
  sum("  the same: xxh64", p, xxh64_sum);
  sum("  the same: SSE2 sum", p, sse2_sum);
  unmap(p);
  for (const int64_t mib : {2, 16, 64}) {
    p = mapped();
    const std::string what = "mapping, MADV_POPULATE_READ of " + std::to_string(mib) + " MiB";
    measure(what.c_str(), mib << 20, [&](int, int64_t at) { madvise(p + at, size_t(mib << 20), kPopulateRead); });
    unmap(p);
  }
  p = mapped();
  measure("mapping, populate 2 MiB, then SSE2 sum of them", kHuge, [&](int, int64_t at) {
    madvise(p + at, kHuge, kPopulateRead);
    sink += sse2_sum(p + at, kHuge);
  });
  measure("  letting go of 64 MiB at a time", 64 << 20,
          [&](int, int64_t at) { madvise(p + at, 64 << 20, MADV_DONTNEED); });
  unmap(p);
}

int main(int argc, char** argv) {
  const std::string directory = argc > 1 ? argv[1] : "/dev/shm";
  if (argc > 2) threads = std::atoi(argv[2]);
  if (argc > 3) gib = std::atoi(argv[3]);
  for (int64_t i = 0; i < gib; ++i) {
    const std::string name = directory + "/probe-" + std::to_string(i);
    files.push_back(open(name.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600));
    if (files.back() < 0 || ftruncate(files.back(), kFile)) return std::perror(name.c_str()), 1;
    unlink(name.c_str());
  }
  std::vector<uint64_t> noise(size_t(4 << 20) / 8);
  for (uint64_t i = 0, x = 1; i < noise.size(); ++i) noise[i] = x = x * 6364136223846793005 + 1442695040888963407;
  measure("written, 4 MiB at a time", 4 << 20, [&](int, int64_t at) {
    if (pwrite(files[size_t(at / kFile)], noise.data(), 4 << 20, at % kFile) != 4 << 20) std::abort();
  });
  reads();
  new_memory();
  mappings();
  return int(sink & 0);
}
