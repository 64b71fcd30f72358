// Tier "avx2": AVX2 + FMA. A Vec is two registers; weights are multiplied as float.
#pragma once

#include <immintrin.h>

#include "abi/weight_view.h"
#include "isa/inline.h"

namespace tandem {
namespace {

struct Avx2Isa {
  struct Vec {
    __m256 lo, hi;
  };
  struct FloatLane {
    static constexpr DType kType = DType::f32;
    static constexpr int kLinesPerPair = 2;
    using Line = Vec;
    using XLine = __m256;
    TANDEM_INLINE static Line load_line(const void* p) { return load(static_cast<const float*>(p)); }
    TANDEM_INLINE static void store_line(void* p, Line a) { store(static_cast<float*>(p), a); }
    TANDEM_INLINE static XLine x_line(const void* p) { return _mm256_broadcast_ss(static_cast<const float*>(p)); }
    TANDEM_INLINE static Vec dot(Vec sum, Line w, XLine x) {
      return {_mm256_fmadd_ps(w.lo, x, sum.lo), _mm256_fmadd_ps(w.hi, x, sum.hi)};
    }
  };
  using Lane = FloatLane;
  struct Pair {
    Lane::Line line[Lane::kLinesPerPair];
  };
  // 6 rows x 1 panel = 12 accumulators of 16 registers, 2 for weights, 1 for an activation. (3 rows x 2 panels need one
  // more than there are: the spilled sum was the longest chain and halved the rate.) Decoding in dot_rows takes more.
  static constexpr int kDotRows = 2;
  static constexpr int kTileRows = 6;
  static constexpr int kTilePanels = 1;

