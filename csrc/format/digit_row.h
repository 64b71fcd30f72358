// A row of activations as digits, for products of integers: in groups of K, x = 2^e * (65536 * d2 + 256 * d1 + d0) with
// signed bytes d. 2^e puts the group's largest magnitude into [2^21, 2^22). So an element with the 8 significant bits
// of bf16 is exact down to 2^-14 of the largest. A smaller one is off by 2^-22 of the largest at most.
//
//   int8 [padded_depth / 8][3][8]  d0, d1 and d2 of 8 k; for weights of 4 or 6 bits in the order of kSplitOrder
//   DigitGroup [groups]
//
// Groups are those of the weights, or kRowScaledDigits where weights have one scale per output row.
#pragma once

#include "abi/weight_view.h"
#include "isa/inline.h"

namespace tandem {
namespace {

constexpr int kDigits = 3;
constexpr int64_t kDigitBlock = 8;  // k whose weights are decoded at once
constexpr int64_t kDigitBlockBytes = kDigitBlock * kDigits;
constexpr int64_t kRowScaledDigits = 128;  // k

struct DigitGroup {
  int32_t starts[kDigits];  // what integer sums begin with: -offset * the sum of the digits, for weights code + offset
  float unit;               // 2^e; NaN where a number of the group is none, and with it every product of the row
  float high_unit;          // of d2: 2^(e + 16)
  float sum;                // of the activations, for weights that have something added after scaling
  int32_t unused[2];        // whole groups in a cache line
};

// Sums of integers must fit: the 256 k of the longest group times an int8 weight, as it is and as code + 128.
constexpr int64_t kMostDigitGroup = 256;
static_assert(kMostDigitGroup * 128 * 128 * 256 + kMostDigitGroup * 128 * 128 < INT32_MAX);  // 256 * d1 + d0
static_assert(kMostDigitGroup * 128 * 128 <= 1 << 24);                                       // d2: exact as float
static_assert(kMostDigitGroup * 255 * 128 < INT32_MAX);

struct DigitRowLayout {
  int64_t group, groups;
  int64_t at_groups, bytes;  // from the row's beginning, and to the next row
};

TANDEM_INLINE DigitRowLayout digit_row_layout(const WeightView& w) {
  const int64_t group = w.group ? w.group : kRowScaledDigits, groups = (w.padded_depth + group - 1) / group;
  const int64_t digits = kDigits * int64_t{w.padded_depth}, bytes = digits + groups * int64_t{sizeof(DigitGroup)};
  return {group, groups, digits, (bytes + kCacheLine - 1) / kCacheLine * kCacheLine};
}

}  // namespace
}  // namespace tandem
