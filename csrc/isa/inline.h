// Bits and bf16, for all isa headers. Always inlined and in the unnamed namespace: a shared inline function compiled
// with wide flags in one unit would crash the baseline units that the linker hands it to.
#pragma once

#include <stdint.h>

#define TANDEM_INLINE inline __attribute__((always_inline))

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

TANDEM_INLINE float float_of_bf16(uint16_t b) { return float_of_bits(uint32_t{b} << 16); }

// Round to nearest even; NaN stays NaN.
TANDEM_INLINE uint16_t bf16_of_float(float f) {
  const uint32_t bits = bits_of_float(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Up to 32 rows of activations as matrix tiles load them: piece s of 32 k of row group g (16 rows) begins at
// data + s * step + g * group, its rows `stride` bytes apart.
struct RowBlock {
  const uint8_t* data;
  int64_t stride, step, group;
};

}  // namespace
}  // namespace tandem
