// Few rows: the weights are streamed once and decoded in registers. Memory is the limit, so nothing is unpacked; the
// two panels of a pair are two independent chains and two streams, each prefetched by a fixed distance.
#pragma once

#include "micro/block.h"

namespace tandem {
namespace {

// How far ahead. Much further, and lines have left L1 again before they are used. 8 KiB suited Zen 5 better than 4.
// Panels of up to 16 KiB get 4: who takes somebody else's task next has fetched that much in vain. Every second line
// alone, and fetching into L2, were slower (docs/lab/kernel-choices.md).
constexpr int64_t kPrefetchBytes = 8192, kLeastPrefetchBytes = 4096;

// A panel as a row of equal units, each with its payload and its scales. While one is multiplied, another one is
// prefetched: always the same number of units further on, from `turn` on in the next panel. So all of both is asked
// for before it is used. Distances in bytes of a whole panel would leave half of its scales out.
struct PrefetchAt {
  int64_t turn;                   // units
  int64_t payload[2], scales[2];  // bytes to what is prefetched, before the turn and after it
};

// next: bytes from the panel to the next one.
TANDEM_INLINE PrefetchAt prefetch_at(int64_t units, int64_t payload_bytes, int64_t scale_bytes, int64_t next) {
  const int64_t quarter = units * payload_bytes / 4,
                least = quarter > kLeastPrefetchBytes ? quarter : kLeastPrefetchBytes;
  const int64_t bytes = least < kPrefetchBytes ? least : kPrefetchBytes;
  const int64_t most = bytes > payload_bytes ? bytes / payload_bytes : 1;
  const int64_t ahead = units < most ? units : most, turn = units - ahead;
  return {turn, {ahead * payload_bytes, next - turn * payload_bytes}, {ahead * scale_bytes, next - turn * scale_bytes}};
}

// Sums of activations over each group, for shifts: see Scales. Null where nothing is shifted.
struct GroupSums {
  const float* sums;
  int64_t stride;
};

// kPairs pairs of panels from pair p of the call on, rows [first, first + rows).
template <class Isa, class Format, int kMost, int kPairs>
TANDEM_INLINE void dot_pairs(const MatmulArgs* args, int p, int first, int rows, const GroupSums& x_sums) {
  using Source = PayloadSource<Isa, Format, 2 * kPairs>;
  const WeightView& w = args->weights;
  const uint8_t* const* x = reinterpret_cast<const uint8_t* const*>(args->x_rows) + first;
  const int64_t depth = w.padded_depth / 2, unit = w.group > 32 ? w.group / 2 : 16;  // of k, in pairs
  const int64_t unit_scales = w.group ? 2 * unit / w.group * group_bytes(w.scale_type) : 0;
  const int step = rows_per_block<kMost>(rows);
  PairOfPanels panels[kPairs];
  Source source{};
  for (int i = 0; i < kPairs; ++i) {
    panels[i] = pair_of_panels(w, args->first_pair + p + i);
    panels[i].scales.x_sums = x_sums.sums;
    panels[i].scales.sums_stride = x_sums.stride;
    source.panel[2 * i] = panels[i].payload[0], source.panel[2 * i + 1] = panels[i].payload[1];
  }
  const uint8_t* following = panels[0].payload[0] + kPairs * w.pair_bytes;
  const uint8_t* next = p + kPairs < args->pairs || !args->next_panel ? following : args->next_panel;
  const PrefetchAt ahead =
      prefetch_at(depth / unit, unit * Format::kPairBytes, unit_scales, next - panels[0].payload[0]);
  float* y = args->y + first * args->y_stride + kPairColumns * p;
  for (int r = 0; r < rows; r += step) {
    const auto part = [&](int64_t begin, int64_t end, int turned) {
      source.ahead = ahead.payload[turned];
      Scales scales[kPairs];
      for (int i = 0; i < kPairs; ++i) {
        panels[i].scales.ahead = ahead.scales[turned];
        scales[i] = panels[i].scales.at(0, r);
      }
      block_of<Isa, Source, Format::kScaled, kMost>(rows - r < step ? rows - r : step, source, 0, x + r, begin, end,
                                                    scales, y + r * args->y_stride, args->y_stride);
    };
    if (ahead.turn > 0) part(0, ahead.turn * unit, 0);
    part(ahead.turn * unit, depth, 1);
  }
  for (int i = 0; i < kPairs; ++i)
    scale_rows<Isa, Source>(panels[i].row_scales, y + kPairColumns * i, args->y_stride, rows);
}

// Rows [first, first + rows) of the call, all pairs of panels.
template <class Isa, class Format, int kMost>
void dot_some_rows(const MatmulArgs* args, int first, int rows, const GroupSums& x_sums) {
  constexpr int kWide = kWideRowsOf<Isa>;
  int p = 0;
  if constexpr (kWide > 0) {
    for (; rows <= kWide && p + 2 <= args->pairs; p += 2)
      dot_pairs<Isa, Format, kWide, 2>(args, p, first, rows, x_sums);
  }
  for (; p < args->pairs; ++p) dot_pairs<Isa, Format, kMost, 1>(args, p, first, rows, x_sums);
}

// kMost: rows of a block.
template <class Isa, template <class> class F, int kMost>
void dot_rows(const MatmulArgs* args) {
  using Format = F<Isa>;
  const WeightView& w = args->weights;
  if (!w.shift_offset) return dot_some_rows<Isa, Format, kMost>(args, 0, args->rows, {nullptr, 0});
  const int64_t groups = w.padded_depth / w.group;
  const int most = int(kFewRowsScratchBytes / 4 / groups);  // rows whose sums fit; see kMaxShiftedGroups
  float* sums = reinterpret_cast<float*>(args->scratch);
  for (int first = 0; first < args->rows; first += most) {
    const int rows = args->rows - first < most ? args->rows - first : most;
    const uint8_t* const* x = reinterpret_cast<const uint8_t* const*>(args->x_rows) + first;
    sum_groups<Isa, typename Format::Lane>(x, rows, w.group, 0, groups, sums);
    dot_some_rows<Isa, Format, kMost>(args, first, rows, {sums, groups});
  }
}

}  // namespace
}  // namespace tandem
