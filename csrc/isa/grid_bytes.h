// Codebooks (format/grids.h) with VBMI: their blocks of 16 rows become lines of bytes, values + 128, in registers.
// Entries are looked up as isa/grid_lines.h says. vpmultishiftqb spreads the codes of four k of each row to bytes, and
// their signs; both are a place in a table.
#pragma once

#include "format/grids.h"
#include "isa/grid_lines.h"

namespace tandem {
namespace {

// By entry: codes of its four k (of IQ2 twice: the lower and the upper ones), and their signs, above the codes' bits.
struct ByteSpreads {
  Bytes64 codes[4], signs[8];
};
constexpr ByteSpreads byte_spreads(Format f) {
  ByteSpreads s{};
  for (int e = 0; e < 4; ++e) {
    const int at = 8 * e, bits = code_bits(f);
    s.codes[e] = is_iq3(f) ? spread(at, at + 3, at, at + 3) : spread(at, at + 2, at + 4, at + 6);
    for (int half = 0; half < 2; ++half) {
      const int sign = (is_iq3(f) ? 4 * e : f == Format::iq1 ? at + 3 : at + 4 * half) - bits;
      const int next = f == Format::iq1 ? 0 : 1;
      s.signs[2 * e + half] = spread(sign, sign + next, sign + 2 * next, sign + 3 * next);
    }
  }
  return s;
}
template <Format kGrid>
constexpr ByteSpreads kByteSpreads = byte_spreads(kGrid);

// A lookup reads 6 bits: the numbers stand there several times.
constexpr Bytes64 grid_values(Format f) {
  Bytes64 values{};
  for (int i = 0; i < 64; ++i) {
    const int code = i & ((1 << code_bits(f)) - 1), sign = i >> code_bits(f) & 1;
    const int size = is_iq3(f) ? iq3_value(f, code) : code == 2 ? 43 : 8 + 17 * code;
    values.at[i] = uint8_t(128 + (f == Format::iq1 ? 8 * code - 7 - 2 * sign : sign ? -size : size));
  }
  return values;
}
template <Format kGrid>
constexpr Bytes64 kGridValues = grid_values(kGrid);

template <Format kGrid>
TANDEM_INLINE __m512i line_of_bytes(__m512i codes, __m512i signs, const Bytes64& of_signs) {
  const __m512i mask = _mm512_set1_epi8((1 << code_bits(kGrid)) - 1);
  const __m512i spread_signs = _mm512_multishift_epi64_epi8(bytes_of(of_signs), signs);
  const __m512i at = _mm512_ternarylogic_epi32(mask, codes, spread_signs, 0xca);  // a ? b : c
  return _mm512_permutexvar_epi8(at, bytes_of(kGridValues<kGrid>));
}

// Of entry e of the words: its first and its last four k; of IQ3 those of entries e and e + 1.
template <Format kGrid, class Each>
TANDEM_INLINE void eight_of_grid(const GridWords& words, int e, int k, Each each) {
  constexpr const ByteSpreads& s = kByteSpreads<kGrid>;
  const auto spread_codes = [](const Bytes64& at, __m512i codes) {
    return _mm512_multishift_epi64_epi8(bytes_of(at), codes);
  };
  if constexpr (is_iq3(kGrid)) {
    const auto four = [&](int entry) {
      const __m512i low = spread_codes(s.codes[entry], words.low);
      const __m512i codes =
          _mm512_mask_multishift_epi64_epi8(low, 0xccccccccccccccccu, bytes_of(s.codes[entry]), words.high);
      return line_of_bytes<kGrid>(codes, words.signs, s.signs[2 * entry]);
    };
    each(k, four(e), four(e + 1));
  } else {
    each(k, line_of_bytes<kGrid>(spread_codes(s.codes[e], words.low), words.signs, s.signs[2 * e]),
         line_of_bytes<kGrid>(spread_codes(s.codes[e], words.high), words.signs, s.signs[2 * e + 1]));
  }
}

// Calls each(k, line, line) for 32 k of the blocks, 8 after 8.
template <Format kGrid, class Each>
TANDEM_INLINE void each_grid_line(const uint8_t* blocks, Each each) {
  GridWords words = grid_words_of<kGrid>(blocks);
  constexpr int kStep = is_iq3(kGrid) ? 2 : 1;  // entries of 8 k
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    if constexpr (is_iq3(kGrid))
      if (i == 2) words = grid_words_of<kGrid>(blocks + 2 * grid_block_bytes(kGrid));
    eight_of_grid<kGrid>(words, i * kStep % 4, 8 * i, each);
  }
}

}  // namespace
}  // namespace tandem
