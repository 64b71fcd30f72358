// Integer products with AVX-512, without and with VNNI; see int8_avx2.h for why sums of 16 bits are exact.
#pragma once

#include "isa/avx512.h"

namespace tandem {
namespace {

struct Avx512Ints {
  using Isa = Avx512Isa;
  typedef int32_t Sum
      __attribute__((vector_size(64)));  // not __m512i: GCC 12 would keep sums as two types, in two registers
  using Line = __m512i;
  struct Lines {
    Line a, b;
  };
  using X = __m512i;
  static constexpr int kRows = 8;
  static constexpr int kBlockRows = 4;  // see micro/int8_blocks.h
  static constexpr int kPanels = 2;
  static constexpr int kByteOffset = 0;  // signed bytes

  TANDEM_INLINE static Sum start(int32_t value) { return Sum(_mm512_set1_epi32(value)); }
  TANDEM_INLINE static void keep(Sum& s) { __asm__ volatile("" : "+v"(s)); }  // or it would be folded away
  TANDEM_INLINE static void keep(X& x) { __asm__ volatile("" : "+v"(x)); }
  TANDEM_INLINE static X x(const uint8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
  }
  TANDEM_INLINE static Isa::Vec floats(Sum s) { return _mm512_cvtepi32_ps(__m512i(s)); }

  TANDEM_INLINE static Lines bytes(const uint8_t* p) { return {joined(p), joined(p + 64)}; }
  TANDEM_INLINE static Sum dot_bytes(Sum s, const Lines& w, X a, X b) {
    return s + Sum(signed_products(w.a, a)) + Sum(signed_products(w.b, b));
  }
  TANDEM_INLINE static Isa::Vec byte_floats(Sum s) { return floats(s); }

  TANDEM_INLINE static Lines nibbles(const uint8_t* p) {
    const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
    return {_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
  }
  template <int at>
  TANDEM_INLINE static Lines sixes(const uint8_t* low, const uint8_t* high) {
    const Lines w = nibbles(low);
    const __m512i bits = _mm512_loadu_si512(high);
    return {with_bits<at>(w.a, bits), with_bits<at + 2>(w.b, bits)};
  }
  template <int at>
  TANDEM_INLINE static Lines twos(const uint8_t* p) {
    const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(3);
    return {_mm512_and_si512(_mm512_srli_epi16(both, at), mask),
            _mm512_and_si512(_mm512_srli_epi16(both, at + 2), mask)};
  }
  TANDEM_INLINE static Lines nl4(Lines w) {
    const __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kNl4)));
    return {_mm512_shuffle_epi8(values, w.a), _mm512_shuffle_epi8(values, w.b)};
  }
  // See int8_avx2.h.
  template <int half>
  TANDEM_INLINE static Lines threes(const uint8_t* words, const uint8_t* bytes) {
    const __m512i w = _mm512_loadu_si512(words), seven = _mm512_set1_epi16(7);
    if constexpr (half == 0)
      return {either(_mm512_and_si512(w, seven), _mm512_slli_epi16(w, 2), 0x700),
              either(_mm512_and_si512(_mm512_srli_epi16(w, 3), seven), _mm512_srli_epi16(w, 1), 0x700)};
    const __m512i b = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
    const __m512i last = either(_mm512_and_si512(b, seven), _mm512_slli_epi16(b, 3), 0x600);
    return {either(_mm512_and_si512(_mm512_srli_epi16(w, 12), seven), _mm512_slli_epi16(b, 5), 0x700),
            either(last, _mm512_srli_epi16(w, 7), 0x100)};
  }
  TANDEM_INLINE static Lines flipped(Lines w, int sign) {
    const __m512i bit = _mm512_set1_epi8(int8_t(sign));
    return {_mm512_xor_si512(w.a, bit), _mm512_xor_si512(w.b, bit)};
  }
  TANDEM_INLINE static Lines twice_e2m1(Lines w) {
    const __m512i values =
        _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return {_mm512_shuffle_epi8(values, w.a), _mm512_shuffle_epi8(values, w.b)};
  }
  TANDEM_INLINE static Sum dot_small(Sum s, const Lines& w, X a, X b) {
    const __m512i words = _mm512_add_epi16(_mm512_maddubs_epi16(w.a, a), _mm512_maddubs_epi16(w.b, b));
    return s + Sum(four_at_once(words));
  }

  // Integers that scale groups, of 16 columns.
  TANDEM_INLINE static Sum signed_scales(const uint8_t* p) { return Sum(_mm512_cvtepi8_epi32(sixteen(p))); }
  TANDEM_INLINE static Sum low_nibbles(const uint8_t* p) {
    return Sum(_mm512_and_si512(_mm512_cvtepu8_epi32(sixteen(p)), _mm512_set1_epi32(15)));
  }
  template <int bit>
  TANDEM_INLINE static Sum odd_scales(const uint8_t* p) {
    const __m512i bytes = _mm512_cvtepu8_epi32(sixteen(p));
    const __m512i twice = bit ? _mm512_srli_epi32(bytes, 3) : _mm512_slli_epi32(bytes, 1);
    return Sum(_mm512_ternarylogic_epi32(_mm512_set1_epi32(30), twice, _mm512_set1_epi32(1), 0xea));  // a & b | c
  }
  TANDEM_INLINE static Sum add_product(Sum s, Sum a, Sum b) {
    return s + Sum(_mm512_mullo_epi32(__m512i(a), __m512i(b)));
  }
  // Of two groups of 16 columns, pairs of words: signed bytes, or upper nibbles.
  template <bool nibbles>
  TANDEM_INLINE static Line shifts(const uint8_t* p) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    if constexpr (nibbles) return _mm512_permutexvar_epi16(order, _mm512_srli_epi16(_mm512_cvtepu8_epi16(bytes), 4));
    return _mm512_permutexvar_epi16(order, _mm512_cvtepi8_epi16(bytes));
  }
  TANDEM_INLINE static Sum dot_shifts(Sum s, Line two, X x) { return s + Sum(_mm512_madd_epi16(two, x)); }
  TANDEM_INLINE static Lines ordered_bytes(const uint8_t* p) { return bytes(p); }

  TANDEM_INLINE static void store_codes(uint8_t* p, Isa::Vec q, bool split) {
    const __m128i codes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(q));
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), split ? _mm_shuffle_epi8(codes, order) : codes);
  }

 private:
  TANDEM_INLINE static __m128i sixteen(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  // Two pairs of k, [2][16][2], as 4 bytes of every column.
  TANDEM_INLINE static Line joined(const uint8_t* p) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, _mm512_loadu_si512(p));
  }
  template <int at>
  TANDEM_INLINE static __m512i with_bits(__m512i low, __m512i high) {
    const __m512i moved = Isa::shifted_left(high, 4 - at);
    return _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(0x30)));
  }
  TANDEM_INLINE static __m512i either(__m512i a, __m512i b, int of_b) {
    return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi16(int16_t(of_b)), 0xf8);  // a | (b & c)
  }
  TANDEM_INLINE static __m512i four_at_once(__m512i words) { return _mm512_madd_epi16(words, _mm512_set1_epi16(1)); }
  TANDEM_INLINE static __m512i signed_products(__m512i w, __m512i x) {
    const __m512i turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    return four_at_once(_mm512_maddubs_epi16(_mm512_abs_epi8(w), turned));
  }
};

}  // namespace
}  // namespace tandem
