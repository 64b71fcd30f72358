// A row of activations as the int8 mode keeps it: codes from -127 to 127 in blocks of K, value = code * scale.
//
//   int8 [padded_depth]   the codes; for weights of 2 to 6 bits the 8 codes of a block are in the order of kSplitOrder
//   f32  [blocks]         scales
//   i32  [groups]         starts of integer sums: -offset * the sum of the group's codes; for weights that the kernels
//                         decode to code + offset
//   f32  [groups]         sums of the group's codes, for weights that have something added after scaling; where blocks
//                         are kSharedBlock, i16, and a zero after an odd number of them
//
// Groups are those of the weights, and so are the blocks: a product of integers is scaled once. Where weights' scales
// are integers times a half that kSharedBlock share, these make a block. Weights with one scale per output row go with
// groups of kInt8Group.
#pragma once

#include "abi/weight_view.h"
#include "format/grids.h"
#include "isa/inline.h"

namespace tandem {
namespace {

constexpr int64_t kInt8Group = 128;
constexpr int64_t kInt8Block = 8;  // k that are decoded at once

constexpr int64_t kSharedBlock = 256;

// Whether activations have blocks of kSharedBlock: GGUF's K-quants, IQ4_XS and codebooks.
constexpr bool has_shared_scale(Format f, ScaleType type) {
  if (type == ScaleType::odd8 || type == ScaleType::odd16) return is_grid(f);
  if (type == ScaleType::nibbles16) return f == Format::uint2;
  if (type == ScaleType::bytes16) return f == Format::int3 || f == Format::int6;
  return type == ScaleType::bytes8 && (f == Format::uint4 || f == Format::int6 || f == Format::nl4);
}

struct Int8RowLayout {
  int64_t block, blocks;                // k that share a scale of activations
  int64_t group, groups;                // of the weights
  int64_t scales, starts, sums, bytes;  // offsets from the row's beginning, and to the next row
};

TANDEM_INLINE Int8RowLayout int8_row_layout(const WeightView& w) {
  const int64_t depth = w.padded_depth, group = w.group ? w.group : kInt8Group, groups = (depth + group - 1) / group;
  const bool shared = has_shared_scale(w.format, w.scale_type) && w.shift_type != ShiftType::zeros;
  const int64_t block = shared ? kSharedBlock : group, blocks = (depth + block - 1) / block;
  const int64_t starts = depth + 4 * blocks, sums = starts + 4 * groups;
  const int64_t bytes = sums + (shared ? 2 * (groups + groups % 2) : 4 * groups);
  return {block, blocks, group, groups, depth, starts, sums, (bytes + kCacheLine - 1) / kCacheLine * kCacheLine};
}

}  // namespace
}  // namespace tandem
