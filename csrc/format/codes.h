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
  if (f == Format::int6) return 6;
  return is_nibble(f) ? 4 : 8;
}

// Of 8 k of a panel of 4-bit or 6-bit codes.
inline int64_t block_bytes(Format f) { return 16 * bits_of(f); }

// Index of weight (row, k) in a panel's payload, in units of one weight.
inline int64_t pair_order(int64_t row, int64_t k) { return (k / 2 * kPanelRows + row) * 2 + k % 2; }

// The panel's code (row, k) must have been 0.
inline void put_code(Format format, uint8_t* panel, int64_t row, int64_t k, int code) {
  if (!is_nibble(format) && format != Format::int6) {
    panel[pair_order(row, k)] = uint8_t(code);
    return;
  }
  uint8_t* block = panel + k / 8 * block_bytes(format);
  const int64_t lane = row * 2 + k % 2, pair = k % 8 / 2;
  uint16_t* low = reinterpret_cast<uint16_t*>(block) + lane;
  *low = uint16_t(*low | (code & 15) << 4 * pair);
  if (format == Format::int6)
    block[kCacheLine + lane] = uint8_t(block[kCacheLine + lane] | (code >> 4 & 3) << 2 * pair);
}

inline uint8_t get_code(Format format, const uint8_t* panel, int64_t row, int64_t k) {
  if (!is_nibble(format) && format != Format::int6) return panel[pair_order(row, k)];
  const uint8_t* block = panel + k / 8 * block_bytes(format);
  const int64_t lane = row * 2 + k % 2, pair = k % 8 / 2;
  const int low = reinterpret_cast<const uint16_t*>(block)[lane] >> 4 * pair & 15;
  const int high = format == Format::int6 ? block[kCacheLine + lane] >> 2 * pair & 3 : 0;
  return uint8_t(low | high << 4);
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
