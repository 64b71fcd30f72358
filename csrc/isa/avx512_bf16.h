// Tier "avx512_bf16": the above + BF16, VNNI and VBMI. Weights are multiplied as pairs of bf16 (vdpbf16ps), so a line
// of packed bf16 is used as it lies in memory. The instruction flushes subnormals to zero.
#pragma once

#include "isa/avx512.h"
#include "isa/grid_lines.h"

namespace tandem {
namespace {

// The two bytes of the bf16 number of each positive e4m3 number.
struct E4m3Bytes {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

constexpr E4m3Bytes e4m3_bytes() {
  E4m3Bytes table{};
  for (int code = 1; code < 128; ++code) {
    int exponent = code / 8 + 120, mantissa = code % 8;
    if (code < 8) {  // subnormal
      exponent = 121;
      for (; mantissa < 8; mantissa *= 2) --exponent;
      mantissa -= 8;
    }
    const int bits = code == 127 ? 0x7fc0 : exponent << 7 | mantissa << 4;
    table.low[code] = uint8_t(bits);
    table.high[code] = uint8_t(bits >> 8);
  }
  return table;
}
constexpr E4m3Bytes kE4m3Bytes = e4m3_bytes();

// The bf16 number of each signed 6-bit code.
struct SixBitTable {
  alignas(64) uint16_t bf16[64];
};

constexpr SixBitTable six_bit_table() {
  SixBitTable table{};
  for (int code = 1; code < 64; ++code) {
    const int size = code < 32 ? code : 64 - code;
    int exponent = 127, mantissa = size;
    for (int rest = size; rest > 1; rest /= 2) ++exponent;
    while (mantissa < 128) mantissa *= 2;
    table.bf16[code] = uint16_t((code < 32 ? 0 : 0x8000) | exponent << 7 | (mantissa - 128));
  }
  return table;
}
constexpr SixBitTable kSixBits = six_bit_table();

// nl4's values as bf16 and as halves, and what isa/avx512_fp16.h adds to exponents; twice, since a lookup reads 5 bits.
struct Nl4Tables {
  alignas(64) uint16_t bf16[32], halves[32];
};
constexpr Nl4Tables nl4_tables() {
  Nl4Tables tables{};
  for (int i = 0; i < 32; ++i) {
    const int value = kNl4[i % 16], size = value < 0 ? -value : value, sign = value < 0 ? 0x8000 : 0;
    int exponent = 0;
    for (int rest = size; rest > 1; rest /= 2) ++exponent;
    tables.bf16[i] = uint16_t(sign | (127 + exponent) << 7 | ((size << 7 >> exponent) - 128));
    tables.halves[i] = uint16_t(sign | (15 + exponent) << 10 | ((size << 10 >> exponent) - 1024));
  }
  return tables;
}
constexpr Nl4Tables kNl4Tables = nl4_tables();

struct Avx512Bf16Isa : Avx512Isa {
  struct Lane {
    static constexpr DType kType = DType::bf16;
    static constexpr int kLinesPerPair = 1;
    using Line = __m512i;
    using XLine = __m512i;
    TANDEM_INLINE static Line load_line(const void* p) { return _mm512_loadu_si512(p); }
    TANDEM_INLINE static void store_line(void* p, Line a) { _mm512_storeu_si512(p, a); }
    TANDEM_INLINE static XLine x_line(const void* p) { return _mm512_set1_epi32(*static_cast<const int32_t*>(p)); }
    TANDEM_INLINE static Vec dot(Vec sum, Line w, XLine x) { return _mm512_dpbf16_ps(sum, __m512bh(w), __m512bh(x)); }
  };
  struct Pair {
    Lane::Line line[Lane::kLinesPerPair];
  };

  static constexpr int kDotRows = 12;  // decoding takes fewer registers than with float lanes
  static constexpr int kTileRows = 12;
  static constexpr int kTilePanels = 2;  // 6 rows x 4 panels take the same time: an instruction takes a cycle

