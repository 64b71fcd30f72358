// Codebooks (format/grids.h) with VBMI: their blocks of 16 rows become lines of bf16 in registers.
//
// Four entries of each row are looked up at once, 64 in all, by bytes. An entry has the codes of 8 values, 2 bits each,
// in two bytes of 4. Or it has those of 4 values, 3 bits each, in two bytes of 2. vpmultishiftqb spreads four codes of
// each row to bytes, another one their signs. A code and its sign are a place among 8 or 16 numbers. Each stands in the
// table several times, since a lookup of words reads 5 bits.
#pragma once

#include <immintrin.h>

#include "abi/grids.h"
#include "abi/weight_view.h"
#include "isa/inline.h"

namespace tandem {
namespace {

// Of 32 bits of each row, bytes: of its four entries, lower and upper codes; and what has their signs.
struct GridWords {
  __m512i low, high, signs;
};
struct GridLines {
  static constexpr int kLines = 8;  // 16 k
  __m512i lines[kLines];
  TANDEM_INLINE __m512i line(int i) const { return lines[i]; }
};

constexpr bool is_iq3(Format f) { return f == Format::iq3_xxs || f == Format::iq3_s; }
constexpr int code_bits(Format f) { return is_iq3(f) ? 3 : 2; }
struct Bytes64 {
  alignas(64) uint8_t at[64];
};

// For vpmultishiftqb: byte i of a row's four is 8 bits from bit at[i] of the row's 32 on.
constexpr Bytes64 spread(int a, int b, int c, int d) {
  Bytes64 s{};
  const int at[4] = {a, b, c, d};
  for (int i = 0; i < 64; ++i) s.at[i] = uint8_t((i / 4 % 2 * 32 + at[i % 4]) & 63);
  return s;
}

// Two pairs of k, the second above the first: of a block's lower or upper codes, or of two entries of 4 k.
struct Spreads {
  Bytes64 codes[4], signs[8];
};
constexpr Spreads spreads(Format f) {
  Spreads s{};
  for (int i = 0; i < 8; ++i) {
    const int at = is_iq3(f) ? 16 * (i / 2) : 8 * (i / 2), half = i % 2;
    if (is_iq3(f) && i >= 4) continue;
    if (is_iq3(f)) {
      const int sign = 8 * (i / 2) + 2 * half - 3;
      if (!half) s.codes[i / 2] = spread(at, at + 8, at + 3, at + 11);
      s.signs[i] = spread(sign, sign + 4, sign + 1, sign + 5);
    } else {
      const int sign = at + (f == Format::iq1 ? 3 : 4 * half) - 2, next = f == Format::iq1 ? 0 : 1;
      if (!half) s.codes[i / 2] = spread(at, at + 4, at + 2, at + 6);
      s.signs[i] = spread(sign, sign + 2 * next, sign + next, sign + 3 * next);
    }
  }
  return s;
}
template <Format kGrid>
constexpr Spreads kSpreads = spreads(kGrid);

constexpr int iq3_value(Format f, int code) { return f == Format::iq3_xxs && code == 7 ? 124 : 8 + 16 * code; }

// The bf16 number of an integer below 128.
constexpr uint16_t bf16_of(int value) {
  const int size = value < 0 ? -value : value;
  int exponent = 0;
  for (int rest = size; rest > 1; rest /= 2) ++exponent;
  return uint16_t((value < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | ((size << 7 >> exponent) - 128));
}

struct GridNumbers {
  alignas(64) uint16_t at[32];
};
constexpr GridNumbers grid_numbers(Format f) {
  GridNumbers numbers{};
  for (int i = 0; i < 32; ++i) {
    const int code = i & ((1 << code_bits(f)) - 1), sign = i >> code_bits(f) & 1;
    const int size = is_iq3(f) ? iq3_value(f, code) : code == 2 ? 43 : 8 + 17 * code;
    numbers.at[i] = f == Format::iq1 ? bf16_of(8 * code - 7 - 2 * sign) : bf16_of(sign ? -size : size);
  }
  return numbers;
}
template <Format kGrid>
constexpr GridNumbers kNumbers = grid_numbers(kGrid);

// Row r's bytes of four blocks (of IQ3: two bytes of two blocks each): first + step * r within 32 bytes of each block.
constexpr Bytes64 grid_order(Format f, int first, int step) {
  Bytes64 order{};
  for (int i = 0; i < 64; ++i) {
    const int r = i / 4, e = i % 4;
    order.at[i] = is_iq3(f) ? uint8_t(e / 2 * 32 + 2 * r + e % 2) : uint8_t(32 * e + first + step * r);
  }
  return order;
}
template <Format kGrid, int kFirst, int kStep>
constexpr Bytes64 kGridOrder = grid_order(kGrid, kFirst, kStep);

// Of IQ1, whose blocks are 24 bytes apart: of 96 bytes the first 64, then the last 64.
constexpr Bytes64 iq1_order(int first, int rows) {
  Bytes64 order{};
  for (int i = 0; i < 64; ++i) {
    const int at = 24 * (i % 4) + first + i / 4 / rows;
    order.at[i] = uint8_t(at < 64 ? at : at + 32);
  }
  return order;
}
constexpr Bytes64 kIq1Low = iq1_order(0, 1), kIq1Nibbles = iq1_order(16, 2);
// Nibbles of even rows stay, those of odd ones move down.
constexpr Bytes64 iq1_halves() {
  Bytes64 order{};
  for (int i = 0; i < 64; ++i) order.at[i] = uint8_t(8 * (i % 8) + i / 4 % 2 * 4);
  return order;
}
constexpr Bytes64 kIq1Halves = iq1_halves();
// Of IQ2_S: the two bits of row r of two blocks' words, which a lane of 64 bits holds.
constexpr Bytes64 kIq2sUpper = [] {
  Bytes64 order{};
  for (int i = 0; i < 64; ++i) order.at[i] = uint8_t(32 * (i % 2) + 2 * (i / 4));
  return order;
}();

TANDEM_INLINE uint32_t four_bytes(const uint8_t* p) {
  uint32_t word;
  __builtin_memcpy(&word, p, 4);
  return word;
}

TANDEM_INLINE __m512i bytes_of(const Bytes64& b) { return _mm512_load_si512(b.at); }
TANDEM_INLINE __m256i bytes32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
TANDEM_INLINE __m512i two_of_32(const uint8_t* a, const uint8_t* b) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(bytes32(a)), bytes32(b), 1);
}

// Numbers of entries: the lower 8 bits, and of those above, masks of the entries that have them.
template <int kEntries>
struct GridAt {
  __m512i low;
  __mmask64 upper[3];
};

// One byte of kEntries for each lane.
template <int kEntries, int kAll>
TANDEM_INLINE __m512i looked_up(const uint8_t* bytes, const GridAt<kAll>& at) {
  if constexpr (kEntries == 128) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), at.low, _mm512_load_si512(bytes + 64));
  } else {
    constexpr int kHalf = kEntries / 2;
    const __m512i low = looked_up<kHalf>(bytes, at), high = looked_up<kHalf>(bytes + kHalf, at);
    if constexpr (kEntries == 256) return _mm512_mask_blend_epi8(_mm512_movepi8_mask(at.low), low, high);
    return _mm512_mask_blend_epi8(at.upper[kEntries == 512 ? 0 : kEntries == 1024 ? 1 : 2], low, high);
  }
}

