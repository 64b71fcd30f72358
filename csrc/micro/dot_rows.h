// Few rows: the weights are streamed once and decoded in registers. Memory is the limit, so nothing is unpacked; the
// two panels of a pair are two independent chains and two streams, each prefetched by a fixed distance.
#pragma once

#include "micro/block.h"

namespace tandem {
namespace {

// How far ahead. bf16 on a Xeon with 16 cores and 215 GB/s: 2 to 8 KiB reached 214 to 218 GB/s, no prefetching 186, and
// a whole pair of panels ahead 66, because those lines had left L1 again before they were used. 8 KiB suited Zen 5
// better than 4.
constexpr int64_t kPrefetchBytes = 8192;

// The pair of k from which on the prefetched line lies in a later panel; a multiple of the group.
template <class Format>
TANDEM_INLINE int64_t prefetch_turn(const WeightView& w) {
  const int64_t unit = w.group > 32 ? w.group / 2 : 16, depth = w.padded_depth / 2;
  const int64_t turn = (w.panel_bytes - kPrefetchBytes) / Format::kPairBytes;
  return turn <= 0 ? 0 : (turn < depth ? turn : depth - 1) / unit * unit;
}

// Rows [first, first + rows) of the call, all pairs of panels. sums: see Scales; null where nothing is shifted.
template <class Isa, class Format>
void dot_some_rows(const MatmulArgs* args, int first, int rows, const float* sums, int64_t sums_stride) {
  using Source = PayloadSource<Isa, Format>;
  const WeightView& w = args->weights;
  const uint8_t* const* x = reinterpret_cast<const uint8_t* const*>(args->x_rows) + first;
  const int64_t depth = w.padded_depth / 2, turn = prefetch_turn<Format>(w);
  const int step = rows_per_block<Isa::kDotRows>(rows);
  for (int p = 0; p < args->pairs; ++p) {
    PairOfPanels panels = pair_of_panels(w, args->first_pair + p);
    panels.scales.x_sums = sums;
    panels.scales.sums_stride = sums_stride;
    const uint8_t* following = panels.payload[0] + 2 * w.panel_bytes;
    const uint8_t* next = p + 1 < args->pairs || !args->next_panel ? following : args->next_panel;
    Source source{{panels.payload[0], panels.payload[1]}, 0};
    float* y = args->y + first * args->y_stride + kPairColumns * p;
    for (int r = 0; r < rows; r += step) {
      const auto part = [&](int64_t begin, int64_t end) {
        block_of<Isa, Source, Format::kScaled, Isa::kDotRows>(rows - r < step ? rows - r : step, source, 0, x + r,
                                                              begin, end, panels.scales.at(0, r),
                                                              y + r * args->y_stride, args->y_stride);
      };
      source.ahead = kPrefetchBytes;
      if (turn > 0) part(0, turn);
      source.ahead = next - panels.payload[0] + kPrefetchBytes - w.panel_bytes;
      part(turn, depth);
    }
    scale_rows<Isa, Source>(panels.row_scales, y, args->y_stride, rows);
  }
}

template <class Isa, template <class> class F>
void dot_rows(const MatmulArgs* args) {
  using Format = F<Isa>;
  const WeightView& w = args->weights;
  if (!w.shift_offset) return dot_some_rows<Isa, Format>(args, 0, args->rows, nullptr, 0);
  const int64_t groups = w.padded_depth / w.group;
  const int most = int(kMatmulScratchBytes / 4 / groups);  // rows whose sums fit; see kMaxShiftedGroups
  float* sums = reinterpret_cast<float*>(args->scratch);
  for (int first = 0; first < args->rows; first += most) {
    const int rows = args->rows - first < most ? args->rows - first : most;
    const uint8_t* const* x = reinterpret_cast<const uint8_t* const*>(args->x_rows) + first;
    sum_groups<Isa, typename Format::Lane>(x, rows, w.group, 0, groups, sums);
    dot_some_rows<Isa, Format>(args, first, rows, sums, groups);
  }
}

}  // namespace
}  // namespace tandem
