// One code of a quantised weight: where it lies in a packed panel, and what number it is. Compiled at baseline.
#pragma once

#include "abi/weight_view.h"
#include "format/grids.h"
#include "isa/inline.h"

namespace tandem {
namespace {

inline bool is_quantised(Format f) { return f != Format::f32 && f != Format::bf16 && f != Format::bf16_rows; }
inline bool is_nibble(Format f) {
  return f == Format::int4 || f == Format::fp4 || f == Format::uint4 || f == Format::nl4;
}
// Bytes of `depth` codes of a row, as they are handed over to be packed; codebooks have 4 for 8: see GridSource.
inline int64_t row_bytes_of(Format f, int64_t depth) {
  return is_grid(f) ? depth / 2 : is_nibble(f) ? (depth + 1) / 2 : depth;
}

inline int64_t bits_of(Format f) {
  if (f == Format::f32) return 32;
  if (f == Format::bf16 || f == Format::bf16_rows) return 16;
  if (f == Format::int6) return 6;
  if (f == Format::int3) return 3;
  if (f == Format::uint2) return 2;
  return is_nibble(f) ? 4 : 8;
}

// Some bits of a code, in a panel.
struct BitsPlace {
  int64_t byte;   // from the panel's beginning
  int bit, bits;  // from that byte on, of 16: where they lie, and how many
};
// Where code (row, k) of fewer than 8 bits lies: its lower bits, and what is above them, or 0 bits.
struct CodePlace {
  BitsPlace low, high;
};
inline CodePlace place_of_int3(int64_t block, int64_t lane, int pair) {
  const int64_t word = block * 96 + lane;
  const int64_t before = block * 96 + kCacheLine + lane / 2 - 1;  // 16 bits from the byte on would leave the block
  if (pair < 5) return {{word, 3 * pair, 3}, {0, 0, 0}};
  if (pair < 7) return {{before, 8 + 3 * (pair - 5), 3}, {0, 0, 0}};
  return {{word, 15, 1}, {before, 8 + 6, 2}};
}
inline CodePlace place_of(Format f, int64_t row, int64_t k) {
  const int64_t lane = 2 * (row * 2 + k % 2), pair = k % 16 / 2, block = k / 16;
  if (is_nibble(f)) return {{k / 8 * kCacheLine + lane, int(4 * (pair % 4)), 4}, {0, 0, 0}};
  const int two = six_bit(int(pair));
  if (f == Format::uint2) return {{block * kCacheLine + lane, two, 2}, {0, 0, 0}};
  if (f == Format::int3) return place_of_int3(block, lane, int(pair));
  return {{(block * 3 + pair / 4) * kCacheLine + lane, int(4 * (pair % 4)), 4},
          {(block * 3 + 2) * kCacheLine + lane, two, 2}};
}

inline int64_t payload_bytes(Format f, int64_t padded_depth) {
  if (is_grid(f)) return padded_depth / kGridBlock * grid_block_bytes(f);
  return kPanelRows * padded_depth * bits_of(f) / 8;
}

// Of 8 k of a row, as they are handed over: one or two indices, what is above them, signs.
struct GridSource {
  uint8_t first, second, upper, signs;
};

inline void put_grid(Format f, uint8_t* block, int64_t r, const GridSource& of) {
  const int64_t fours = grid_block_bytes(f) - 4 + r / 4;
  if (f == Format::iq3_xxs || f == Format::iq3_s)
    block[2 * r] = of.first, block[2 * r + 1] = of.second, block[32 + r] = of.signs;
  else if (f == Format::iq2_xs)
    block[2 * r] = of.first, block[2 * r + 1] = uint8_t(of.upper | of.signs << 1);
  else
    block[r] = of.first;
  if (f == Format::iq2_xxs || f == Format::iq2_s) block[16 + r] = of.signs;
  if (f == Format::iq2_s || f == Format::iq3_s) block[fours] = uint8_t(block[fours] | of.upper << 2 * (r % 4));
  if (f == Format::iq1) block[16 + r / 2] = uint8_t(block[16 + r / 2] | of.upper << 4 * (r % 2));
}

template <Format kGrid>
int grid_code_of(const uint8_t* panel, int64_t row, int64_t k) {
  const uint8_t* block = panel + k / kGridBlock * grid_block_bytes(kGrid);
  const int code = int8_t(grid_codes<kGrid>(block, int(row)) >> 8 * (k % kGridBlock));
  return grid_signs<kGrid>(block, int(row)) >> k % kGridBlock & 1 ? -code : code;
}
inline int grid_code(Format f, const uint8_t* panel, int64_t row, int64_t k) {
  if (f == Format::iq2_xxs) return grid_code_of<Format::iq2_xxs>(panel, row, k);
  if (f == Format::iq2_xs) return grid_code_of<Format::iq2_xs>(panel, row, k);
  if (f == Format::iq2_s) return grid_code_of<Format::iq2_s>(panel, row, k);
  if (f == Format::iq3_xxs) return grid_code_of<Format::iq3_xxs>(panel, row, k);
  if (f == Format::iq3_s) return grid_code_of<Format::iq3_s>(panel, row, k);
  return grid_code_of<Format::iq1>(panel, row, k);
}

inline bool is_whole_byte(Format f) { return bits_of(f) == 8; }

inline void put_bits(uint8_t* panel, const BitsPlace& at, int code) {
  uint16_t lane;
  __builtin_memcpy(&lane, panel + at.byte, sizeof lane);
  lane = uint16_t(lane | (code & ((1 << at.bits) - 1)) << at.bit);
  __builtin_memcpy(panel + at.byte, &lane, sizeof lane);
}
inline int get_bits(const uint8_t* panel, const BitsPlace& at) {
  uint16_t lane;
  __builtin_memcpy(&lane, panel + at.byte, sizeof lane);
  return lane >> at.bit & ((1 << at.bits) - 1);
}

// Index of weight (row, k) in a panel's payload, in units of one weight.
inline int64_t pair_order(int64_t row, int64_t k) { return (k / 2 * kPanelRows + row) * 2 + k % 2; }

// The panel's code (row, k) must have been 0.
inline void put_code(Format format, uint8_t* panel, int64_t row, int64_t k, int code) {
  if (is_whole_byte(format)) {
    panel[pair_order(row, k)] = uint8_t(code);
    return;
  }
  const CodePlace at = place_of(format, row, k);
  put_bits(panel, at.low, code);
  if (at.high.bits) put_bits(panel, at.high, code >> at.low.bits);
}

inline uint8_t get_code(Format format, const uint8_t* panel, int64_t row, int64_t k) {
  if (is_whole_byte(format)) return panel[pair_order(row, k)];
  const CodePlace at = place_of(format, row, k);
  const int low = get_bits(panel, at.low);
  return uint8_t(at.high.bits ? low | get_bits(panel, at.high) << at.low.bits : low);
}

inline float value_of(Format format, uint8_t code) {
  if (format == Format::int8) return float(int8_t(code));
  if (format == Format::int6) return float(int(code ^ 32) - 32);
  if (format == Format::int4) return float(int(code ^ 8) - 8);
  if (format == Format::int3) return float(int(code ^ 4) - 4);
  if (format == Format::nl4) return float(kNl4[code]);
  if (format == Format::uint4 || format == Format::uint2) return float(code);
  return format == Format::fp8 ? float_of_e4m3(code) : float_of_e2m1(code);
}

}  // namespace
}  // namespace tandem