  TANDEM_INLINE static Vec set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
  TANDEM_INLINE static Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  TANDEM_INLINE static Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  TANDEM_INLINE static void store(float* p, Vec a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
  }
  TANDEM_INLINE static void stream(float* p, Vec a) {  // past the caches, p aligned
    _mm256_stream_ps(p, a.lo);
    _mm256_stream_ps(p + 8, a.hi);
  }
  TANDEM_INLINE static void streamed() { _mm_sfence(); }  // before others are told
  TANDEM_INLINE static Vec load_bf16(const uint16_t* p) { return {widen(p), widen(p + 8)}; }
  TANDEM_INLINE static Vec load_f16(const uint16_t* p) {
    const __m128i lo = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i hi = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
    return {_mm256_cvtph_ps(lo), _mm256_cvtph_ps(hi)};
  }
  TANDEM_INLINE static Vec load_int8(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)))};
  }
  TANDEM_INLINE static Vec load_nibbles(const uint8_t* p, int bit) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {field(_mm256_cvtepu8_epi32(bytes), bit, 15),
            field(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)), bit, 15)};
  }
  TANDEM_INLINE static Vec load_e8m0(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {exponent_byte(bytes), exponent_byte(_mm_unpackhi_epi64(bytes, bytes))};
  }
  TANDEM_INLINE static Vec load_e4m3(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), zero = _mm_setzero_si128();
    return {e4m3_on_top(_mm_unpacklo_epi8(zero, bytes)), e4m3_on_top(_mm_unpackhi_epi8(zero, bytes))};
  }
  TANDEM_INLINE static void store_bf16(uint16_t* p, Vec a) {
    const __m256i packed = _mm256_packus_epi32(round_bf16(a.lo), round_bf16(a.hi));  // by 128-bit halves
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
  }
  TANDEM_INLINE static void store_int8(uint8_t* p, Vec a) {
    const __m256i halves = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));  // by 128-bit halves
    const __m256i order = _mm256_permute4x64_epi64(halves, 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1)));
  }
  TANDEM_INLINE static Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  TANDEM_INLINE static Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  TANDEM_INLINE static Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  TANDEM_INLINE static Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
  TANDEM_INLINE static Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
  TANDEM_INLINE static Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  TANDEM_INLINE static Vec where_greater(Vec a, Vec b, Vec x, Vec y) {
    return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
            _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
  }
  TANDEM_INLINE static Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  TANDEM_INLINE static Vec round(Vec a) { return {nearest(a.lo), nearest(a.hi)}; }
  TANDEM_INLINE static Vec pow2(Vec n) { return {exponent(n.lo), exponent(n.hi)}; }
  struct Sums {
    __m256i lo, hi;
  };
  TANDEM_INLINE static Sums load_sums(const uint64_t* p) { return {load_bytes(p), load_bytes(p + 4)}; }
  TANDEM_INLINE static void store_sums(uint64_t* p, Sums a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 4), a.hi);
  }
  TANDEM_INLINE static Sums mix(Sums a, const uint8_t* data, const uint8_t* secret) {
    return {mix_half(a.lo, data, secret), mix_half(a.hi, data + 32, secret + 32)};
  }
  TANDEM_INLINE static Sums scramble(Sums a, const uint8_t* secret) {
    return {scramble_half(a.lo, secret), scramble_half(a.hi, secret + 32)};
  }
  TANDEM_INLINE static float reduce_add(Vec a) {
    const __m256 s8 = _mm256_add_ps(a.lo, a.hi);
    const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
  }
  static constexpr int kAttentionRows = 1;
  TANDEM_INLINE static void reduce_add_four(const Vec* a, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = reduce_add(a[i]);
  }
  TANDEM_INLINE static float reduce_max(Vec a) {
    const __m256 s8 = _mm256_max_ps(a.lo, a.hi);
    const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_max_ss(s2, _mm_movehdup_ps(s2)));
  }

  TANDEM_INLINE static Pair decode_bf16(const uint8_t* p) {
    const __m256i a = load_bytes(p), b = load_bytes(p + 32), odd = _mm256_set1_epi32(int(0xffff0000u));
    return {Vec{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
            Vec{_mm256_castsi256_ps(_mm256_and_si256(a, odd)), _mm256_castsi256_ps(_mm256_and_si256(b, odd))}};
  }
  TANDEM_INLINE static Pair decode_int8(const uint8_t* p) {
    const __m256i a = widen_bytes(p), b = widen_bytes(p + 16);  // 32-bit lane: (even, odd) as 16-bit integers
    return {Vec{signed_field(a, 16, 16), signed_field(b, 16, 16)}, Vec{signed_field(a, 0, 16), signed_field(b, 0, 16)}};
  }
  TANDEM_INLINE static Pair decode_int4(const uint8_t* p, int index) {
    const __m256i a = load_bytes(p), b = load_bytes(p + 32);
    const int even = 28 - 4 * index, odd = 12 - 4 * index;
    return {Vec{signed_field(a, even, 28), signed_field(b, even, 28)},
            Vec{signed_field(a, odd, 28), signed_field(b, odd, 28)}};
  }
  TANDEM_INLINE static Pair decode_uint4(const uint8_t* p, int index) {
    const __m256i a = load_bytes(p), b = load_bytes(p + 32);
    const int even = 4 * index, odd = 16 + even;
    return {Vec{field(a, even, 15), field(b, even, 15)}, Vec{field(a, odd, 15), field(b, odd, 15)}};
  }
  // 2^26 times too large: only the upper 6 bits of 32-bit lanes are used, so that nothing need be shifted down.
  static constexpr float kInt6Unit = 1.0f / (1 << 26);
  TANDEM_INLINE static Pair decode_int6(const uint8_t* p, int index) {
    const __m256i a = six_bytes(p, index), b = six_bytes(p + 32, index);  // rows 0 to 7, 8 to 15
    return {Vec{top_byte(a, index % 4 / 2), top_byte(b, index % 4 / 2)},
            Vec{top_byte(a, 2 + index % 4 / 2), top_byte(b, 2 + index % 4 / 2)}};
  }
  // In the upper bytes of 32-bit lanes.
  static constexpr float kNl4Unit = 1.0f / (1 << 24);
  TANDEM_INLINE static Pair decode_nl4(const uint8_t* p, int index) {
    const __m256i a = nl4_bytes(p, index), b = nl4_bytes(p + 32, index);  // rows 0 to 7, 8 to 15
    return {Vec{top_byte(a, index / 2), top_byte(b, index / 2)},
            Vec{top_byte(a, 2 + index / 2), top_byte(b, 2 + index / 2)}};
  }
  // Codebooks: 8 k of 16 rows as signed bytes, rows 0 to 7 and 8 to 15 of the first and of the last four k. A byte is
  // moved to the top of its lane.
  static constexpr int kGridRows = 1;
  template <Format kGrid>
  static constexpr int kTileFromGridRows = kGrid == Format::iq3_s ? 1 : 2;  // with one row: 4.8 and 4.0 Gweights/s
  static constexpr float kGridUnit = 1.0f / (1 << 24);
  struct GridPart {
    static constexpr int kLines = 8;
    __m256i rows[2][2];
    TANDEM_INLINE Vec line(int k) const { return {top_byte(rows[k / 4][0], k % 4), top_byte(rows[k / 4][1], k % 4)}; }
  };
  // codes(r): bytes of row r. signs: of every row a byte, whose bits say which of them are negative.
  template <bool kSigned, class Codes>
  TANDEM_INLINE static GridPart grid_part(const Codes& codes, __m128i signs) {
    GridPart part;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256 a = four_rows(codes, 8 * i), b = four_rows(codes, 8 * i + 2);
      part.rows[0][i] = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
      part.rows[1][i] = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
      if constexpr (kSigned) {
        const __m256i four = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6,
                                              6, 6, 6, 7, 7, 7, 7);
        const __m256i of_rows = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(signs),
                                                    _mm256_add_epi8(four, _mm256_set1_epi8(int8_t(8 * i))));
        part.rows[0][i] = negated(part.rows[0][i], of_rows, 0x08040201);
        part.rows[1][i] = negated(part.rows[1][i], of_rows, int32_t(0x80402010));
      }
    }
    return part;
  }
  TANDEM_INLINE static __m128i grid_signs(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  // The upper 7 bits of 16 words, and an eighth that makes the number of ones even.
  TANDEM_INLINE static __m128i grid_signs_with_eighth(const uint8_t* p) {
    const __m256i seven = _mm256_srli_epi16(load_bytes(p), 9);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(seven), _mm256_extracti128_si256(seven, 1));
    const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    const __m128i odd = _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
    return _mm_or_si128(bytes, _mm_xor_si128(_mm_shuffle_epi8(odd, low), _mm_shuffle_epi8(odd, high)));
  }
  TANDEM_INLINE static Pair decode_uint2(const uint8_t* p, int index) {
    const __m256i a = load_bytes(p), b = load_bytes(p + 32);
    const int even = six_bit(index), odd = 16 + even;
    return {Vec{field(a, even, 3), field(b, even, 3)}, Vec{field(a, odd, 3), field(b, odd, 3)}};
  }
  // 2^29 too large, as int6: a mask takes any port, a shift back does not.
  static constexpr float kInt3Unit = 1.0f / (1 << 29);
  TANDEM_INLINE static Pair decode_int3(const uint8_t* p, int index) {
    const __m256i a = load_bytes(p), b = load_bytes(p + 32), c = widen_lanes(p + 64), d = widen_lanes(p + 80);
    if (index == 7)
      return {Vec{last_of_eight(a, c, 0), last_of_eight(b, d, 0)}, Vec{last_of_eight(a, c, 1), last_of_eight(b, d, 1)}};
    const __m256i lo = index < 5 ? a : c, hi = index < 5 ? b : d;
    const int even = index < 5 ? 29 - 3 * index : 44 - 3 * index, odd = even - (index < 5 ? 16 : 8);
    return {Vec{three_on_top(lo, even), three_on_top(hi, even)}, Vec{three_on_top(lo, odd), three_on_top(hi, odd)}};
  }
  TANDEM_INLINE static Pair decode_fp8(const uint8_t* p) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16));  // 16-bit lane: (even, odd)
    return {Vec{e4m3_on_top(_mm_slli_epi16(a, 8)), e4m3_on_top(_mm_slli_epi16(b, 8))},
            Vec{e4m3_on_top(a), e4m3_on_top(b)}};
  }
  TANDEM_INLINE static Pair decode_fp4(const uint8_t* p, int index) {
    const __m256i a = load_bytes(p), b = load_bytes(p + 32);
    return {Vec{e2m1_field(a, 4 * index), e2m1_field(b, 4 * index)},
            Vec{e2m1_field(a, 16 + 4 * index), e2m1_field(b, 16 + 4 * index)}};
  }
  TANDEM_INLINE static void interleave(const uint8_t* rows, int64_t stride, uint8_t* lines) {
    for (int half = 0; half < 4; ++half)
      interleave8(rows + half / 2 * 8 * stride + half % 2 * 32, stride, lines + half % 2 * 512 + half / 2 * 32);
  }
  TANDEM_INLINE static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  TANDEM_INLINE static void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

 private:
  // Rows r, r + 1 and, in the other half, r + 4, r + 5.
  template <class Codes>
  TANDEM_INLINE static __m256 four_rows(const Codes& codes, int r) {
    const auto both = [&](int first) { return _mm_set_epi64x(int64_t(codes(first + 1)), int64_t(codes(first))); };
    return _mm256_castsi256_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(both(r)), both(r + 4), 1));
  }
  // Bytes, negative where the bit of their place in a lane is set.
  TANDEM_INLINE static __m256i negated(__m256i bytes, __m256i signs, int32_t places) {
    const __m256i bits = _mm256_set1_epi32(places), set = _mm256_cmpeq_epi8(_mm256_and_si256(signs, bits), bits);
    return _mm256_sub_epi8(_mm256_xor_si256(bytes, set), set);
  }
  // 8 rows of 8 words to the halves of 8 lines.
  TANDEM_INLINE static void interleave8(const uint8_t* rows, int64_t stride, uint8_t* lines) {
    __m256i four[2][4];  // words c and c + 4 of rows 0 to 3, and of rows 4 to 7
    for (int i = 0; i < 2; ++i) {
      const auto row = [&](int r) { return load_bytes(rows + (4 * i + r) * stride); };
      const __m256i a = row(0), b = row(1), c = row(2), d = row(3);
      const __m256i ab_low = _mm256_unpacklo_epi32(a, b), ab_high = _mm256_unpackhi_epi32(a, b);
      const __m256i cd_low = _mm256_unpacklo_epi32(c, d), cd_high = _mm256_unpackhi_epi32(c, d);
      four[i][0] = _mm256_unpacklo_epi64(ab_low, cd_low);
      four[i][1] = _mm256_unpackhi_epi64(ab_low, cd_low);
      four[i][2] = _mm256_unpacklo_epi64(ab_high, cd_high);
      four[i][3] = _mm256_unpackhi_epi64(ab_high, cd_high);
    }
    for (int c = 0; c < 4; ++c) {
      const auto line = [&](int word) { return reinterpret_cast<__m256i*>(lines + 64 * word); };
      _mm256_storeu_si256(line(c), _mm256_permute2x128_si256(four[0][c], four[1][c], 0x20));
      _mm256_storeu_si256(line(c + 4), _mm256_permute2x128_si256(four[0][c], four[1][c], 0x31));
    }
  }
  TANDEM_INLINE static __m256i mix_half(__m256i a, const uint8_t* data, const uint8_t* secret) {
    const __m256i words = load_bytes(data), keyed = _mm256_xor_si256(words, load_bytes(secret));
    const __m256i products = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    return _mm256_add_epi64(_mm256_add_epi64(a, _mm256_shuffle_epi32(words, 0x4e)), products);
  }
  TANDEM_INLINE static __m256i scramble_half(__m256i a, const uint8_t* secret) {
    const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(a, _mm256_srli_epi64(a, 47)), load_bytes(secret));
    const __m256i prime = _mm256_set1_epi32(int(0x9e3779b1u));
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
  }
  // 8 rows' codes of pairs i and i + 2 (one of them `index`), each in the upper 6 bits of a byte: even k of i, even k
  // of i + 2, odd k of both.
  TANDEM_INLINE static __m256i six_bytes(const uint8_t* p, int index) {
    const __m256i four = load_bytes(p + 64 * (index / 4)), two = load_bytes(p + 128), mask = _mm256_set1_epi8(0x3c);
    const __m256i lower = index % 2 ? _mm256_srli_epi16(four, 2) : _mm256_slli_epi16(four, 2);
    const __m256i upper = _mm256_slli_epi16(two, 6 - 2 * (index % 2 + 2 * (index / 4)));
    return _mm256_or_si256(_mm256_and_si256(mask, lower), _mm256_and_si256(_mm256_set1_epi8(int8_t(0xc0)), upper));
  }
  // Byte `at` of every 32-bit lane, moved to its top, as float.
  TANDEM_INLINE static __m256 top_byte(__m256i a, int at) {
    if (at == 0) return _mm256_cvtepi32_ps(_mm256_slli_epi32(a, 24));
    if (at == 3) return _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(int(0xff000000u))));
    const __m256i lanes = _mm256_set_epi32(12, 8, 4, 0, 12, 8, 4, 0);
    const __m256i order = _mm256_or_si256(_mm256_slli_epi32(_mm256_add_epi32(lanes, _mm256_set1_epi32(at)), 24),
                                          _mm256_set1_epi32(0x00808080));
    return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(a, order));
  }
  // The lower 8 bytes: see float_of_e8m0.
  TANDEM_INLINE static __m256 exponent_byte(__m128i bytes) {
    const __m256i code = _mm256_cvtepu8_epi32(bytes), half = _mm256_set1_epi32(0x00400000);
    const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi32(code, _mm256_set1_epi32(255)), half);
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_max_epi32(_mm256_slli_epi32(code, 23), half), nan));
  }
  TANDEM_INLINE static __m256i load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  TANDEM_INLINE static __m256i widen_bytes(const uint8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // The signed bit field of every 32-bit lane that `left` moves to the top and `right` back down, as float.
  TANDEM_INLINE static __m256 three_on_top(__m256i a, int left) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_slli_epi32(a, left), _mm256_set1_epi32(int(0xe0000000u))));
  }
  TANDEM_INLINE static __m256 signed_field(__m256i a, int left, int right) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(a, left), right));
  }
  // The e4m3 numbers in the upper bytes of 16-bit lanes: moved down by one bit they are halves, 2^8 too small. That
  // holds for subnormals too; NaNs become 480 (see format/pack.h).
  TANDEM_INLINE static __m256 e4m3_on_top(__m128i a) {
    const __m128i half = _mm_and_si128(_mm_srai_epi16(a, 1), _mm_set1_epi16(int16_t(0xbf80)));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
  }
  // The e2m1 number at bit `shift` of every 32-bit lane: a lookup of its low 3 bits, and its sign.
  TANDEM_INLINE static __m256 e2m1_field(__m256i a, int shift) {
    const __m256i code = _mm256_srli_epi32(a, shift);
    const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), code);
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(code, 28), _mm256_set1_epi32(int(0x80000000u)));
    return _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
  }
  TANDEM_INLINE static __m256 field(__m256i a, int shift, int mask) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(a, shift), _mm256_set1_epi32(mask)));
  }
  // 8 rows' values of pairs i and i + 2, one of them `index`, a byte each: even k of both, odd k of both.
  TANDEM_INLINE static __m256i nl4_bytes(const uint8_t* p, int index) {
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kNl4)));
    const __m256i nibbles = index % 2 ? _mm256_srli_epi16(load_bytes(p), 4) : load_bytes(p);
    return _mm256_shuffle_epi8(values, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
  }
  // 8 rows' bytes of even and of odd k.
  TANDEM_INLINE static __m256i widen_lanes(const uint8_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // Of 3 bits: the lowest one ends a word, the others a byte.
  TANDEM_INLINE static __m256 last_of_eight(__m256i words, __m256i bytes, int odd) {
    const __m256i upper =
        _mm256_and_si256(_mm256_slli_epi32(bytes, odd ? 16 : 24), _mm256_set1_epi32(int(0xc0000000u)));
    const __m256i moved = odd ? _mm256_srli_epi32(words, 2) : _mm256_slli_epi32(words, 14);
    const __m256i low = _mm256_and_si256(moved, _mm256_set1_epi32(0x20000000));
    return _mm256_cvtepi32_ps(_mm256_or_si256(upper, low));
  }
  TANDEM_INLINE static __m256 widen(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  TANDEM_INLINE static __m256i round_bf16(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  }
  TANDEM_INLINE static __m256 nearest(__m256 a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  TANDEM_INLINE static __m256 exponent(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
};

}  // namespace
}  // namespace tandem
