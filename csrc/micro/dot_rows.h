// Few rows: the weights are streamed once and decoded in registers. Memory is the limit, so nothing is unpacked; the
// two panels of a pair are two independent chains, and the line a whole call's step ahead is prefetched.
#pragma once

#include "micro/block.h"

namespace tandem {
namespace {

constexpr int64_t kPrefetchBytes = 2048;  // ahead in the same panel, when the caller does not say what comes next

template <class Isa, template <class> class F>
void dot_rows(const MatmulArgs* args) {
  using Format = F<Isa>;
  using Source = PayloadSource<Isa, Format>;
  const WeightView& w = args->weights;
  const uint8_t* const* x = reinterpret_cast<const uint8_t* const*>(args->x_rows);
  const int step = rows_per_block<Isa::kDotRows>(args->rows);
  for (int p = 0; p < args->pairs; ++p) {
    const PairOfPanels panels = pair_of_panels(w, args->first_pair + p);
    const uint8_t* next = p + 1 < args->pairs ? panels.payload[0] + 2 * w.panel_bytes : args->next_panel;
    const int64_t ahead = next ? next - panels.payload[0] : kPrefetchBytes;
    const Source source{{panels.payload[0], panels.payload[1]}, ahead};
    float* y = args->y + kPairColumns * p;
    for (int r = 0; r < args->rows; r += step)
      block_of<Isa, Source, Format::kScaled, Isa::kDotRows>(args->rows - r < step ? args->rows - r : step, source, 0,
                                                            x + r, 0, w.padded_depth / 2, panels.scales,
                                                            y + r * args->y_stride, args->y_stride);
    scale_rows<Isa>(panels.row_scales, y, args->y_stride, args->rows);
  }
}

}  // namespace
}  // namespace tandem