  TANDEM_INLINE static void store_bf16(uint16_t* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), __m256i(_mm512_cvtneps_pbh(a)));
  }
  TANDEM_INLINE static Pair decode_bf16(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  TANDEM_INLINE static Pair decode_int8(const uint8_t* p) {
    return {__m512i(_mm512_cvtne2ps_pbh(widen_int8(p + 16), widen_int8(p)))};
  }
  TANDEM_INLINE static Pair decode_int4(const uint8_t* p, int index) {
    // A 16-bit lookup reads 5 bits of each lane: the 16 values stand there twice, so the neighbour's bit is harmless.
    return {_mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_loadu_si512(p), 4 * index), int4_values())};
  }
  TANDEM_INLINE static Pair decode_uint4(const uint8_t* p, int index) {
    return {_mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_loadu_si512(p), 4 * index), uint4_values())};
  }
  // Two pairs of k are put together at once, as bytes: pairs 0 and 2, 1 and 3, and so on.
  TANDEM_INLINE static Pair decode_int6(const uint8_t* p, int index) {
    const __m512i four = _mm512_loadu_si512(p + 64 * (index / 4)), two = _mm512_loadu_si512(p + 128);
    const __m512i lower = shifted_left(four, index % 2 ? -4 : 0), upper = shifted_left(two, 4 - six_bit(index) % 8);
    const __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), lower, upper, 0xca);  // a ? b : c
    const __m512i code = _mm512_srli_epi16(both, index % 4 / 2 * 8);                           // a lookup reads 6 bits
    return {_mm512_permutex2var_epi16(_mm512_load_si512(kSixBits.bf16), code, _mm512_load_si512(kSixBits.bf16 + 32))};
  }
  // Codebooks: calls each(k, lines) for 32 k of their blocks.
  static constexpr int kGridRows = 8;
  template <Format kGrid>
  static constexpr int kTileFromGridRows = 17;
  static constexpr float kGridUnit = 1.0f;
  template <Format kGrid, class Each>
  TANDEM_INLINE static void grid_parts(const uint8_t* blocks, Each each) {
    grid_parts_of<kGrid>(blocks, each);
  }
  TANDEM_INLINE static Pair decode_nl4(const uint8_t* p, int index) {
    return {_mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_loadu_si512(p), unsigned(4 * index)),
                                     _mm512_load_si512(kNl4Tables.bf16))};
  }
  TANDEM_INLINE static Pair decode_uint2(const uint8_t* p, int index) {
    return {_mm512_permutexvar_epi16(two_bits(p, index),
                                     eight_values(0, 0x3f80, 0x4000, 0x4040, 0, 0x3f80, 0x4000, 0x4040))};
  }
  TANDEM_INLINE static Pair decode_int3(const uint8_t* p, int index) {
    return {_mm512_permutexvar_epi16(three_bits(p, index),
                                     eight_values(0, 0x3f80, 0x4000, 0x4040, -0x3f80, -0x3fc0, -0x4000, -0x4080))};
  }
  // For lookups of words, which read 5 bits: codes of pair `index`, and above them others.
  TANDEM_INLINE static __m512i two_bits(const uint8_t* p, int index) {
    return _mm512_srli_epi16(_mm512_loadu_si512(p), unsigned(six_bit(index)));
  }
  TANDEM_INLINE static __m512i three_bits(const uint8_t* p, int index) {
    const __m512i w = _mm512_loadu_si512(p);
    if (index < 5) return _mm512_srli_epi16(w, unsigned(3 * index));
    const __m512i b = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64)));
    if (index < 7) return _mm512_srli_epi16(b, unsigned(3 * (index - 5)));
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(6), _mm512_srli_epi16(b, 5), _mm512_srli_epi16(w, 15), 0xca);
  }
  // 8 words, four times.
  TANDEM_INLINE static __m512i eight_values(int a, int b, int c, int d, int e, int f, int g, int h) {
    return _mm512_broadcast_i32x4(
        _mm_setr_epi16(int16_t(a), int16_t(b), int16_t(c), int16_t(d), int16_t(e), int16_t(f), int16_t(g), int16_t(h)));
  }
  TANDEM_INLINE static Pair decode_fp8(const uint8_t* p) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m512i twice = _mm512_permutexvar_epi8(doubled(), _mm512_castsi256_si512(codes));  // a lookup reads 7 bits
    const __m512i low = _mm512_permutex2var_epi8(half_table(kE4m3Bytes.low), twice, half_table(kE4m3Bytes.low + 64));
    const __m512i high = _mm512_permutex2var_epi8(half_table(kE4m3Bytes.high), twice, half_table(kE4m3Bytes.high + 64));
    const __m512i magnitude = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaull, low, high);
    const __m512i sign = _mm512_set1_epi16(int16_t(0x8000));
    return {_mm512_ternarylogic_epi32(magnitude, twice, sign, 0xf8)};  // a | (b & c)
  }
  // Two pairs of k, 64 codes in a row. Normal numbers are moved to where bf16 has them, and 120 is added to their
  // exponents: 6 operations a line with its product. A lookup takes 10, and is for codes of which one is 0 or
  // subnormal.
  static constexpr int kFp8AtOnce = 2;
  struct TwoPairs {
    Lane::Line line[2];
  };
  TANDEM_INLINE static TwoPairs decode_some_fp8(const uint8_t* p) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // what is unpacked in the end, in a row
    const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(p)), zero = _mm512_setzero_si512();
    if (_mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78))) [[unlikely]]
      return {decode_fp8(p).line[0], decode_fp8(p + 32).line[0]};
    return {normal_fp8(_mm512_unpacklo_epi8(zero, codes)), normal_fp8(_mm512_unpackhi_epi8(zero, codes))};
  }
  // Of codes in the upper bytes of words.
  TANDEM_INLINE static Lane::Line normal_fp8(__m512i upper) {
    const __m512i moved = _mm512_srai_epi16(upper, 4), kept = _mm512_set1_epi16(int16_t(0x87ff));
    return _mm512_add_epi16(_mm512_and_si512(moved, kept), _mm512_set1_epi16(120 << 7));
  }
  TANDEM_INLINE static Pair decode_fp4(const uint8_t* p, int index) {
    return {_mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_loadu_si512(p), 4 * index), e2m1_values())};
  }
  // The isa that decodes to floats, and two of its lines (even k, odd k) rounded to a line of bf16: to the nearest,
  // ties away from zero. Shifts and one blend instead of vcvtne2ps2bf16 and a permutation: 1.7 against 1.8 ns a line of
  // int4.
  using Widened = Avx512Isa;
  TANDEM_INLINE static Lane::Line line_of(Vec even, Vec odd) {
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(int(0xffff0000u));
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    return _mm512_ternarylogic_epi32(high, upper, low, 0xea);  // (a & b) | c
  }

  // e2m1 numbers times powers of two, exact: 2^125 too large they are looked up, and what their exponents are too large
  // by is subtracted; 0 stays 0, since that saturates. 3 instructions a line.
  static constexpr int kFp4Exponent = 125;
  struct ScaledFp4 {
    __m512i too_large;
  };
  // False if a scale is no power of two, or codes times it might leave the normal numbers.
  TANDEM_INLINE static bool scaled_fp4(Vec scale, ScaledFp4& table) {
    const __m512i bits = _mm512_castps_si512(scale), exponent = _mm512_sub_epi32(bits, _mm512_set1_epi32(127 << 23));
    if (_mm512_test_epi32_mask(bits, _mm512_set1_epi32(int(0x807fffffu)))) return false;
    if (_mm512_cmpgt_epi32_mask(_mm512_abs_epi32(exponent), _mm512_set1_epi32(120 << 23))) return false;
    const __m512i upper = _mm512_sub_epi32(_mm512_set1_epi32(kFp4Exponent << 23), exponent);
    table.too_large = _mm512_or_si512(upper, _mm512_srli_epi32(upper, 16));
    return true;
  }
  TANDEM_INLINE static Lane::Line decode_scaled_fp4(const uint8_t* p, int index, const ScaledFp4& table) {
    const __m512i codes = _mm512_srli_epi16(_mm512_loadu_si512(p), unsigned(4 * index));
    return _mm512_subs_epu16(_mm512_permutexvar_epi16(codes, large_e2m1_values()), table.too_large);
  }

 private:
  // 0, 0, 1, 1 ...: every byte of the lower half twice.
  TANDEM_INLINE static __m512i doubled() {
    const __m512i words =
        _mm512_cvtepu8_epi16(_mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,
                                              21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31));
    return _mm512_or_si512(words, _mm512_slli_epi16(words, 8));
  }
  TANDEM_INLINE static __m512i half_table(const uint8_t* p) { return _mm512_load_si512(p); }
  TANDEM_INLINE static Vec widen_int8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  TANDEM_INLINE static __m512i int4_values() {
    const __m256i values = _mm256_setr_epi16(0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, -0x3f00,
                                             -0x3f20, -0x3f40, -0x3f60, -0x3f80, -0x3fc0, -0x4000, -0x4080);
    return _mm512_broadcast_i64x4(values);
  }
  TANDEM_INLINE static __m512i uint4_values() {
    const __m256i values = _mm256_setr_epi16(0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100,
                                             0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170);
    return _mm512_broadcast_i64x4(values);
  }
  // Times 2^kFp4Exponent; -0 is 0.
  TANDEM_INLINE static __m512i large_e2m1_values() {
    const __m256i values = _mm256_setr_epi16(0, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40, 0, -0x280,
                                             -0x200, -0x1c0, -0x180, -0x140, -0x100, -0xc0);
    return _mm512_broadcast_i64x4(values);
  }
  TANDEM_INLINE static __m512i e2m1_values() {
    const __m256i values = _mm256_setr_epi16(0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, -0x8000,
                                             -0x4100, -0x4080, -0x4040, -0x4000, -0x3fc0, -0x3f80, -0x3f40);
    return _mm512_broadcast_i64x4(values);
  }
};

}  // namespace
}  // namespace tandem
