// Few rows: the weights are streamed once and decoded in registers. Memory is the limit, so nothing is unpacked; the
// two panels of a pair are two independent chains, and the line a whole call's step ahead is prefetched.
#pragma once

#include "micro/block.h"

namespace tandem {
namespace {

constexpr int64_t kPrefetchBytes = 2048;  // ahead in the same panel, when the caller does not say what comes next

// Rows [first, first + rows) of the call, all pairs of panels. sums: see Scales; null where nothing is shifted.
template <class Isa, class Format>
void dot_some_rows(const MatmulArgs* args, int first, int rows, const float* sums, int64_t sums_stride) {
  using Source = PayloadSource<Isa, Format>;
  const WeightView& w = args->weights;
  const uint8_t* const* x = reinterpret_cast<const uint8_t* const*>(args->x_rows) + first;
  const int step = rows_per_block<Isa::kDotRows>(rows);
  for (int p = 0; p < args->pairs; ++p) {
    PairOfPanels panels = pair_of_panels(w, args->first_pair + p);
    panels.scales.x_sums = sums;
    panels.scales.sums_stride = sums_stride;
    const uint8_t* next = p + 1 < args->pairs ? panels.payload[0] + 2 * w.panel_bytes : args->next_panel;
    const int64_t ahead = next ? next - panels.payload[0] : kPrefetchBytes;
    const Source source{{panels.payload[0], panels.payload[1]}, ahead};
    float* y = args->y + first * args->y_stride + kPairColumns * p;
    for (int r = 0; r < rows; r += step)
      block_of<Isa, Source, Format::kScaled, Isa::kDotRows>(rows - r < step ? rows - r : step, source, 0, x + r, 0,
                                                            w.padded_depth / 2, panels.scales.at(0, r),
                                                            y + r * args->y_stride, args->y_stride);
    scale_rows<Isa>(panels.row_scales, y, args->y_stride, rows);
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
