// Tier "avx512": F, BW, VL, DQ. Weights are multiplied as float.
#pragma once

#include <immintrin.h>

#include "abi/weight_view.h"
#include "isa/inline.h"

namespace tandem {
namespace {

struct Avx512Isa {
  using Vec = __m512;
  struct FloatLane {
    static constexpr DType kType = DType::f32;
    static constexpr int kLinesPerPair = 2;
    using Line = Vec;
    using XLine = __m512;
    TANDEM_INLINE static Line load_line(const void* p) { return _mm512_loadu_ps(p); }
    TANDEM_INLINE static void store_line(void* p, Line a) { _mm512_storeu_ps(p, a); }
    TANDEM_INLINE static XLine x_line(const void* p) { return _mm512_set1_ps(*static_cast<const float*>(p)); }
    TANDEM_INLINE static Vec dot(Vec sum, Line w, XLine x) { return _mm512_fmadd_ps(w, x, sum); }
    // sums += w * the number at x, of four panels. As written: GCC 12 loads numbers of other rows before, and spills.
    TANDEM_INLINE static void dot_four(Vec* sums, const Line* w, const void* x) {
      XLine line;
      __asm__(
          "vbroadcastss %[x], %[line]\n\t"
          "vfmadd231ps %[line], %[w0], %[s0]\n\t"
          "vfmadd231ps %[line], %[w1], %[s1]\n\t"
          "vfmadd231ps %[line], %[w2], %[s2]\n\t"
          "vfmadd231ps %[line], %[w3], %[s3]"
          : [s0] "+&v"(sums[0]), [s1] "+&v"(sums[1]), [s2] "+&v"(sums[2]), [s3] "+&v"(sums[3]), [line] "=&v"(line)
          : [w0] "v"(w[0]), [w1] "v"(w[1]), [w2] "v"(w[2]), [w3] "v"(w[3]), [x] "m"(*static_cast<const float*>(x)));
    }
  };
  using Lane = FloatLane;
  struct Pair {
    Lane::Line line[Lane::kLinesPerPair];
  };
  // Rows x panels accumulators of 32 registers (kDotRows: x 2 panels); decoding in dot_rows needs some more of them.
  static constexpr int kDotRows = 8;
  static constexpr int kWideRows = 2;  // that take four panels at once
  static constexpr int kTileRows = 6;
  static constexpr int kTilePanels = 4;