template <int kEntries>
TANDEM_INLINE GridWords words_at(const GridCodes<kEntries>& grid, const GridAt<kEntries>& at, __m512i signs) {
  return {looked_up<kEntries>(grid.low, at), looked_up<kEntries>(grid.high, at), signs};
}

TANDEM_INLINE __mmask64 with_bit(__m512i bytes, int bit) {
  return _mm512_test_epi8_mask(bytes, _mm512_set1_epi8(int8_t(1 << bit)));
}

// Four blocks; of IQ3 two.
template <Format kGrid>
TANDEM_INLINE GridWords grid_words_of(const uint8_t* block) {
  if constexpr (kGrid == Format::iq2_xxs) {
    const __m512i a = _mm512_loadu_si512(block), b = _mm512_loadu_si512(block + 64);
    const __m512i at = _mm512_permutex2var_epi8(a, bytes_of(kGridOrder<kGrid, 0, 1>), b);
    return words_at<256>(kGrids.iq2_xxs_bytes, {at, {}},
                         _mm512_permutex2var_epi8(a, bytes_of(kGridOrder<kGrid, 16, 1>), b));
  } else if constexpr (kGrid == Format::iq2_xs) {
    const __m512i a = _mm512_loadu_si512(block), b = _mm512_loadu_si512(block + 64);
    const __m512i at = _mm512_permutex2var_epi8(a, bytes_of(kGridOrder<kGrid, 0, 2>), b);
    const __m512i rest = _mm512_permutex2var_epi8(a, bytes_of(kGridOrder<kGrid, 1, 2>), b);
    const __m512i signs =  // by 7 bits
        _mm512_permutex2var_epi8(_mm512_loadu_si512(kGrids.with_eighth), _mm512_srli_epi16(rest, 1),
                                 _mm512_loadu_si512(kGrids.with_eighth + 64));
    return words_at<512>(kGrids.iq2_xs_bytes, {at, {with_bit(rest, 0)}}, signs);
  } else if constexpr (kGrid == Format::iq2_s) {
    const __m512i a = two_of_32(block, block + 36), b = two_of_32(block + 72, block + 108);
    const __m512i at = _mm512_permutex2var_epi8(a, bytes_of(kGridOrder<kGrid, 0, 1>), b);
    const auto both = [&](int i) {
      return _mm512_set1_epi64(int64_t(four_bytes(block + i) | uint64_t{four_bytes(block + i + 36)} << 32));
    };
    const __m512i order = bytes_of(kIq2sUpper), first = _mm512_multishift_epi64_epi8(order, both(32));
    const __m512i upper = _mm512_mask_multishift_epi64_epi8(first, 0xccccccccccccccccu, order, both(104));
    return words_at<1024>(kGrids.iq2_s_bytes, {at, {with_bit(upper, 0), with_bit(upper, 1)}},
                          _mm512_permutex2var_epi8(a, bytes_of(kGridOrder<kGrid, 16, 1>), b));
  } else if constexpr (kGrid == Format::iq1) {
    const __m512i a = _mm512_loadu_si512(block), b = _mm512_loadu_si512(block + 32);
    const __m512i at = _mm512_permutex2var_epi8(a, bytes_of(kIq1Low), b);
    const __m512i rest =
        _mm512_multishift_epi64_epi8(bytes_of(kIq1Halves), _mm512_permutex2var_epi8(a, bytes_of(kIq1Nibbles), b));
    return words_at<2048>(kGrids.iq1_bytes, {at, {with_bit(rest, 0), with_bit(rest, 1), with_bit(rest, 2)}}, rest);
  } else {
    constexpr int kBytes = kGrid == Format::iq3_s ? 52 : 48;
    const __m512i at = _mm512_permutexvar_epi8(bytes_of(kGridOrder<kGrid, 0, 2>), two_of_32(block, block + kBytes));
    const auto signs_at = [](const uint8_t* p) {
      return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    };
    const __m512i signs = _mm512_or_si512(signs_at(block + 32), _mm512_slli_epi32(signs_at(block + kBytes + 32), 8));
    if constexpr (kGrid == Format::iq3_xxs) return words_at<256>(kGrids.iq3_xxs_bytes, {at, {}}, signs);
    const uint64_t upper = _pdep_u64(four_bytes(block + 48), 0x3333333333333333u) |
                           _pdep_u64(four_bytes(block + kBytes + 48), 0xccccccccccccccccu);
    return words_at<512>(kGrids.iq3_s_bytes, {at, {upper}}, signs);
  }
}

