// Integer products with AVX-512 VNNI: unsigned bytes times signed ones, four products added to 32 bits without
// saturation.
#pragma once

#include "isa/avx512_bf16.h"
#include "isa/grid_bytes.h"
#include "isa/int8_avx512.h"

namespace tandem {
namespace {

// Where the bytes of two blocks of digits (format/digit_row.h) are among 16 lanes of 32 bits.
struct DigitOrder {
  alignas(64) uint8_t at[64];
};
constexpr DigitOrder digit_order(bool split) {
  DigitOrder order{};
  for (int i = 0; i < 48; ++i) {
    const int k = split ? kSplitOrder[i % 8] : i % 8;
    order.at[i] = uint8_t(4 * (i / 24 * 8 + k) + i % 24 / 8);
  }
  return order;
}
constexpr DigitOrder kDigitOrder[2] = {digit_order(false), digit_order(true)};

struct VnniInts : Avx512Ints {
  using Isa = Avx512Bf16Isa;
  static constexpr int kRows = 12;
  static constexpr int kDigitRows = 4;  // 2 panels x 3 digits each: 24 of 32 registers
  static constexpr int kByteOffset = 128;

  TANDEM_INLINE static Lines bytes(const uint8_t* p) { return {joined(p), joined(p + 64)}; }
  TANDEM_INLINE static Lines nl4(Lines w) {
    const Lines values = Avx512Ints::nl4(w);
    return flipped(values, 128);
  }
  TANDEM_INLINE static Sum dot_bytes(Sum s, const Lines& w, X a, X b) { return dot_small(s, w, a, b); }
  TANDEM_INLINE static Sum dot_small(Sum s, const Lines& w, X a, X b) {
    return Sum(_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(__m512i(s), w.a, a), w.b, b));
  }

  TANDEM_INLINE static Sum dot_shifts(Sum s, Line two, X x) { return Sum(_mm512_dpwssd_epi32(__m512i(s), two, x)); }
  static constexpr bool kAsksAhead = false;  // see micro/block.h
  static constexpr bool kGridBytes = true;
  template <Format kGrid, class Each>
  TANDEM_INLINE static void grid_bytes(const uint8_t* blocks, Each each) {
    each_grid_line<kGrid>(blocks, [&](int k, __m512i a, __m512i b) TANDEM_ALWAYS_INLINE { each(0, k, Lines{a, b}); });
  }

  TANDEM_INLINE static Sum joined(Sum high, Sum low) { return (high << 8) + low; }
  using Magnitude = __m512i;
  TANDEM_INLINE static Magnitude no_magnitude() { return _mm512_setzero_si512(); }
  TANDEM_INLINE static Magnitude larger(Magnitude most, Isa::Vec v) {
    return _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff)));
  }
  TANDEM_INLINE static uint32_t largest_bits(Magnitude most) { return _mm512_reduce_max_epu32(most); }
  // Of every four bytes that are stored; lanes 0 and 1 belong to digit 0, and so on, 6 to 11 likewise.
  using DigitSums = __m512i;
  TANDEM_INLINE static DigitSums no_digits() { return _mm512_setzero_si512(); }
  TANDEM_INLINE static DigitSums store_digits(uint8_t* p, Isa::Vec values, bool split, DigitSums sums) {
    const __m512i halves = _mm512_set1_epi32(0x808080);
    const __m512i borrowed = _mm512_add_epi32(_mm512_cvtps_epi32(values), halves);
    const __m512i digits =
        _mm512_permutexvar_epi8(_mm512_load_si512(kDigitOrder[split].at), _mm512_xor_si512(borrowed, halves));
    _mm512_mask_storeu_epi8(p, 0xffffffffffff, digits);
    return _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), digits);
  }
  TANDEM_INLINE static void reduce_digits(DigitSums sums, int32_t* to) {
    const __m512i blocks = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, sums, 6));
    const __m512i pairs = _mm512_add_epi32(blocks, _mm512_shuffle_epi32(blocks, _MM_PERM_CDAB));
    alignas(64) int32_t lanes[16];
    _mm512_store_si512(lanes, pairs);
    for (int d = 0; d < 3; ++d) to[d] = lanes[2 * d];
  }

 private:
  // As Avx512Ints, + 128; by bytes, which takes one instruction less than by words.
  TANDEM_INLINE static Line joined(const uint8_t* p) {
    const __m512i columns = _mm512_cvtepu8_epi32(
        _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));  // bytes 2c, 2c + 1, 32 more of both
    const __m512i order =
        _mm512_add_epi8(_mm512_mullo_epi32(columns, _mm512_set1_epi32(0x01010101)), _mm512_set1_epi32(0x21200100));
    return _mm512_xor_si512(_mm512_permutexvar_epi8(order, _mm512_loadu_si512(p)), _mm512_set1_epi8(int8_t(0x80)));
  }
};

}  // namespace
}  // namespace tandem
