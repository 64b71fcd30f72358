// A row of activations as the int8 mode keeps it: codes from -127 to 127 in groups of K, value = code * scale.
//
//   int8 [padded_depth]   the codes; for weights of 4 or 6 bits the 8 codes of a block are in the order of kSplitOrder
//   f32  [groups]         scales
//   i32  [groups]         starts of integer sums: -offset * the sum of the group's codes; for weights that the kernels
//                         decode to code + offset
//   f32  [groups]         sums of the group's codes, for weights that have something added after scaling
//
// Activations have the groups of the weights, so that a product of integers is scaled once. Weights with one scale per
// output row go with groups of kInt8Group.
#pragma once

#include "abi/weight_view.h"
#include "isa/inline.h"

namespace tandem {
namespace {

constexpr int64_t kInt8Group = 128;
constexpr int64_t kInt8Block = 8;  // k that are decoded at once

struct Int8RowLayout {
  int64_t group, groups;
  int64_t scales, starts, sums, bytes;  // offsets from the row's beginning, and to the next row
};

TANDEM_INLINE Int8RowLayout int8_row_layout(const WeightView& w) {
  const int64_t depth = w.padded_depth, group = w.group ? w.group : kInt8Group, groups = (depth + group - 1) / group;
  const int64_t bytes = depth + 12 * groups;
  return {
      group, groups, depth, depth + 4 * groups, depth + 8 * groups, (bytes + kCacheLine - 1) / kCacheLine * kCacheLine};
}

}  // namespace
}  // namespace tandem
