#include "runtime/checksum.h"

#include <algorithm>
#include <cstring>

namespace tandem {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;
constexpr int64_t kStripe = 32;

uint64_t turned(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

uint64_t word64(const uint8_t* p) {
  uint64_t w;
  std::memcpy(&w, p, sizeof w);
  return w;
}

uint64_t word32(const uint8_t* p) {
  uint32_t w;
  std::memcpy(&w, p, sizeof w);
  return w;
}

uint64_t round_of(uint64_t sum, uint64_t word) { return turned(sum + word * kPrime2, 31) * kPrime1; }

// All whole stripes; moves `p` past them.
uint64_t stripes(const uint8_t*& p, int64_t count) {
  uint64_t a = kPrime1 + kPrime2, b = kPrime2, c = 0, d = uint64_t{0} - kPrime1;
  for (; count > 0; --count, p += kStripe) {
    a = round_of(a, word64(p));
    b = round_of(b, word64(p + 8));
    c = round_of(c, word64(p + 16));
    d = round_of(d, word64(p + 24));
  }
  uint64_t sum = turned(a, 1) + turned(b, 7) + turned(c, 12) + turned(d, 18);
  for (const uint64_t lane : {a, b, c, d}) sum = (sum ^ round_of(0, lane)) * kPrime1 + kPrime4;
  return sum;
}

}  // namespace

uint64_t xxh64(const uint8_t* p, int64_t bytes) {
  const uint8_t* const end = p + bytes;
  uint64_t sum = (bytes >= kStripe ? stripes(p, bytes / kStripe) : kPrime5) + uint64_t(bytes);
  for (; end - p >= 8; p += 8) sum = turned(sum ^ round_of(0, word64(p)), 27) * kPrime1 + kPrime4;
  for (; end - p >= 4; p += 4) sum = turned(sum ^ word32(p) * kPrime1, 23) * kPrime2 + kPrime3;
  for (; p < end; ++p) sum = turned(sum ^ *p * kPrime5, 11) * kPrime1;
  sum = (sum ^ sum >> 33) * kPrime2;
  sum = (sum ^ sum >> 29) * kPrime3;
  return sum ^ sum >> 32;
}

std::vector<uint64_t> block_checksums(WorkerPool& pool, const uint8_t* data, int64_t bytes, int64_t block_bytes) {
  std::vector<uint64_t> sums(size_t((bytes + block_bytes - 1) / block_bytes));
  pool.for_each(int64_t(sums.size()), [&](int64_t i, const Worker&) {
    const int64_t first = i * block_bytes;
    sums[size_t(i)] = xxh64(data + first, std::min(block_bytes, bytes - first));
  });
  return sums;
}

}  // namespace tandem
