// What AVX512-FP16 adds to tiers that unpack weights for matrix tiles: codes times the scales of their group as lines
// of bf16, 32 at a time. Every CPU with AMX has it. A code is a half, exactly; so is a scale of up to 11 bits times
// 2^16, where its exponent allows. Their product is rounded to 11 bits and, moved down by 3, to bf16's 8: together at
// most a relative 2^-8 + 2^-11, and 2^-11 more for scales of more bits. Half has 5 bits of exponent and bf16 8, with a
// bias 112 higher: 96 are added as the two bits above the five, and the rest is the 2^16.
// Code 0 gets no such bits and stays 0.
//
// All of it goes through two ports: a line of int4 is 6 operations, of mxfp4 3, Q4_K 7, fp8 8, with floats 10. Lookups
// of bytes instead of words, as many instructions, took 0.86 to 0.92 of the time (int4, 64 tokens of DeepSeek-V3's
// shape).
#pragma once

#include "isa/avx512_bf16.h"

namespace tandem {
namespace {

// A format's codes as halves, less `offset`: sizes of the largest and of the smallest that is not 0, and what a half of
// 1 counts. With an offset they are for shifted_line alone.
struct HalfRange {
  float largest, smallest, unit, offset;
};

struct Avx512Fp16Isa : Avx512Bf16Isa {
  static constexpr int kWideRows = 0;              // four panels at once were not timed with it
  static constexpr float kUnitOfHalves = 0x1p-9f;  // a scale that all codes take without being rounded
  // Scales times 2^16, of even and odd k alike, and what is added to codes times scales; as halves.
  struct ScaledHalves {
    __m512i scale, shift;
  };
  // A pair of k of a panel: codes, and 96 << 7, or 0 where the code is 0.
  struct Halves {
    __m512i codes, exponents;
  };
  static constexpr HalfRange kInt4Range = {8, 1, 1, 0}, kUint4Range = {8, 1, 1, 8}, kInt6Range = {32, 1, 1, 0},
                             kNl4Range = {127, 1, 1, 0}, kUint2Range = {3, 1, 1, 0}, kInt3Range = {4, 1, 1, 0},
                             kInt8Range = {128, 1, 1, 0}, kFp4Range = {6, 0.5f, 1, 0},
                             kFp8Range = {448, 0x1p-9f, 256, 0};

