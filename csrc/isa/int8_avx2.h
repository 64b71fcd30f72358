// Integer products with AVX2. vpmaddubsw adds two products to 16 bits and saturates. With codes below 64, two of its
// results still fit together (4 * 63 * 127). int8 is multiplied as magnitude times activation with the weight's sign (2
// * 128 * 127). So every sum is exact.
#pragma once

#include "isa/avx2.h"
#include "isa/int8_grids_avx2.h"

namespace tandem {
namespace {

struct Avx2Ints {
  using Isa = Avx2Isa;
  typedef int32_t Eight __attribute__((vector_size(32)));  // not __m256i: see int8_avx512.h
  struct Sum {
    Eight lo, hi;
  };
  struct Line {
    __m256i lo, hi;
  };
  struct Lines {
    Line a, b;
  };
  using X = __m256i;
  static constexpr int kRows = 3;
  static constexpr int kBlockRows = 2;
  static constexpr int kPanels = 1;
  static constexpr int kByteOffset = 0;  // signed bytes

  TANDEM_INLINE static Sum start(int32_t value) {
    return {Eight(_mm256_set1_epi32(value)), Eight(_mm256_set1_epi32(value))};
  }
  TANDEM_INLINE static void keep(Sum& s) {
    __asm__ volatile("" : "+x"(s.lo), "+x"(s.hi));
  }  // or it would be folded away
  TANDEM_INLINE static void keep(X& x) { __asm__ volatile("" : "+x"(x)); }
  TANDEM_INLINE static X x(const uint8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
  }
  TANDEM_INLINE static Isa::Vec floats(Sum s) {
    return {_mm256_cvtepi32_ps(__m256i(s.lo)), _mm256_cvtepi32_ps(__m256i(s.hi))};
  }

  // Columns 0 to 3 and 8 to 11 in the lower half, the others in the upper one: in 128-bit lanes it takes one shuffle.
  TANDEM_INLINE static Lines bytes(const uint8_t* p) { return {joined(p), joined(p + 64)}; }
  TANDEM_INLINE static Sum dot_bytes(Sum s, const Lines& w, X a, X b) {
    return {s.lo + signed_products(w.a.lo, a) + signed_products(w.b.lo, b),
            s.hi + signed_products(w.a.hi, a) + signed_products(w.b.hi, b)};
  }
  TANDEM_INLINE static Isa::Vec byte_floats(Sum s) {
    const __m256i lo = __m256i(s.lo), hi = __m256i(s.hi);
    return floats({Eight(_mm256_permute2x128_si256(lo, hi, 0x20)), Eight(_mm256_permute2x128_si256(lo, hi, 0x31))});
  }

