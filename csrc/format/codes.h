// One code of a quantised weight: where it lies in a packed panel, and what number it is. Compiled at baseline.
#pragma once

#include "abi/weight_view.h"
#include "isa/inline.h"

namespace tandem {
namespace {

inline bool is_quantised(Format f) { return f != Format::f32 && f != Format::bf16; }
inline bool is_nibble(Format f) { return f == Format::int4 || f == Format::fp4 || f == Format::uint4; }

inline int64_t bits_of(Format f) {
  if (f == Format::f32) return 32;
  if (f == Format::bf16) return 16;
  return is_nibble(f) ? 4 : 8;
}

// Index of weight (row, k) in a panel's payload, in units of one weight.
inline int64_t pair_order(int64_t row, int64_t k) { return (k / 2 * kPanelRows + row) * 2 + k % 2; }

// The panel's code (row, k) must have been 0.
inline void put_code(Format format, uint8_t* panel, int64_t row, int64_t k, int code) {
  if (!is_nibble(format)) {
    panel[pair_order(row, k)] = uint8_t(code);
    return;
  }
  uint16_t* lane = reinterpret_cast<uint16_t*>(panel + k / 8 * kCacheLine) + row * 2 + k % 2;
  *lane = uint16_t(*lane | (code & 15) << (k % 8 / 2 * 4));
}

inline uint8_t get_code(Format format, const uint8_t* panel, int64_t row, int64_t k) {
  if (!is_nibble(format)) return panel[pair_order(row, k)];
  const uint16_t lane = reinterpret_cast<const uint16_t*>(panel + k / 8 * kCacheLine)[row * 2 + k % 2];
  return lane >> (k % 8 / 2 * 4) & 15;
}

inline float value_of(Format format, uint8_t code) {
  if (format == Format::int8) return float(int8_t(code));
  if (format == Format::int4) return float(int(code ^ 8) - 8);
  if (format == Format::uint4) return float(code);
  return format == Format::fp8 ? float_of_e4m3(code) : float_of_e2m1(code);
}

}  // namespace
}  // namespace tandem
