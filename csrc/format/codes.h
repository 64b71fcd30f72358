// One code of a quantised weight: where it lies in a packed panel, and what number it is. Compiled at baseline.
#pragma once

#include "abi/weight_view.h"
#include "isa/inline.h"

namespace tandem {
namespace {

inline bool is_quantised(Format f) { return f != Format::f32 && f != Format::bf16 && f != Format::bf16_rows; }
inline bool is_nibble(Format f) { return f == Format::int4 || f == Format::fp4 || f == Format::uint4; }

inline int64_t bits_of(Format f) {
  if (f == Format::f32) return 32;
  if (f == Format::bf16 || f == Format::bf16_rows) return 16;
  if (f == Format::int6) return 6;
  return is_nibble(f) ? 4 : 8;
}

// Where code (row, k) of 4 or 6 bits lies in a panel: its lower 4 bits, and the upper 2.
struct CodePlace {
  int64_t low, high;  // bytes from the panel's beginning, of 16-bit lanes
  int low_bit, high_bit;
};
inline CodePlace place_of(Format f, int64_t row, int64_t k) {
  const int64_t lane = 2 * (row * 2 + k % 2), pair = k % 8 / 2, half = k % 16 / 8;
  const bool six = f == Format::int6;
  const int64_t low = six ? k / 16 * 3 * kCacheLine + half * kCacheLine : k / 8 * kCacheLine;
  return {low + lane, k / 16 * 3 * kCacheLine + 2 * kCacheLine + lane, int(4 * pair),
          int(8 * (pair / 2) + 2 * (pair % 2 + 2 * half))};
}

// Index of weight (row, k) in a panel's payload, in units of one weight.
inline int64_t pair_order(int64_t row, int64_t k) { return (k / 2 * kPanelRows + row) * 2 + k % 2; }

// The panel's code (row, k) must have been 0.
inline void put_code(Format format, uint8_t* panel, int64_t row, int64_t k, int code) {
  if (!is_nibble(format) && format != Format::int6) {
    panel[pair_order(row, k)] = uint8_t(code);
    return;
  }
  const CodePlace at = place_of(format, row, k);
  uint16_t* low = reinterpret_cast<uint16_t*>(panel + at.low);
  *low = uint16_t(*low | (code & 15) << at.low_bit);
  if (format != Format::int6) return;
  uint16_t* high = reinterpret_cast<uint16_t*>(panel + at.high);
  *high = uint16_t(*high | (code >> 4 & 3) << at.high_bit);
}

inline uint8_t get_code(Format format, const uint8_t* panel, int64_t row, int64_t k) {
  if (!is_nibble(format) && format != Format::int6) return panel[pair_order(row, k)];
  const CodePlace at = place_of(format, row, k);
  const int low = *reinterpret_cast<const uint16_t*>(panel + at.low) >> at.low_bit & 15;
  if (format != Format::int6) return uint8_t(low);
  return uint8_t(low | (*reinterpret_cast<const uint16_t*>(panel + at.high) >> at.high_bit & 3) << 4);
}

inline float value_of(Format format, uint8_t code) {
  if (format == Format::int8) return float(int8_t(code));
  if (format == Format::int6) return float(int(code ^ 32) - 32);
  if (format == Format::int4) return float(int(code ^ 8) - 8);
  if (format == Format::uint4) return float(code);
  return format == Format::fp8 ? float_of_e4m3(code) : float_of_e2m1(code);
}

}  // namespace
}  // namespace tandem
