// Integer products with AVX-512 VNNI: unsigned bytes times signed ones, four products added to 32 bits without
// saturation.
#pragma once

#include "isa/avx512_bf16.h"
#include "isa/int8_avx512.h"

namespace tandem {
namespace {

struct VnniInts : Avx512Ints {
  using Isa = Avx512Bf16Isa;
  static constexpr int kRows = 12;
  static constexpr int kByteOffset = 128;

  TANDEM_INLINE static Lines bytes(const uint8_t* p) { return {joined(p), joined(p + 64)}; }
  TANDEM_INLINE static Sum dot_bytes(Sum s, const Lines& w, X a, X b) { return dot_small(s, w, a, b); }
  TANDEM_INLINE static Sum dot_small(Sum s, const Lines& w, X a, X b) {
    return Sum(_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(__m512i(s), w.a, a), w.b, b));
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
