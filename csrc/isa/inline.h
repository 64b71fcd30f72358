// Bits and bf16, for all isa headers. Always inlined and in the unnamed namespace: a shared inline function compiled
// with wide flags in one unit would crash the baseline units that the linker hands it to.
#pragma once

#include <stdint.h>

#define TANDEM_INLINE inline __attribute__((always_inline))
#define TANDEM_ALWAYS_INLINE __attribute__((always_inline))  // of a lambda

namespace tandem {
namespace {

TANDEM_INLINE float float_of_bits(uint32_t bits) {
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

TANDEM_INLINE uint32_t bits_of_float(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  return bits;
}

// Lanes of a and then b, by number. GCC has Clang's builtin since 12 only.
template <int... Lane, class Vec>
TANDEM_INLINE Vec picked(Vec a, Vec b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, Lane...);
#else
  return __builtin_shuffle(a, b, Vec{Lane...});
#endif
}

TANDEM_INLINE uint64_t word64(const uint8_t* p) {
  uint64_t word;
  __builtin_memcpy(&word, p, 8);
  return word;
}

TANDEM_INLINE float float_of_bf16(uint16_t b) { return float_of_bits(uint32_t{b} << 16); }

// Round to nearest even; NaN stays NaN.
TANDEM_INLINE uint16_t bf16_of_float(float f) {
  const uint32_t bits = bits_of_float(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Where the upper bits of pair `index` lie in the 16-bit lanes of a block of 6-bit codes: see Format::int6.
constexpr int six_bit(int index) { return 8 * (index % 4 / 2) + 2 * (index % 2 + 2 * (index / 4)); }

// What codes of nl4 stand for.
constexpr int8_t kNl4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// k of the bytes of a block of 8 k in 4-bit codes, [16][2] lanes of 16 bits: of their lower nibbles, then of the upper.
constexpr int kSplitOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// IEEE half, exact.
TANDEM_INLINE float float_of_f16(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude < 0x400) return (sign ? -0x1p-24f : 0x1p-24f) * float(magnitude);
  if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  return float_of_bits(sign | ((magnitude << 13) + (112u << 23)));
}

// OCP 8-bit float e4m3fn, exact.
TANDEM_INLINE float float_of_e4m3(uint8_t code) {
  const uint32_t sign = uint32_t{code & 0x80u} << 24, magnitude = code & 0x7fu;
  if (magnitude == 0x7f) return float_of_bits(sign | 0x7fc00000u);
  if (magnitude < 8) return (sign ? -0x1p-9f : 0x1p-9f) * float(magnitude);
  return float_of_bits(sign | ((magnitude << 20) + (120u << 23)));
}

// OCP 8-bit exponent e8m0, exact: 2^(code - 127), of which 0 gives a subnormal; 255 is NaN.
TANDEM_INLINE float float_of_e8m0(uint8_t code) {
  const uint32_t ends = code == 0 || code == 255 ? 0x00400000u : 0;
  return float_of_bits(uint32_t{code} << 23 | ends);
}

// OCP 4-bit float e2m1, exact; the low 4 bits count.
TANDEM_INLINE float float_of_e2m1(uint8_t code) {
  const uint32_t sign = (code & 8u) << 28, exponent = code >> 1 & 3u, half = code & 1u;
  const uint32_t magnitude = exponent ? (126 + exponent) << 23 | half << 22 : half * 0x3f000000u;
  return float_of_bits(sign | magnitude);
}

}  // namespace
}  // namespace tandem