  TANDEM_INLINE static Lines nibbles(const uint8_t* p) {
    const __m256i lo = load(p), hi = load(p + 32);
    return {{low4(lo), low4(hi)}, {low4(_mm256_srli_epi16(lo, 4)), low4(_mm256_srli_epi16(hi, 4))}};
  }
  template <int at>
  TANDEM_INLINE static Lines sixes(const uint8_t* low, const uint8_t* high) {
    const Lines w = nibbles(low);
    const __m256i lo = load(high), hi = load(high + 32);
    return {{with_bits<at>(w.a.lo, lo), with_bits<at>(w.a.hi, hi)},
            {with_bits<at + 2>(w.b.lo, lo), with_bits<at + 2>(w.b.hi, hi)}};
  }
  template <int at>
  TANDEM_INLINE static Lines twos(const uint8_t* p) {
    const __m256i lo = load(p), hi = load(p + 32);
    return {{low2<at>(lo), low2<at>(hi)}, {low2<at + 2>(lo), low2<at + 2>(hi)}};
  }
  template <int half>
  TANDEM_INLINE static Lines threes(const uint8_t* words, const uint8_t* bytes) {
    const Line lo = three_bits<half>(load(words), bytes), hi = three_bits<half>(load(words + 32), bytes + 16);
    return {{lo.lo, hi.lo}, {lo.hi, hi.hi}};
  }
  TANDEM_INLINE static Lines nl4(Lines w) {
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kNl4)));
    return {{_mm256_shuffle_epi8(values, w.a.lo), _mm256_shuffle_epi8(values, w.a.hi)},
            {_mm256_shuffle_epi8(values, w.b.lo), _mm256_shuffle_epi8(values, w.b.hi)}};
  }
  TANDEM_INLINE static Lines flipped(Lines w, int sign) {
    const __m256i bit = _mm256_set1_epi8(int8_t(sign));
    return {{_mm256_xor_si256(w.a.lo, bit), _mm256_xor_si256(w.a.hi, bit)},
            {_mm256_xor_si256(w.b.lo, bit), _mm256_xor_si256(w.b.hi, bit)}};
  }
  TANDEM_INLINE static Lines twice_e2m1(Lines w) {
    const __m256i values =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return {{_mm256_shuffle_epi8(values, w.a.lo), _mm256_shuffle_epi8(values, w.a.hi)},
            {_mm256_shuffle_epi8(values, w.b.lo), _mm256_shuffle_epi8(values, w.b.hi)}};
  }
  TANDEM_INLINE static Sum dot_small(Sum s, const Lines& w, X a, X b) {
    return {s.lo + small_products(w.a.lo, w.b.lo, a, b), s.hi + small_products(w.a.hi, w.b.hi, a, b)};
  }

  TANDEM_INLINE static Sum signed_scales(const uint8_t* p) {
    return {Eight(_mm256_cvtepi8_epi32(eight(p))), Eight(_mm256_cvtepi8_epi32(eight(p + 8)))};
  }
  TANDEM_INLINE static Sum low_nibbles(const uint8_t* p) { return {nibble(p), nibble(p + 8)}; }
  template <int bit>
  TANDEM_INLINE static Sum odd_scales(const uint8_t* p) {
    return {odd<bit>(p), odd<bit>(p + 8)};
  }
  TANDEM_INLINE static Sum add_product(Sum s, Sum a, Sum b) {
    return {s.lo + Eight(_mm256_mullo_epi32(__m256i(a.lo), __m256i(b.lo))),
            s.hi + Eight(_mm256_mullo_epi32(__m256i(a.hi), __m256i(b.hi)))};
  }
  template <bool nibbles>
  TANDEM_INLINE static Line shifts(const uint8_t* p) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16));
    const __m128i lo = _mm_unpacklo_epi8(a, b), hi = _mm_unpackhi_epi8(a, b);
    if constexpr (nibbles)
      return {_mm256_srli_epi16(_mm256_cvtepu8_epi16(lo), 4), _mm256_srli_epi16(_mm256_cvtepu8_epi16(hi), 4)};
    return {_mm256_cvtepi8_epi16(lo), _mm256_cvtepi8_epi16(hi)};
  }
  TANDEM_INLINE static Sum dot_shifts(Sum s, const Line& two, X x) {
    return {s.lo + Eight(_mm256_madd_epi16(two.lo, x)), s.hi + Eight(_mm256_madd_epi16(two.hi, x))};
  }
  using Grids = Avx2Grids;
  TANDEM_INLINE static Isa::Vec row_floats(const Grids::Sum& s) {
    return floats({Eight(Grids::columns(s, 0)), Eight(Grids::columns(s, 1))});
  }

  TANDEM_INLINE static void store_codes(uint8_t* p, Isa::Vec q, bool split) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(q.lo), _mm256_cvtps_epi32(q.hi));  // by 128-bit halves
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i codes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), split ? _mm_shuffle_epi8(codes, order) : codes);
  }

 private:
  TANDEM_INLINE static __m256i load(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  TANDEM_INLINE static __m128i eight(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
  TANDEM_INLINE static Eight nibble(const uint8_t* p) {
    return Eight(_mm256_and_si256(_mm256_cvtepu8_epi32(eight(p)), _mm256_set1_epi32(15)));
  }
  template <int bit>
  TANDEM_INLINE static Eight odd(const uint8_t* p) {
    const __m256i bytes = _mm256_cvtepu8_epi32(eight(p));
    const __m256i twice = bit ? _mm256_srli_epi32(bytes, 3) : _mm256_slli_epi32(bytes, 1);
    return Eight(_mm256_or_si256(_mm256_and_si256(twice, _mm256_set1_epi32(30)), _mm256_set1_epi32(1)));
  }
  TANDEM_INLINE static __m256i low4(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
  template <int at>
  TANDEM_INLINE static __m256i low2(__m256i a) {
    return _mm256_and_si256(_mm256_srli_epi16(a, at), _mm256_set1_epi8(3));
  }
  TANDEM_INLINE static __m256i either(__m256i a, __m256i b, int of_b) {
    return _mm256_or_si256(a, _mm256_and_si256(b, _mm256_set1_epi16(int16_t(of_b))));
  }
  // Of 8 rows, both lines' halves: pairs 0 and 2 or 4 and 6, and those that follow.
  template <int half>
  TANDEM_INLINE static Line three_bits(__m256i w, const uint8_t* bytes) {
    const __m256i seven = _mm256_set1_epi16(7);
    if constexpr (half == 0)
      return {either(_mm256_and_si256(w, seven), _mm256_slli_epi16(w, 2), 0x700),
              either(_mm256_and_si256(_mm256_srli_epi16(w, 3), seven), _mm256_srli_epi16(w, 1), 0x700)};
    const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __m256i last = either(_mm256_and_si256(b, seven), _mm256_slli_epi16(b, 3), 0x600);
    return {either(_mm256_and_si256(_mm256_srli_epi16(w, 12), seven), _mm256_slli_epi16(b, 5), 0x700),
            either(last, _mm256_srli_epi16(w, 7), 0x100)};
  }
  // Two pairs of k, [2][16][2], as 4 bytes of every column.
  TANDEM_INLINE static Line joined(const uint8_t* p) {
    const __m256i first = load(p), second = load(p + 32);
    return {_mm256_unpacklo_epi16(first, second), _mm256_unpackhi_epi16(first, second)};
  }
  // Bits at, at + 1 of every byte become bits 4, 5. No bit comes from a neighbouring byte that the mask would keep.
  template <int at>
  TANDEM_INLINE static __m256i with_bits(__m256i low, __m256i high) {
    const __m256i moved = at < 4 ? _mm256_slli_epi16(high, 4 - at) : _mm256_srli_epi16(high, at - 4);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
  }
  TANDEM_INLINE static Eight four_at_once(__m256i words) {
    return Eight(_mm256_madd_epi16(words, _mm256_set1_epi16(1)));
  }
  TANDEM_INLINE static Eight signed_products(__m256i w, __m256i x) {
    return four_at_once(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)));
  }
  TANDEM_INLINE static Eight small_products(__m256i wa, __m256i wb, __m256i a, __m256i b) {
    return four_at_once(_mm256_add_epi16(_mm256_maddubs_epi16(wa, a), _mm256_maddubs_epi16(wb, b)));
  }
};

}  // namespace
}  // namespace tandem
