#include "runtime/checksum.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "isa/inline.h"
#include "runtime/files/readable_file.h"
#include "runtime/tiers.h"

namespace tandem {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;
constexpr int64_t kStripe = 32;
constexpr int64_t kReadBytes = int64_t{256} << 10;  // of a file at a time: half of a core's cache, or less

uint64_t turned(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

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

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;

// XXH3's default secret.
alignas(64) constexpr uint8_t kSecret[kXxh3SecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

void mix_stripe(uint64_t* sums, const uint8_t* data, const uint8_t* secret) {
  for (int i = 0; i < 8; ++i) {
    const uint64_t word = word64(data + 8 * i), keyed = word ^ word64(secret + 8 * i);
    sums[i ^ 1] += word;
    sums[i] += (keyed & 0xffffffff) * (keyed >> 32);
  }
}

uint64_t folded(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

}  // namespace

uint64_t xxh3(const uint8_t* p, int64_t bytes, const DenseKernels& kernels, Arrival arrive) {
  if (bytes < kXxh3Least) throw std::invalid_argument("xxh3 is there for more than 240 bytes only");
  uint64_t sums[8] = {kPrime32_3, kPrime1, kPrime2, kPrime3, kPrime4, kPrime32_2, kPrime5, kPrime32_1};
  const int64_t blocks = (bytes - 1) / kXxh3BlockBytes, rest = blocks * kXxh3BlockBytes;
  for (int64_t summed = 0, here = 0; here < bytes;) {
    here = arrive(here);
    const int64_t whole = std::min(here / kXxh3BlockBytes, blocks);
    kernels.xxh3_blocks(sums, p + summed * kXxh3BlockBytes, whole - summed, kSecret);
    summed = whole;
  }
  for (int64_t i = 0; i < (bytes - 1 - rest) / kXxh3StripeBytes; ++i)
    mix_stripe(sums, p + rest + i * kXxh3StripeBytes, kSecret + i * kXxh3SecretStep);
  constexpr int64_t kLast = kXxh3SecretBytes - kXxh3StripeBytes - 7, kMerge = 11;  // where in the secret
  mix_stripe(sums, p + bytes - kXxh3StripeBytes, kSecret + kLast);
  uint64_t sum = uint64_t(bytes) * kPrime1;
  for (int i = 0; i < 8; i += 2)
    sum += folded(sums[i] ^ word64(kSecret + kMerge + 8 * i), sums[i + 1] ^ word64(kSecret + kMerge + 8 * i + 8));
  sum = (sum ^ sum >> 37) * 0x165667919E3779F9;
  return sum ^ sum >> 32;
}

uint64_t xxh3(const uint8_t* p, int64_t bytes, const DenseKernels& kernels) {
  return xxh3(p, bytes, kernels, [&](int64_t) { return bytes; });
}

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

namespace {

uint64_t sum_of(const uint8_t* p, int64_t bytes) {
  return bytes < kXxh3Least ? xxh64(p, bytes) : xxh3(p, bytes, widest_kernels());
}

// Read a part at a time into this thread's buffer, and summed while the part is in the cache. In place where no file is
// known that has these bytes.
uint64_t sum_of_block(const uint8_t* from, int64_t bytes) {
  static thread_local std::vector<uint8_t> buffer;
  if (int64_t(buffer.size()) < bytes) buffer.resize(size_t(bytes));
  const int64_t first = std::min(kReadBytes, bytes);
  if (!ReadableFile::read(from, first, buffer.data())) return sum_of(from, bytes);
  if (bytes < kXxh3Least) return sum_of(buffer.data(), bytes);
  return xxh3(buffer.data(), bytes, widest_kernels(), [&](int64_t done) {
    const int64_t part = done ? std::min(kReadBytes, bytes - done) : first;
    if (done && !ReadableFile::read(from + done, part, buffer.data() + done))
      std::memcpy(buffer.data() + done, from + done, size_t(part));
    return done + part;
  });
}

}  // namespace

std::vector<uint64_t> block_checksums(WorkerPool& pool, const std::vector<ByteRange>& ranges, int64_t block_bytes,
                                      bool in_place) {
  std::vector<ByteRange> blocks;
  for (const ByteRange& range : ranges)
    for (int64_t at = 0; at < range.bytes; at += block_bytes)
      blocks.push_back({range.data + at, std::min(block_bytes, range.bytes - at)});
  std::vector<uint64_t> sums(blocks.size());
  pool.for_each(int64_t(blocks.size()), [&](int64_t i, const Worker&) {
    const auto [data, bytes] = blocks[size_t(i)];
    sums[size_t(i)] = in_place ? sum_of(data, bytes) : sum_of_block(data, bytes);
  });
  return sums;
}

}  // namespace tandem