// The numbers of four k of each row: two lines.
template <Format kGrid>
TANDEM_INLINE void two_lines(__m512i codes, __m512i signs, const Bytes64& of_codes, const Bytes64& of_signs,
                             __m512i& first, __m512i& second) {
  const __m512i spread_codes = _mm512_multishift_epi64_epi8(bytes_of(of_codes), codes);
  const __m512i spread_signs = _mm512_multishift_epi64_epi8(bytes_of(of_signs), signs);
  const __m512i numbers = _mm512_load_si512(kNumbers<kGrid>.at), mask = _mm512_set1_epi8((1 << code_bits(kGrid)) - 1);
  const __m512i at = _mm512_ternarylogic_epi32(mask, spread_codes, spread_signs, 0xca);  // a ? b : c
  first = _mm512_permutexvar_epi16(at, numbers);
  second = _mm512_permutexvar_epi16(_mm512_srli_epi16(at, 8), numbers);
}

// 16 k: half 0 or 1 of the words' k; IQ3's words have no more.
template <Format kGrid>
TANDEM_INLINE GridLines grid_lines_of(const GridWords& words, int half) {
  constexpr const Spreads& s = kSpreads<kGrid>;
  GridLines lines;
  __m512i* line = lines.lines;
#pragma GCC unroll 2
  for (int b = 0; b < 2; ++b, line += 4) {
    if constexpr (is_iq3(kGrid)) {
      two_lines<kGrid>(words.low, words.signs, s.codes[b], s.signs[2 * b], line[0], line[2]);
      two_lines<kGrid>(words.high, words.signs, s.codes[b], s.signs[2 * b + 1], line[1], line[3]);
    } else {
      const int at = 2 * half + b;
      two_lines<kGrid>(words.low, words.signs, s.codes[at], s.signs[2 * at], line[0], line[1]);
      two_lines<kGrid>(words.high, words.signs, s.codes[at], s.signs[2 * at + 1], line[2], line[3]);
    }
  }
  return lines;
}

// Calls each(k, lines) for all 32 k of the blocks, in parts.
template <Format kGrid, class Each>
TANDEM_INLINE void grid_parts_of(const uint8_t* blocks, Each each) {
  GridWords words = grid_words_of<kGrid>(blocks);
  each(0, grid_lines_of<kGrid>(words, 0));
  if constexpr (kGrid == Format::iq3_xxs) words = grid_words_of<kGrid>(blocks + 2 * 48);
  if constexpr (kGrid == Format::iq3_s) words = grid_words_of<kGrid>(blocks + 2 * 52);
  each(16, grid_lines_of<kGrid>(words, 1));
}

}  // namespace
}  // namespace tandem
