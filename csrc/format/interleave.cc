#include "format/interleave.h"

#include <algorithm>
#include <cstring>

#include "isa/inline.h"

namespace tandem {
namespace {

typedef uint32_t Quad __attribute__((vector_size(16)));  // SSE2: what every x86-64 has
typedef uint16_t Eight __attribute__((vector_size(16)));
typedef uint64_t Pair __attribute__((vector_size(16)));

constexpr int64_t kLanes = 16;

template <class Vec>
Vec load(const uint8_t* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

Quad same(Quad q) { return q; }

// Of four codes' bytes [b3 b2 b1 b0], the low halves to 16 bits and the high halves to the 16 above.
Quad split_halves(Quad q) {
  Quad low = q & 0x0f0f0f0fu, high = (q >> 4) & 0x0f0f0f0fu;
  low = (low | low >> 4) & 0x00ff00ffu;
  high = (high | high >> 4) & 0x00ff00ffu;
  return ((low | low >> 8) & 0xffffu) | (high | high >> 8) << 16;
}

Quad low32(Quad a, Quad b) { return picked<0, 4, 1, 5>(a, b); }
Quad high32(Quad a, Quad b) { return picked<2, 6, 3, 7>(a, b); }
Quad low64(Quad a, Quad b) { return picked<0, 1, 4, 5>(a, b); }
Quad high64(Quad a, Quad b) { return picked<2, 3, 6, 7>(a, b); }

// Four rows x four units, transposed: unit u of row r to out[u * 16 + r].
template <Quad (*Change)(Quad)>
void transpose4(const uint8_t* rows, int64_t stride, uint8_t* out) {
  const Quad a = Change(load<Quad>(rows)), b = Change(load<Quad>(rows + stride));
  const Quad c = Change(load<Quad>(rows + 2 * stride)), d = Change(load<Quad>(rows + 3 * stride));
  const Quad ab_low = low32(a, b), cd_low = low32(c, d), ab_high = high32(a, b), cd_high = high32(c, d);
  const Quad units[4] = {low64(ab_low, cd_low), high64(ab_low, cd_low), low64(ab_high, cd_high),
                         high64(ab_high, cd_high)};
  for (int u = 0; u < 4; ++u) std::memcpy(out + u * kLanes * 4, &units[u], 16);
}

// Four rows' cache lines at a time: rows may lie 4 KiB apart, and then all sixteen share a set of the first cache,
// which has room for twelve. (Stores past the caches gain on AMD's Zen 5 what they lose on an Emerald Rapids Xeon:
// benchmarks/probes/packing.cc.)
template <Quad (*Change)(Quad)>
void interleave_words(const uint8_t* rows, int64_t stride, int64_t count, int64_t units, uint8_t* out) {
  constexpr int64_t kLineBlocks = 4;
  const int64_t blocks = count == kLanes ? units / 4 : 0;
  for (int64_t line = 0; line < blocks; line += kLineBlocks)
    for (int64_t r = 0; r < kLanes; r += 4)
      for (int64_t i = line; i < std::min(line + kLineBlocks, blocks); ++i)
        transpose4<Change>(rows + r * stride + i * 16, stride, out + (i * 4 * kLanes + r) * 4);
  for (int64_t u = 4 * blocks; u < units; ++u)
    for (int64_t r = 0; r < kLanes; ++r) {
      Quad one = {};
      if (r < count) std::memcpy(&one, rows + r * stride + u * 4, 4);
      one = Change(one);
      std::memcpy(out + (u * kLanes + r) * 4, &one, 4);
    }
}

Eight low16(Eight a, Eight b) { return picked<0, 8, 1, 9, 2, 10, 3, 11>(a, b); }
Eight high16(Eight a, Eight b) { return picked<4, 12, 5, 13, 6, 14, 7, 15>(a, b); }

// Four rows x eight units of 16 bits: as two blocks of pairs of rows, whose joined units are 32 bits wide.
void transpose4x16(const uint8_t* rows, int64_t stride, uint8_t* out) {
  const Eight a = load<Eight>(rows), b = load<Eight>(rows + stride);
  const Eight c = load<Eight>(rows + 2 * stride), d = load<Eight>(rows + 3 * stride);
  const Quad ab[2] = {Quad(low16(a, b)), Quad(high16(a, b))}, cd[2] = {Quad(low16(c, d)), Quad(high16(c, d))};
  for (int half = 0; half < 2; ++half) {
    const Pair units[2] = {Pair(low32(ab[half], cd[half])), Pair(high32(ab[half], cd[half]))};
    for (int u = 0; u < 4; ++u) {
      const uint64_t unit = units[u / 2][u % 2];
      std::memcpy(out + (half * 4 + u) * kLanes * 2, &unit, 8);
    }
  }
}

// Of 8 codes, one a byte: the lower 4 bits of the even and of the odd ones, and their upper 2 bits.
struct SixBits {
  uint32_t low;
  uint32_t high;  // bytes of even and of odd ones
};

SixBits split_sixes(uint64_t codes) {
  uint64_t low = codes & 0x0f0f0f0f0f0f0f0fu, high = codes >> 4 & 0x0303030303030303u;
  // Bytes (even 0, odd 0, even 1, ..) to halves (even, odd): every step joins two neighbours.
  low = (low | low >> 12) & 0x0000ffff0000ffffu;
  high = (high | high >> 14) & 0x00000f0f00000f0fu;
  const uint32_t even = uint32_t(low & 0xff) | uint32_t(low >> 32 & 0xff) << 8;
  const uint32_t odd = uint32_t(low >> 8 & 0xff) | uint32_t(low >> 40 & 0xff) << 8;
  const uint64_t joined = high | high >> 28;
  return {even | odd << 16, uint32_t(joined & 0xffff)};
}

// Of two such: the upper bits of pairs 0, 1, 4, 5 in lower bytes of lanes, of the others in the upper ones.
uint32_t joined_high(const SixBits& one, const SixBits& two) {
  const uint32_t lower = (one.high & 0x0f0f) | (two.high & 0x0f0f) << 4;
  const uint32_t upper = (one.high & 0xf0f0) >> 4 | (two.high & 0xf0f0);
  return (lower & 0xff) | (upper & 0xff) << 8 | (lower & 0xff00) << 8 | (upper & 0xff00) << 16;
}

// The lower 2 bits of 16 codes, in the place of an int6's upper ones.
uint32_t joined_twos(const uint64_t* codes) {
  return joined_high(split_sixes(codes[0] << 4), split_sixes(codes[1] << 4));
}

// Of 8 codes of 3 bits: the even ones in the lower 12 bits, the odd ones in those of the upper half.
uint32_t split_threes(uint64_t codes) {
  const auto joined = [](uint64_t lanes) { return uint32_t(lanes | lanes >> 13 | lanes >> 26 | lanes >> 39) & 0xfff; };
  return joined(codes & 0x0007000700070007u) | joined(codes >> 8 & 0x0007000700070007u) << 16;
}

typedef uint8_t Sixteen __attribute__((vector_size(16)));

Sixteen low8(Sixteen a, Sixteen b) { return picked<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a, b); }
Sixteen high8(Sixteen a, Sixteen b) {
  return picked<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(a, b);
}

// Of two lines of codes, `a` in the low halves of bytes.
Sixteen joined(Sixteen a, Sixteen b) { return (a & 15) | Sixteen(Eight(b & 15) << 4); }

}  // namespace

void join_bytes(const int8_t* lanes, int64_t count, uint8_t* out) {
  for (int64_t k = 0; k < count; k += 2) {
    const uint8_t* line = reinterpret_cast<const uint8_t*>(lanes) + k * kLanes;
    const Sixteen even = load<Sixteen>(line), odd = load<Sixteen>(line + kLanes);
    const Sixteen pairs[2] = {low8(even, odd), high8(even, odd)};
    std::memcpy(out + k * kLanes, pairs, sizeof pairs);
  }
}

void join_nibbles(const int8_t* lanes, int64_t count, uint8_t* out) {
  for (int64_t k = 0; k < count; k += 8) {
    const uint8_t* line = reinterpret_cast<const uint8_t*>(lanes) + k * kLanes;
    const auto of = [&](int first) {
      return joined(load<Sixteen>(line + first * kLanes), load<Sixteen>(line + (first + 2) * kLanes));
    };
    const Sixteen even_low = of(0), odd_low = of(1), even_high = of(4), odd_high = of(5);
    const Eight even[2] = {Eight(low8(even_low, even_high)), Eight(high8(even_low, even_high))};
    const Eight odd[2] = {Eight(low8(odd_low, odd_high)), Eight(high8(odd_low, odd_high))};
    const Eight rows[4] = {low16(even[0], odd[0]), high16(even[0], odd[0]), low16(even[1], odd[1]),
                           high16(even[1], odd[1])};
    std::memcpy(out + k * kLanes / 2, rows, sizeof rows);
  }
}

void interleave_sixes(const uint8_t* rows, int64_t stride, int64_t count, int64_t blocks, uint8_t* out) {
  constexpr int64_t kBlock = 192, kLine = 64;
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t r = 0; r < count; ++r) {
      uint64_t codes[2];
      std::memcpy(codes, rows + r * stride + 16 * b, sizeof codes);
      const SixBits one = split_sixes(codes[0]), two = split_sixes(codes[1]);
      const uint32_t high = joined_high(one, two);
      uint8_t* to = out + b * kBlock + 4 * r;
      std::memcpy(to, &one.low, sizeof one.low);
      std::memcpy(to + kLine, &two.low, sizeof two.low);
      std::memcpy(to + 2 * kLine, &high, sizeof high);
    }
}

