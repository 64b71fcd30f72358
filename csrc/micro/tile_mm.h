// Many rows: a slice of the panels is unpacked to scratch as lines of the lane, then every block of rows runs over it.
// Formats whose payload already is lines are read in place.
#pragma once

#include "micro/whole_rows.h"

namespace tandem {
namespace {

// Bytes of one panel's lines that are unpacked at once: half of the smallest L1, so that they stay there while the
// rows pass.
constexpr int64_t kSliceBytes = 16 * 1024;
constexpr int64_t kSumsAt = 4 * kSliceBytes;  // in the scratch: behind a slice of two panels, rounded up to groups

// Equal slices of K instead of a full one and a rest; each a multiple of the group.
template <class Isa, class Lane>
TANDEM_INLINE int64_t slice_pairs(const WeightView& w) {
  constexpr int64_t kMost = kSliceBytes / Isa::kTilePanels / (Lane::kLinesPerPair * kCacheLine);
  const int64_t pairs = w.padded_depth / 2, slices = (pairs + kMost - 1) / kMost;
  const int64_t unit = w.group > 32 ? w.group / 2 : 16;
  return ((pairs + slices - 1) / slices + unit - 1) / unit * unit;
}

template <class Isa, class Format>
void unpack_panel(const uint8_t* payload, int64_t first, int64_t last, uint8_t* lines) {
  using Lane = typename Format::Lane;
  for (int64_t pair = first; pair < last; pair += Format::kPairsPerBlock) {
#pragma GCC unroll 8
    for (int index = 0; index < Format::kPairsPerBlock; ++index) {
      auto decoded = Format::decode(payload + pair * Format::kPairBytes, index);
      if constexpr (Format::kUnit != 1.0f)
        for (auto& line : decoded.line) line = Isa::mul(line, Isa::set1(Format::kUnit));
#pragma GCC unroll 2
      for (int i = 0; i < Lane::kLinesPerPair; ++i, lines += kCacheLine) Lane::store_line(lines, decoded.line[i]);
    }
  }
}

// The lines of one pair of panels for a slice of K: in place, or unpacked to `scratch`.
template <class Isa, class Format>
TANDEM_INLINE ScratchSource<typename Format::Lane> slice_of(const PairOfPanels& panels, int64_t first, int64_t last,
                                                            uint8_t* scratch) {
  const int64_t bytes = (last - first) * Format::Lane::kLinesPerPair * kCacheLine;
  if constexpr (!Format::kPacked) {
    const int64_t offset = first * Format::kPairBytes;
    return {{panels.payload[0] + offset, panels.payload[1] + offset}};
  } else {
    for (int p = 0; p < 2; ++p) {
      if constexpr (HasWholeRows<Format>)
        unpack_rows<Isa>(panels.payload[p], panels.row_bytes, first, last, scratch + p * bytes);
      else
        unpack_panel<Isa, Format>(panels.payload[p], first, last, scratch + p * bytes);
    }
    return {{scratch, scratch + bytes}};
  }
}

// Panels q .. q + P of a pair.
template <int P, class Lane>
TANDEM_INLINE ScratchSource<Lane, P> part_of(const ScratchSource<Lane>& pair, int q) {
  if constexpr (P == 2)
    return pair;
  else
    return {{pair.panel[q]}};
}

// Asks for the payload that comes next while the rows pass over what is here.
template <class Isa, class Format>
TANDEM_INLINE void prefetch_slice(const PairOfPanels& panels, int64_t first, int64_t last) {
  for (int p = 0; p < 2; ++p) {
    if constexpr (HasWholeRows<Format>) {
      prefetch_rows<Isa>(panels.payload[p], panels.row_bytes, first, last);
      continue;
    }
    for (const uint8_t *line = panels.payload[p] + first * Format::kPairBytes,
                       *end = panels.payload[p] + last * Format::kPairBytes;
         line < end; line += kCacheLine)
      Isa::prefetch_l2(line);
  }
}

// After pairs [first, last) of K of panel pair p of this call: the next panel pair, or the first one's next slice.
template <class Isa, class Format>
TANDEM_INLINE void prefetch_after(const MatmulArgs* args, int p, int64_t first, int64_t last) {
  const WeightView& w = args->weights;
  const int64_t depth = w.padded_depth / 2, end = 2 * last - first;
  if (p + 1 < args->pairs)
    prefetch_slice<Isa, Format>(pair_of_panels(w, args->first_pair + p + 1), first, last);
  else if (last < depth)
    prefetch_slice<Isa, Format>(pair_of_panels(w, args->first_pair), last, end < depth ? end : depth);
}

// The sums that a slice's shifts are multiplied with, so that they can be indexed by group and row; null: no shifts.
template <class Isa, class Lane>
const float* sums_of_slice(const MatmulArgs* args, int64_t first, int64_t last) {
  const WeightView& w = args->weights;
  if (!w.shift_offset) return nullptr;
  float* sums = reinterpret_cast<float*>(args->scratch + kSumsAt);
  const int64_t begin = 2 * first / w.group, end = 2 * last / w.group;
  sum_groups<Isa, Lane>(reinterpret_cast<const uint8_t* const*>(args->x_rows), args->rows, w.group, begin, end, sums);
  return sums - begin;
}

template <class Isa, template <class> class F>
void tile_mm(const MatmulArgs* args) {
  using Format = F<Isa>;
  using Lane = typename Format::Lane;
  using Source = ScratchSource<Lane, Isa::kTilePanels>;
  const WeightView& w = args->weights;
  const uint8_t* const* x = reinterpret_cast<const uint8_t* const*>(args->x_rows);
  const int64_t depth = w.padded_depth / 2, slice = slice_pairs<Isa, Lane>(w);
  const int step = rows_per_block<Isa::kTileRows>(args->rows);
  for (int64_t first = 0; first < depth; first += slice) {
    const int64_t last = first + slice < depth ? first + slice : depth;
    const float* sums = sums_of_slice<Isa, Lane>(args, first, last);
    for (int p = 0; p < args->pairs; ++p) {  // outside: a slice of one pair stays in L1 while the rows pass
      PairOfPanels panels = pair_of_panels(w, args->first_pair + p);
      panels.scales.x_sums = sums;
      panels.scales.sums_stride = sums ? 2 * (last - first) / w.group : 0;
      const ScratchSource<Lane> pair = slice_of<Isa, Format>(panels, first, last, args->scratch);
      if constexpr (Format::kPacked) prefetch_after<Isa, Format>(args, p, first, last);
      for (int q = 0; q < 2; q += Isa::kTilePanels) {
        const Source source = part_of<Isa::kTilePanels>(pair, q);
        float* y = args->y + kPairColumns * p + kPanelRows * q;
        for (int r = 0; r < args->rows; r += step)
          block_of<Isa, Source, Format::kScaled, Isa::kTileRows>(args->rows - r < step ? args->rows - r : step, source,
                                                                 first, x + r, first, last, panels.scales.at(q, r),
                                                                 y + r * args->y_stride, args->y_stride);
      }
      if (last == depth)
        scale_rows<Isa, Source>(panels.row_scales, args->y + kPairColumns * p, args->y_stride, args->rows);
    }
  }
}

}  // namespace
}  // namespace tandem