  // False if a column's scale leaves products that are no normal halves, or is no number.
  TANDEM_INLINE static bool scaled_halves(Vec scale, HalfRange codes, ScaledHalves& table) {
    const float smallest = 0x1p-30f / codes.smallest, largest = 0.999f / codes.largest;
    const __m512i least = _mm512_set1_epi32(int(bits_of_float(smallest)));
    const __m512i size = _mm512_and_si512(_mm512_castps_si512(scale), _mm512_set1_epi32(0x7fffffff));
    const __m512i range = _mm512_set1_epi32(int(bits_of_float(largest) - bits_of_float(smallest)));
    if (_mm512_cmpgt_epu32_mask(_mm512_sub_epi32(size, least), range)) return false;
    table.scale = halves_of(_mm512_mul_ps(scale, _mm512_set1_ps(0x1p16f * codes.unit)));
    return true;
  }
  // The same, for scales that are e4m3 numbers, times unit. False if one is 0.
  TANDEM_INLINE static bool e4m3_halves(const uint8_t* p, float unit, ScaledHalves& table) {
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    if (_mm256_test_epi16_mask(codes, _mm256_set1_epi16(0x7f)) != 0xffff) return false;
    const __m256i small = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(int16_t(0xbfff)));
    table.scale = twice(__m256i(_mm256_mul_ph(__m256h(small), _mm256_set1_ph(_Float16(0x1p24f * unit)))));
    return true;
  }
  // With shifts: scale, shift and sum are rounded to 11 bits each. The shift has `offset` scales in it. So codes of 4
  // bits are off by up to 2^-7 of a scale. False if a column's weights may be too large, or are all so small,
  // but not 0, that halves would round them more.
  TANDEM_INLINE static bool shifted_halves(Vec scale, Vec shift, HalfRange codes, ScaledHalves& table) {
    shift = _mm512_fmadd_ps(scale, _mm512_set1_ps(codes.offset), shift);
    const Vec size = _mm512_fmadd_ps(_mm512_abs_ps(scale), _mm512_set1_ps(codes.largest), _mm512_abs_ps(shift));
    const __mmask16 fits = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.999f), _CMP_LE_OQ);
    const __mmask16 tiny = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-17f), _CMP_LT_OQ);
    if (fits != 0xffff || _mm512_mask_cmp_ps_mask(tiny, size, _mm512_setzero_ps(), _CMP_NEQ_OQ)) return false;
    table.scale = halves_of(_mm512_mul_ps(scale, _mm512_set1_ps(0x1p16f * codes.unit)));
    table.shift = halves_of(_mm512_mul_ps(shift, _mm512_set1_ps(0x1p16f)));
    return true;
  }

  TANDEM_INLINE static Lane::Line scaled_line(const Halves& w, const ScaledHalves& table) {
    return line_of_halves(__m512i(_mm512_mul_ph(__m512h(w.codes), __m512h(table.scale))), w.exponents);
  }
  TANDEM_INLINE static Lane::Line shifted_line(const Halves& w, const ScaledHalves& table) {
    const __m512i sum = __m512i(_mm512_fmadd_ph(__m512h(w.codes), __m512h(table.scale), __m512h(table.shift)));
    return line_of_halves(sum, exponents(_mm512_test_epi16_mask(sum, _mm512_set1_epi16(0x7fff))));
  }

  TANDEM_INLINE static Halves halves_int4(const uint8_t* p, int index) {
    return nibbles(p, index,
                   _mm_setr_epi8(0, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47, -0x38, -0x39, -0x3a, -0x3b, -0x3c, -0x3e,
                                 -0x40, -0x44),
                   nibble_exponents());
  }
  TANDEM_INLINE static Halves halves_fp4(const uint8_t* p, int index) {
    return nibbles(p, index,
                   _mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, -0x80, -0x48, -0x44, -0x42, -0x40, -0x3e,
                                 -0x3c, -0x3a),
                   _mm_insert_epi8(nibble_exponents(), 0, 8));  // -0
  }
  // Less 8, and so with an upper byte only, too. What is shifted anyway needs no exponents.
  TANDEM_INLINE static Halves halves_uint4(const uint8_t* p, int index) {
    const __m128i values = _mm_setr_epi8(-0x38, -0x39, -0x3a, -0x3b, -0x3c, -0x3e, -0x40, -0x44, 0, 0x3c, 0x40, 0x42,
                                         0x44, 0x45, 0x46, 0x47);
    return nibbles(p, index, values, _mm_setzero_si128());
  }
  TANDEM_INLINE static Halves halves_int6(const uint8_t* p, int index) {
    return integers(_mm512_srai_epi16(six_on_top(p, index), 10));
  }
  TANDEM_INLINE static Halves halves_nl4(const uint8_t* p, int index) {
    const __m512i codes = _mm512_srli_epi16(_mm512_loadu_si512(p), unsigned(4 * index));
    return {_mm512_permutexvar_epi16(codes, _mm512_load_si512(kNl4Tables.halves)), _mm512_set1_epi16(96 << 7)};
  }
  TANDEM_INLINE static Halves halves_uint2(const uint8_t* p, int index) {
    return few_values(two_bits(p, index), eight_values(0, 0x3c00, 0x4000, 0x4200, 0, 0x3c00, 0x4000, 0x4200),
                      eight_values(0, 96 << 7, 96 << 7, 96 << 7, 0, 96 << 7, 96 << 7, 96 << 7));
  }
  TANDEM_INLINE static Halves halves_int3(const uint8_t* p, int index) {
    return few_values(three_bits(p, index), eight_values(0, 0x3c00, 0x4000, 0x4200, -0x3c00, -0x3e00, -0x4000, -0x4400),
                      eight_values(0, 96 << 7, 96 << 7, 96 << 7, 96 << 7, 96 << 7, 96 << 7, 96 << 7));
  }
  TANDEM_INLINE static Halves halves_int8(const uint8_t* p, int) {
    return integers(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
  // Moved up by 7, e4m3 numbers are halves, 2^8 too small, subnormal ones as well; their sign is in bit 14, too.
  TANDEM_INLINE static Halves halves_fp8(const uint8_t* p, int) {
    const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_and_si512(_mm512_slli_epi16(codes, 7), _mm512_set1_epi16(int16_t(0xbfff))),
            exponents(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x7f)))};
  }

 private:
  TANDEM_INLINE static __m512i twice(__m256i halves) {
    const __m512i order = _mm512_setr_epi32(0x00000, 0x10001, 0x20002, 0x30003, 0x40004, 0x50005, 0x60006, 0x70007,
                                            0x80008, 0x90009, 0xa000a, 0xb000b, 0xc000c, 0xd000d, 0xe000e, 0xf000f);
    return _mm512_permutexvar_epi16(order, _mm512_castsi256_si512(halves));
  }
  TANDEM_INLINE static __m512i halves_of(Vec a) { return twice(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
  TANDEM_INLINE static Lane::Line line_of_halves(__m512i halves, __m512i exponents) {
    // (x + 4) >> 3; a sign is then in bits 15 to 12, and wanted in 15 alone.
    const __m512i moved = _mm512_mulhrs_epi16(halves, _mm512_set1_epi16(1 << 12));
    return _mm512_ternarylogic_epi32(moved, _mm512_set1_epi16(int16_t(0x8fff)), exponents, 0xea);  // (a & b) | c
  }
  TANDEM_INLINE static __m512i exponents(__mmask32 any) {
    return _mm512_maskz_mov_epi16(any, _mm512_set1_epi16(96 << 7));
  }
  TANDEM_INLINE static Halves few_values(__m512i codes, __m512i values, __m512i exponents) {
    return {_mm512_permutexvar_epi16(codes, values), _mm512_permutexvar_epi16(codes, exponents)};
  }
  TANDEM_INLINE static Halves integers(__m512i codes) {
    return {__m512i(_mm512_cvtepi16_ph(codes)), exponents(_mm512_test_epi16_mask(codes, codes))};
  }
  // Upper bytes of halves and of exponents; the lower ones are 0. A lookup reads 6 bits, of which 2 are a neighbour's:
  // all stands there four times.
  TANDEM_INLINE static Halves nibbles(const uint8_t* p, int index, __m128i values, __m128i exponents) {
    const __m512i lanes = _mm512_loadu_si512(p), codes = index == 2 ? lanes : shifted_left(lanes, 8 - 4 * index);
    const __mmask64 upper = 0xaaaaaaaaaaaaaaaa;
    return {_mm512_maskz_permutexvar_epi8(upper, codes, _mm512_broadcast_i32x4(values)),
            _mm512_maskz_permutexvar_epi8(upper, codes, _mm512_broadcast_i32x4(exponents))};
  }
  TANDEM_INLINE static __m128i nibble_exponents() { return _mm_insert_epi8(_mm_set1_epi8(96 >> 1), 0, 0); }
};

}  // namespace
}  // namespace tandem