  TANDEM_INLINE static Vec set1(float a) { return _mm512_set1_ps(a); }
  TANDEM_INLINE static Vec zero() { return _mm512_setzero_ps(); }
  TANDEM_INLINE static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  TANDEM_INLINE static void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
  TANDEM_INLINE static void stream(float* p, Vec a) { _mm512_stream_ps(p, a); }  // past the caches, p aligned
  TANDEM_INLINE static void streamed() { _mm_sfence(); }                         // before others are told
  TANDEM_INLINE static Vec load_bf16(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  TANDEM_INLINE static Vec load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  TANDEM_INLINE static Vec load_int8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  TANDEM_INLINE static Vec load_nibbles(const uint8_t* p, int bit) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(bytes, unsigned(bit)), _mm512_set1_epi32(15)));
  }
  TANDEM_INLINE static Vec load_e8m0(const uint8_t* p) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i half = _mm512_set1_epi32(0x00400000), bits = _mm512_max_epi32(_mm512_slli_epi32(code, 23), half);
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(255));
    return _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, nan, bits, half));
  }
  TANDEM_INLINE static Vec load_e4m3(const uint8_t* p) {
    const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return e4m3_on_top(_mm256_slli_epi16(code, 8));
  }
  TANDEM_INLINE static void store_bf16(uint16_t* p, Vec a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
  }
  TANDEM_INLINE static void store_int8(uint8_t* p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
  }
  TANDEM_INLINE static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  TANDEM_INLINE static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  TANDEM_INLINE static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  TANDEM_INLINE static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  TANDEM_INLINE static Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  TANDEM_INLINE static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  TANDEM_INLINE static Vec where_greater(Vec a, Vec b, Vec x, Vec y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
  }
  TANDEM_INLINE static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  TANDEM_INLINE static Vec round(Vec a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  TANDEM_INLINE static Vec pow2(Vec n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
  }
  using Sums = __m512i;
  TANDEM_INLINE static Sums load_sums(const uint64_t* p) { return _mm512_loadu_si512(p); }
  TANDEM_INLINE static void store_sums(uint64_t* p, Sums a) { _mm512_storeu_si512(p, a); }
  TANDEM_INLINE static Sums mix(Sums a, const uint8_t* data, const uint8_t* secret) {
    const __m512i words = _mm512_loadu_si512(data), keyed = _mm512_xor_si512(words, _mm512_loadu_si512(secret));
    const __m512i products = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    return _mm512_add_epi64(_mm512_add_epi64(a, _mm512_shuffle_epi32(words, _MM_PERM_BADC)), products);
  }
  TANDEM_INLINE static Sums scramble(Sums a, const uint8_t* secret) {
    const __m512i mixed = _mm512_ternarylogic_epi64(a, _mm512_srli_epi64(a, 47), _mm512_loadu_si512(secret), 0x96);
    const __m512i prime = _mm512_set1_epi32(int(0x9e3779b1u));  // a 64-bit product takes three times as long
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
  }
  TANDEM_INLINE static float reduce_add(Vec a) { return _mm512_reduce_add_ps(a); }
  static constexpr int kAttentionRows = 4;
  // The same sums as reduce_add's, of four at once: halves, quarters, pairs.
  TANDEM_INLINE static void reduce_add_four(const Vec* a, float* out) {
    const Vec ab = _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x44), _mm512_shuffle_f32x4(a[0], a[1], 0xee));
    const Vec cd = _mm512_add_ps(_mm512_shuffle_f32x4(a[2], a[3], 0x44), _mm512_shuffle_f32x4(a[2], a[3], 0xee));
    const Vec each = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    const Vec pairs = _mm512_add_ps(each, _mm512_permute_ps(each, 0x4e));
    const Vec sums = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xb1));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(
                           _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), sums)));
  }
  TANDEM_INLINE static float reduce_max(Vec a) { return _mm512_reduce_max_ps(a); }

  TANDEM_INLINE static Pair decode_bf16(const uint8_t* p) {
    const __m512i a = _mm512_loadu_si512(p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(int(0xffff0000u))))};
  }
  TANDEM_INLINE static Pair decode_int8(const uint8_t* p) {
    const __m512i a = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(a, 16), 16)),
            _mm512_cvtepi32_ps(_mm512_srai_epi32(a, 16))};
  }
  TANDEM_INLINE static Pair decode_int4(const uint8_t* p, int index) {
    const __m512i a = _mm512_loadu_si512(p);  // a lookup uses the low 4 bits of each lane
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(a, 4 * index), int4_values()),
            _mm512_permutexvar_ps(_mm512_srli_epi32(a, 16 + 4 * index), int4_values())};
  }
  TANDEM_INLINE static Pair decode_uint4(const uint8_t* p, int index) {
    const __m512i a = _mm512_loadu_si512(p);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(a, 4 * index), uint4_values()),
            _mm512_permutexvar_ps(_mm512_srli_epi32(a, 16 + 4 * index), uint4_values())};
  }
  static constexpr float kInt6Unit = 1.0f;
  TANDEM_INLINE static Pair decode_int6(const uint8_t* p, int index) {
    const __m512i code = six_on_top(p, index);
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(code, 16), 26)),
            _mm512_cvtepi32_ps(_mm512_srai_epi32(code, 26))};
  }
  static constexpr float kNl4Unit = 1.0f;
  TANDEM_INLINE static Pair decode_nl4(const uint8_t* p, int index) {
    const __m512i a = _mm512_loadu_si512(p);
    const Vec values =
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kNl4))));
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(a, 4 * index), values),
            _mm512_permutexvar_ps(_mm512_srli_epi32(a, 16 + 4 * index), values)};
  }
  // A lookup uses 4 bits: tables of 4 and 8 values stand there several times.
  TANDEM_INLINE static Pair decode_uint2(const uint8_t* p, int index) {
    const __m512i a = _mm512_loadu_si512(p);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(a, six_bit(index)), uint2_values()),
            _mm512_permutexvar_ps(_mm512_srli_epi32(a, 16 + six_bit(index)), uint2_values())};
  }
  static constexpr float kInt3Unit = 1.0f;
  TANDEM_INLINE static Pair decode_int3(const uint8_t* p, int index) {
    const __m512i w = _mm512_loadu_si512(p);
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64)));
    const auto codes = [=](int half) {
      if (index < 5) return _mm512_srli_epi32(w, unsigned(3 * index + 16 * half));
      if (index < 7) return _mm512_srli_epi32(b, unsigned(3 * (index - 5) + 8 * half));
      return _mm512_ternarylogic_epi32(_mm512_set1_epi32(6), _mm512_srli_epi32(b, unsigned(5 + 8 * half)),
                                       _mm512_srli_epi32(w, unsigned(15 + 16 * half)), 0xca);  // a ? b : c
    };
    return {_mm512_permutexvar_ps(codes(0), int3_values()), _mm512_permutexvar_ps(codes(1), int3_values())};
  }
  TANDEM_INLINE static Pair decode_fp8(const uint8_t* p) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));  // 16-bit lane: (even, odd)
    return {e4m3_on_top(_mm256_slli_epi16(a, 8)), e4m3_on_top(a)};
  }
  TANDEM_INLINE static Pair decode_fp4(const uint8_t* p, int index) {
    const __m512i a = _mm512_loadu_si512(p);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(a, 4 * index), e2m1_values()),
            _mm512_permutexvar_ps(_mm512_srli_epi32(a, 16 + 4 * index), e2m1_values())};
  }
  TANDEM_INLINE static void interleave(const uint8_t* rows, int64_t stride, uint8_t* lines) {
    __m512i four[4][4];  // words c, c + 4, c + 8 and c + 12 of rows 4 i to 4 i + 3
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto row = [&](int r) { return _mm512_loadu_si512(rows + (4 * i + r) * stride); };
      const __m512i a = row(0), b = row(1), c = row(2), d = row(3);
      const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
      const __m512i cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
      four[i][0] = _mm512_unpacklo_epi64(ab_low, cd_low);
      four[i][1] = _mm512_unpackhi_epi64(ab_low, cd_low);
      four[i][2] = _mm512_unpacklo_epi64(ab_high, cd_high);
      four[i][3] = _mm512_unpackhi_epi64(ab_high, cd_high);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const __m512i even[2] = {_mm512_shuffle_i32x4(four[0][c], four[1][c], 0x88),
                               _mm512_shuffle_i32x4(four[2][c], four[3][c], 0x88)};
      const __m512i odd[2] = {_mm512_shuffle_i32x4(four[0][c], four[1][c], 0xdd),
                              _mm512_shuffle_i32x4(four[2][c], four[3][c], 0xdd)};
      _mm512_storeu_si512(lines + 64 * c, _mm512_shuffle_i32x4(even[0], even[1], 0x88));
      _mm512_storeu_si512(lines + 64 * (c + 4), _mm512_shuffle_i32x4(odd[0], odd[1], 0x88));
      _mm512_storeu_si512(lines + 64 * (c + 8), _mm512_shuffle_i32x4(even[0], even[1], 0xdd));
      _mm512_storeu_si512(lines + 64 * (c + 12), _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd));
    }
  }
  TANDEM_INLINE static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  TANDEM_INLINE static void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

  // 6-bit codes of pair `index` in the upper bits of 16-bit lanes; the lower 10 bits are of no meaning.
  TANDEM_INLINE static __m512i six_on_top(const uint8_t* p, int index) {
    const __m512i four = _mm512_loadu_si512(p + 64 * (index / 4)), two = _mm512_loadu_si512(p + 128);
    const __m512i lower = shifted_left(four, 10 - 4 * (index % 4)), upper = shifted_left(two, 14 - six_bit(index));
    const __m512i mask = _mm512_set1_epi16(int16_t(0xc000));
    return _mm512_ternarylogic_epi32(mask, upper, lower, 0xca);  // a ? b : c
  }
  // `by` may be negative.
  TANDEM_INLINE static __m512i shifted_left(__m512i a, int by) {
    return by < 0 ? _mm512_srli_epi16(a, unsigned(-by)) : _mm512_slli_epi16(a, unsigned(by));
  }

 private:
  TANDEM_INLINE static Vec int4_values() {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  }
  TANDEM_INLINE static Vec uint4_values() {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  TANDEM_INLINE static Vec uint2_values() { return _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3); }
  TANDEM_INLINE static Vec int3_values() {
    return _mm512_setr_ps(0, 1, 2, 3, -4, -3, -2, -1, 0, 1, 2, 3, -4, -3, -2, -1);
  }
  TANDEM_INLINE static Vec e2m1_values() {
    return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  }
  // The e4m3 numbers in the upper bytes of 16-bit lanes: moved down by one bit they are halves, 2^8 too small. That
  // holds for subnormals too; NaNs become 480 (see format/pack.h).
  TANDEM_INLINE static Vec e4m3_on_top(__m256i a) {
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(a, 1), _mm256_set1_epi16(int16_t(0xbf80)));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  }
};

}  // namespace
}  // namespace tandem
