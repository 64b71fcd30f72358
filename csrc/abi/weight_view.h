// Packed weights as the kernels see them. Plain data: no inline functions, so that no code compiled with wide flags
// can be shared with baseline code.
//
// A matrix [N, K] (y = x W^T) is cut into panels of 16 output rows. K is interleaved in pairs: VNNI and AMX share that
// order, and 16 lanes of float can use it, too.
//
//   f32   [K/2][2][16]        one 64-byte line per k
//   bf16  [K/2][16][2]        one 64-byte line per pair of k
//   int8  [K/2][16][2]        32 bytes per pair
//   int4  [K/8][16][2] of 16  16-bit lane (row, parity); its nibble i holds the pair 4 * block + i
//   fp8   as int8             OCP e4m3fn: bias 7, no infinities, 0x7f and 0xff are NaN
//   fp4   as int4             OCP e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
//   uint4 as int4             0 to 15
//   int6  [K/16] of 192 bytes 128 as int4, of the lower 4 bits, then [16][2] of 16 bits: the upper 2 bits of 8 pairs;
//                             in the lower byte those of pairs 0, 1, 4, 5, in the upper one 2, 3, 6, 7; two's
//                             complement
//   uint2 [K/16][16][2] of 16 2 bits of 8 pairs, which lie as int6's upper ones; 0 to 3
//   int3  [K/16] of 96 bytes  64 of 16-bit lanes: 3 bits each of pairs 0 to 4, then the lowest of pair 7; then [16][2]
//                             of 8 bits: pairs 5 and 6, and the upper 2 bits of pair 7; two's complement
//   nl4   as int4         ggml's IQ4 values: isa/inline.h, kNl4
//   iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s, iq1   indices and signs: format/grids.h; K is a multiple of 32
//   bf16_rows [16][K]         as checkpoints have them, each row whole; K is a multiple of 32
//
// K is padded with zeros to a multiple of max(32, group); the number of panels is even (a "pair" of panels, 32 output
// columns, is the unit of work everywhere). A panel's scales, [K/group][16], follow its payload, and what is added
// after scaling (shifts) follows the scales, so that a panel is one stream of memory. Any code may have shifts:
// weight = code * scale + shift.
#pragma once

#include <stdint.h>

namespace tandem {

enum class DType : int32_t { f32 = 0, bf16 = 1 };

// How a scale (or shift) is stored. bytes8 and bytes16 are GGUF's: a signed byte times a half that 256 k of a row
// share; per 8 or 16 groups [16] halves, then [8 or 16][16] bytes. e8m0 is OCP's byte of an exponent: 2^(code - 127),
// 255 is NaN. e4m3 is a byte times a float of its row: [16] floats before all groups. nibbles16 has a scale in a byte's
// low half and a shift in its high half, both without a sign; per 16 groups [16] halves of the scales, [16] of the
// shifts, then [16][16] bytes. odd8 and odd16: 2 n + 1 times an eighth of a half, for nibbles n of two groups in a
// byte; per 8 or 16 groups [16] halves, then [4 or 8][16] bytes.
enum class ScaleType : int32_t {
  f32 = 0,
  bf16 = 1,
  f16 = 2,
  bytes8 = 3,
  bytes16 = 4,
  e8m0 = 5,
  e4m3 = 6,
  nibbles16 = 7,
  odd8 = 8,
  odd16 = 9
};
constexpr int kScaleTypeCount = 10;

// What is added after scaling: numbers that are stored as the scales are, or -zero * scale, where zeros (the codes that
// stand for 0) are signed bytes [K/group][16].
enum class ShiftType : int32_t { none = 0, as_scales = 1, zeros = 2 };

enum class Format : int32_t {
  f32 = 0,
  bf16 = 1,
  int8 = 2,
  int4 = 3,
  fp8 = 4,
  fp4 = 5,
  uint4 = 6,
  int6 = 7,
  bf16_rows = 8,
  uint2 = 9,
  int3 = 10,
  nl4 = 11,
  iq2_xxs = 12,
  iq2_xs = 13,
  iq2_s = 14,
  iq3_xxs = 15,
  iq3_s = 16,
  iq1 = 17
};
constexpr int kFormatCount = 18;

constexpr int kPanelRows = 16;
constexpr int kPairColumns = 2 * kPanelRows;  // output columns of a pair of panels
constexpr int kCacheLine = 64;

struct WeightView {
  const uint8_t* panels;
  int64_t panel_bytes;   // of a panel; a multiple of 64
  int64_t pair_bytes;    // from one pair of panels to the next
  int64_t second;        // from a pair's first panel to its second
  int64_t scale_offset;  // of the scales in a panel; 0: the format has none
  int64_t shift_offset;  // of what is added after scaling; 0: nothing
  Format format;
  ScaleType scale_type;
  ShiftType shift_type;
  int32_t group;    // k per scale; 0: one scale per output row (or none), applied after the sum over K
  int32_t columns;  // N, without padding
  int32_t depth;    // K, without padding
  int32_t padded_depth;
  int32_t pairs;  // pairs of panels
};

}  // namespace tandem