void interleave_twos(const uint8_t* rows, int64_t stride, int64_t count, int64_t blocks, uint8_t* out) {
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t r = 0; r < count; ++r) {
      uint64_t codes[2];
      std::memcpy(codes, rows + r * stride + 16 * b, sizeof codes);
      const uint32_t twos = joined_twos(codes);
      std::memcpy(out + 64 * b + 4 * r, &twos, sizeof twos);
    }
}

void interleave_threes(const uint8_t* rows, int64_t stride, int64_t count, int64_t blocks, uint8_t* out) {
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t r = 0; r < count; ++r) {
      uint64_t codes[2];
      std::memcpy(codes, rows + r * stride + 16 * b, sizeof codes);
      const uint32_t four = split_threes(codes[0]), rest = split_threes(codes[1]);
      const uint32_t words = four | (rest & 0x00070007) << 12 | (rest & 0x02000200) << 6;
      const uint32_t bytes = (rest >> 3 & 0x003f003f) | (rest >> 4 & 0x00c000c0);
      const uint16_t joined = uint16_t(bytes | bytes >> 8);
      std::memcpy(out + 96 * b + 4 * r, &words, sizeof words);
      std::memcpy(out + 96 * b + 64 + 2 * r, &joined, sizeof joined);
    }
}

void interleave32(const uint8_t* rows, int64_t stride, int64_t count, int64_t units, uint8_t* out) {
  interleave_words<same>(rows, stride, count, units, out);
}

void interleave_nibbles(const uint8_t* rows, int64_t stride, int64_t count, int64_t units, uint8_t* out) {
  interleave_words<split_halves>(rows, stride, count, units, out);
}

void interleave16(const uint8_t* rows, int64_t stride, int64_t count, int64_t units, uint8_t* out) {
  const int64_t blocks = count == kLanes ? units / 8 : 0;
  for (int64_t i = 0; i < blocks; ++i)
    for (int64_t r = 0; r < kLanes; r += 4)
      transpose4x16(rows + r * stride + i * 16, stride, out + (i * 8 * kLanes + r) * 2);
  for (int64_t u = 8 * blocks; u < units; ++u)
    for (int64_t r = 0; r < kLanes; ++r) {
      uint16_t one = 0;
      if (r < count) std::memcpy(&one, rows + r * stride + u * 2, 2);
      std::memcpy(out + (u * kLanes + r) * 2, &one, 2);
    }
}

}  // namespace tandem
