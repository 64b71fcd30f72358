// What AVX512-FP16 adds to tiers that unpack weights for matrix tiles (every CPU with AMX has it): codes times the
// scales of their group as lines of bf16, 32 at a time. A code is a half, exactly; so is a scale of up to 11 bits times
// 2^16, where its exponent allows. Their product is rounded to 11 bits and, moved down by 3, to bf16's 8: together at
// most a relative 2^-8 + 2^-11, and 2^-11 more for scales of more bits. Half has 5 bits of exponent and bf16 8, with a
// bias 112 higher: 96 are added as the two bits above the five, and the rest is the 2^16.
// Code 0 gets no such bits and stays 0.
#pragma once

#include "isa/avx512_bf16.h"

namespace tandem {
namespace {

struct Avx512Fp16Isa : Avx512Bf16Isa {
  static constexpr float kUnitOfHalves = 0x1p-9f;  // a scale that all codes take without being rounded
  struct ScaledHalves {
    __m512i scale;  // times 2^16; of even and odd k alike
  };
  // False if a column's scale is below 2^-20, or times 2^16 and the largest code above half's largest, or no number.
  // unit: how much a code counts, a power of two.
  TANDEM_INLINE static bool scaled_halves(Vec scale, float largest, float unit, ScaledHalves& table) {
    const __m512i bits = _mm512_castps_si512(scale), least = _mm512_set1_epi32(int(bits_of_float(0x1p-20f)));
    const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __m512i range = _mm512_set1_epi32(int(bits_of_float(0.999f / largest) - bits_of_float(0x1p-20f)));
    if (_mm512_cmpgt_epu32_mask(_mm512_sub_epi32(size, least), range)) return false;
    const __m256i halves =
        _mm512_cvtps_ph(_mm512_mul_ps(scale, _mm512_set1_ps(0x1p16f * unit)), _MM_FROUND_TO_NEAREST_INT);
    table.scale = _mm512_permutexvar_epi16(twice(), _mm512_castsi256_si512(halves));
    return true;
  }

  TANDEM_INLINE static bool scaled_int4(Vec scale, ScaledHalves& table) { return scaled_halves(scale, 8, 1, table); }
  TANDEM_INLINE static Lane::Line decode_scaled_int4(const uint8_t* p, int index, const ScaledHalves& table) {
    const __m512i codes = _mm512_srli_epi16(_mm512_loadu_si512(p), 4 * index);
    return scaled_line(_mm512_permutexvar_epi16(codes, int4_halves()), table,
                       _mm512_permutexvar_epi16(codes, int4_exponents()));
  }

  TANDEM_INLINE static bool scaled_int8(Vec scale, ScaledHalves& table) { return scaled_halves(scale, 128, 1, table); }
  TANDEM_INLINE static Lane::Line decode_scaled_int8(const uint8_t* p, const ScaledHalves& table) {
    const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return scaled_line(__m512i(_mm512_cvtepi16_ph(codes)), table, exponents(_mm512_test_epi16_mask(codes, codes)));
  }

  // Moved up by 7, e4m3 numbers are halves, 2^8 too small, subnormal ones as well; their sign is in bit 14, too.
  TANDEM_INLINE static bool scaled_fp8(Vec scale, ScaledHalves& table) { return scaled_halves(scale, 448, 256, table); }
  TANDEM_INLINE static Lane::Line decode_scaled_fp8(const uint8_t* p, const ScaledHalves& table) {
    const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(codes, 7), _mm512_set1_epi16(int16_t(0xbfff)));
    return scaled_line(halves, table, exponents(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x7f))));
  }

 private:
  TANDEM_INLINE static __m512i twice() {  // 0, 0, 1, 1 ...
    return _mm512_setr_epi32(0x00000, 0x10001, 0x20002, 0x30003, 0x40004, 0x50005, 0x60006, 0x70007, 0x80008, 0x90009,
                             0xa000a, 0xb000b, 0xc000c, 0xd000d, 0xe000e, 0xf000f);
  }
  // exponents: 96 << 7, or 0 where the code is 0.
  TANDEM_INLINE static Lane::Line scaled_line(__m512i halves, const ScaledHalves& table, __m512i exponents) {
    const __m512i product = __m512i(_mm512_mul_ph(__m512h(halves), __m512h(table.scale)));
    // (x + 4) >> 3; a sign is then in bits 15 to 12, and wanted in 15 alone.
    const __m512i moved = _mm512_mulhrs_epi16(product, _mm512_set1_epi16(1 << 12));
    return _mm512_ternarylogic_epi32(moved, _mm512_set1_epi16(int16_t(0x8fff)), exponents, 0xea);  // (a & b) | c
  }
  TANDEM_INLINE static __m512i exponents(__mmask32 any) {
    return _mm512_maskz_mov_epi16(any, _mm512_set1_epi16(96 << 7));
  }
  TANDEM_INLINE static __m512i int4_exponents() {
    const __m256i any = _mm256_set1_epi16(96 << 7);
    return _mm512_broadcast_i64x4(_mm256_insert_epi16(any, 0, 0));
  }
  TANDEM_INLINE static __m512i int4_halves() {
    const __m256i values = _mm256_setr_epi16(0x0000, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700, -0x3800,
                                             -0x3900, -0x3a00, -0x3b00, -0x3c00, -0x3e00, -0x4000, -0x4400);
    return _mm512_broadcast_i64x4(values);
  }
};

}  // namespace
}  // namespace tandem
