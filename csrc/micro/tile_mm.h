// Many rows: a slice of one or two pairs of panels is unpacked to scratch as lines of the lane, then every block of
// rows runs over it. Formats whose payload already is lines are read in place.
#pragma once

#include "micro/grid_rows.h"
#include "micro/whole_rows.h"

namespace tandem {
namespace {

// Bytes of a block's panels' lines that are unpacked at once. They stay in L1 while the rows pass, so they are half of
// the smallest L1; of four panels 3/4. Groups stay whole: four panels in groups of 64 and 128 k take 32 KiB.
constexpr int64_t kSliceBytes = 16 * 1024, kWideSliceBytes = 24 * 1024;
constexpr int64_t kLargestGroup = 256;                     // k: see has_group_size
constexpr int64_t kSumsAt = 64 * 1024;                     // in the scratch: behind a slice, rounded up to groups
static_assert(4 * kLargestGroup * kCacheLine <= kSumsAt);  // of float lanes, a line a k and panel

// Equal slices of K instead of a full one and a rest; each a multiple of the group.
template <class Isa, class Lane>
TANDEM_INLINE int64_t slice_pairs(const WeightView& w) {
  constexpr int64_t kBytes = Isa::kTilePanels == 4 ? kWideSliceBytes : kSliceBytes;
  constexpr int64_t kMost = kBytes / Isa::kTilePanels / (Lane::kLinesPerPair * kCacheLine);
  const int64_t pairs = w.padded_depth / 2, slices = (pairs + kMost - 1) / kMost;
  const int64_t unit = w.group > 32 ? w.group / 2 : 16;
  return ((pairs + slices - 1) / slices + unit - 1) / unit * unit;
}

template <class Isa, HasGrid Format>
  requires HasGridLines<Isa>
void unpack_panel(const uint8_t* payload, int64_t first, int64_t last, uint8_t* lines) {
  for (int64_t pair = first; pair < last; pair += kGridStep)
    grid_parts<Isa, Format::kGrid>(payload + pair * Format::kPairBytes, [&](int, const auto& decoded) {
#pragma GCC unroll 8
      for (int i = 0; i < std::remove_cvref_t<decltype(decoded)>::kLines; ++i, lines += kCacheLine) {
        auto line = decoded.line(i);
        if constexpr (Isa::kGridUnit != 1.0f) line = Isa::mul(line, Isa::set1(Isa::kGridUnit));
        Format::Lane::store_line(lines, line);
      }
    });
}

// By way of int8's layout.
template <class Isa, HasGrid Format>
void unpack_panel(const uint8_t* payload, int64_t first, int64_t last, uint8_t* lines) {
  using Lane = typename Format::Lane;
  alignas(64) uint8_t bytes[kGridAhead * kExpandedBytes];
  for (int64_t pair = first; pair < last; pair += kGridAhead * kGridPairs) {
    const int64_t left = (last - pair) / kGridPairs;
    const int blocks = left < kGridAhead ? int(left) : kGridAhead;
    expand_grids<Format::kGrid>(payload + pair * Format::kPairBytes, blocks, bytes);
    for (int i = 0; i < blocks * kGridPairs; ++i) {
      const auto decoded = Isa::decode_int8(bytes + i * 2 * kPanelRows);
      for (int line = 0; line < Lane::kLinesPerPair; ++line, lines += kCacheLine)
        Lane::store_line(lines, decoded.line[line]);
    }
  }
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

// P panels from panel q of `pairs` on.
template <int P, class Lane>
TANDEM_INLINE ScratchSource<Lane, P> part_of(const ScratchSource<Lane>* pairs, int q) {
  ScratchSource<Lane, P> part;
  for (int p = 0; p < P; ++p) part.panel[p] = pairs[(q + p) / 2].panel[(q + p) % 2];
  return part;
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

// Pairs [first, last) of K of panel pair p of this call; past its last: as many of the next slice of its first ones.
template <class Isa, class Format>
TANDEM_INLINE void prefetch_pair(const MatmulArgs* args, int p, int64_t first, int64_t last) {
  const WeightView& w = args->weights;
  const int64_t depth = w.padded_depth / 2, end = 2 * last - first;
  if (p < args->pairs)
    prefetch_slice<Isa, Format>(pair_of_panels(w, args->first_pair + p), first, last);
  else if (last < depth)
    prefetch_slice<Isa, Format>(pair_of_panels(w, args->first_pair + p - args->pairs), last, end < depth ? end : depth);
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

// At once: a slice of them stays in L1 while the rows pass.
template <class Isa>
constexpr int kPairsAtOnce = Isa::kTilePanels == 4 ? 2 : 1;

// A slice of K of pairs of panels, from pair p of the call on, times all rows.
template <class Isa, class Format, int kPairs>
void multiply_slice(const MatmulArgs* args, int p, int64_t first, int64_t last, const float* sums) {
  using Lane = typename Format::Lane;
  constexpr int kPanels = Isa::kTilePanels == 1 ? 1 : 2 * kPairs, kRows = kRowsBeside<Isa, kPanels>;
  using Source = ScratchSource<Lane, kPanels>;
  const WeightView& w = args->weights;
  const uint8_t* const* x = reinterpret_cast<const uint8_t* const*>(args->x_rows);
  const int step = rows_per_block<kRows>(args->rows);
  const int ahead = args->pairs < kPairsAtOnce<Isa> ? args->pairs : kPairsAtOnce<Isa>;
  PairOfPanels panels[kPairs];
  ScratchSource<Lane> lines[kPairs];
  for (int i = 0; i < kPairs; ++i) {
    panels[i] = pair_of_panels(w, args->first_pair + p + i);
    panels[i].scales.x_sums = sums;
    panels[i].scales.sums_stride = sums ? 2 * (last - first) / w.group : 0;
    const int64_t bytes = 2 * (last - first) * Lane::kLinesPerPair * kCacheLine;
    lines[i] = slice_of<Isa, Format>(panels[i], first, last, args->scratch + i * bytes);
    if constexpr (Format::kPacked) prefetch_pair<Isa, Format>(args, p + ahead + i, first, last);
  }
  for (int q = 0; q < 2 * kPairs; q += kPanels) {
    const Source source = part_of<kPanels>(lines, q);
    float* y = args->y + kPairColumns * p + kPanelRows * q;
    for (int r = 0; r < args->rows; r += step) {
      Scales scales[kPairs];
      for (int i = 0; i < kPairs; ++i) scales[i] = panels[i].scales.at(q % 2, r);
      block_of<Isa, Source, Format::kScaled, kRows>(args->rows - r < step ? args->rows - r : step, source, first, x + r,
                                                    first, last, scales, y + r * args->y_stride, args->y_stride);
    }
  }
  for (int i = 0; i < kPairs; ++i)
    if (last == w.padded_depth / 2)
      scale_rows<Isa, Source>(panels[i].row_scales, args->y + kPairColumns * (p + i), args->y_stride, args->rows);
}

template <class Isa, template <class> class F>
void tile_mm(const MatmulArgs* args) {
  using Format = F<Isa>;
  using Lane = typename Format::Lane;
  constexpr int kPairs = kPairsAtOnce<Isa>;
  const int64_t depth = args->weights.padded_depth / 2, slice = slice_pairs<Isa, Lane>(args->weights);
  for (int64_t first = 0; first < depth; first += slice) {
    const int64_t last = first + slice < depth ? first + slice : depth;
    const float* sums = sums_of_slice<Isa, Lane>(args, first, last);
    int p = 0;
    for (; p + kPairs <= args->pairs; p += kPairs) multiply_slice<Isa, Format, kPairs>(args, p, first, last, sums);
    if (p < args->pairs) multiply_slice<Isa, Format, 1>(args, p, first, last, sums);
  }
}

}  // namespace
}  // namespace tandem
