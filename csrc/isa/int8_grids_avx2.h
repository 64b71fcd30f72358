// Codebooks with AVX2 and int8 activations, row by row: an entry is 8 k of a row, and four rows fill a register. Signs
// go to the activations. Two products add up to 16 bits at most (2 * 124 * 127), which the multiplication with the
// group's scale, an odd number, widens to 32. So sums of 256 k are exact, and are added to columns once.
#pragma once

#include "format/grids.h"
#include "isa/avx2.h"

namespace tandem {
namespace {

struct Avx2Grids {
  struct Sum {
    __m256i rows[4];  // 4 rows each, two sums a row
  };
  struct Scales {
    __m256i rows[4];  // 4 words a row
  };

  TANDEM_INLINE static Sum none() {
    const __m256i zero = _mm256_setzero_si256();
    return {{zero, zero, zero, zero}};
  }
  // 2 n + 1 of 16 nibbles from `bit` on.
  template <int bit>
  TANDEM_INLINE static Scales odd_scales(const uint8_t* p) {
    const __m128i bytes = load16(p), twice = bit ? _mm_srli_epi16(bytes, 3) : _mm_slli_epi16(bytes, 1);
    const __m128i odd = _mm_or_si128(_mm_and_si128(twice, _mm_set1_epi8(30)), _mm_set1_epi8(1));
    const __m256i all = _mm256_broadcastsi128_si256(odd);
    Scales scales;
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) scales.rows[q] = _mm256_and_si256(each_eight_times(all, q), _mm256_set1_epi16(255));
    return scales;
  }
  // sums += scale * (a block's 8 k times R rows of activations)
  template <Format kGrid, int R>
  TANDEM_INLINE static void add_block(const uint8_t* block, const uint8_t* const (&x)[R], const Scales& scales,
                                      Sum* const (&sums)[R]) {
    const __m256i signs = _mm256_broadcastsi128_si256(signs_of<kGrid>(block));
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const __m256i codes = four_rows<kGrid>(block, 4 * q), turns = turns_of<kGrid>(signs, codes, q);
      const __m256i sizes = has_signs(kGrid) ? codes : _mm256_abs_epi8(codes);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        const __m256i turned = _mm256_sign_epi8(_mm256_set1_epi64x(int64_t(word64(x[r]))), turns);
        const __m256i products = _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, turned), scales.rows[q]);
        sums[r]->rows[q] = _mm256_add_epi32(sums[r]->rows[q], products);
      }
    }
  }
  // Of columns 8 half to 8 half + 7.
  TANDEM_INLINE static __m256i columns(const Sum& sum, int half) {
    return _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum.rows[2 * half], sum.rows[2 * half + 1]), 0xd8);
  }

 private:
  TANDEM_INLINE static __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  // Bytes 4 q to 4 q + 3 of both halves.
  TANDEM_INLINE static __m256i each_eight_times(__m256i bytes, int q) {
    const __m256i order = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    return _mm256_shuffle_epi8(bytes, _mm256_add_epi8(order, _mm256_set1_epi8(int8_t(4 * q))));
  }
  template <Format kGrid>
  TANDEM_INLINE static __m256i four_rows(const uint8_t* block, int r) {
    const auto two = [&](int at) {
      return _mm_set_epi64x(int64_t(grid_codes<kGrid>(block, at + 1)), int64_t(grid_codes<kGrid>(block, at)));
    };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(two(r)), two(r + 2), 1);
  }
  template <Format kGrid>
  TANDEM_INLINE static __m128i signs_of(const uint8_t* block) {
    if constexpr (kGrid == Format::iq2_xs) return Avx2Isa::grid_signs_with_eighth(block);
    return has_signs(kGrid) ? load16(block + signs_at(kGrid)) : _mm_setzero_si128();
  }
  // Negative where the weight is.
  template <Format kGrid>
  TANDEM_INLINE static __m256i turns_of(__m256i signs, __m256i codes, int q) {
    if constexpr (!has_signs(kGrid)) return codes;
    const __m256i bits = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(each_eight_times(signs, q), bits), bits);
    return _mm256_or_si256(set, _mm256_set1_epi8(1));
  }
};

}  // namespace
}  // namespace tandem
