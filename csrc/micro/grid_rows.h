// Codebooks, where a tier decodes them in registers: 32 k of a panel at a time. Their sums end with the group, or with
// each of two. So a row's sum has the order that it has in block.h.
#pragma once

#include <type_traits>

#include "micro/dot_rows.h"

namespace tandem {
namespace {

constexpr int64_t kGridStep = 16;  // pairs of k

// Bytes from here to what is prefetched.
struct GridAhead {
  int64_t payload, scales;
};

// y = scale * sums + (y or 0), and no sums.
template <class Isa, int R>
TANDEM_INLINE void end_group(typename Isa::Vec (&sums)[R], const Scales& scales, int p, int64_t group, float* y,
                             int64_t stride) {
  typename Isa::Vec scale = load_scales<Isa>(scales.panel[p], scales.type, group);
  if constexpr (Isa::kGridUnit != 1.0f) scale = Isa::mul(scale, Isa::set1(Isa::kGridUnit));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    float* out = y + r * stride + kPanelRows * p;
    Isa::store(out, Isa::fma(sums[r], scale, group > 0 ? Isa::load(out) : Isa::zero()));
    sums[r] = Isa::zero();
  }
}

// Pairs [first, last) of k of both panels times R rows.
template <class Isa, class Format, int R>
void grid_block(const PairOfPanels& panels, const uint8_t* const* x, int64_t first, int64_t last, GridAhead ahead,
                float* y, int64_t stride) {
  using Lane = typename Format::Lane;
  const uint8_t* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = x[r];
  const bool short_groups = panels.scales.pairs_per_group < kGridStep;
  for (int64_t pair = first; pair < last; pair += kGridStep)
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      const uint8_t* blocks = panels.payload[p] + pair * Format::kPairBytes;
      for (int i = 0; i < kGridStep * Format::kPairBytes; i += kCacheLine) Isa::prefetch(blocks + i + ahead.payload);
      const int64_t group = pair / panels.scales.pairs_per_group;
      Isa::prefetch(panels.scales.of_group(p, group) + ahead.scales);
      typename Isa::Vec sums[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sums[r] = Isa::zero();
      grid_parts<Isa, Format::kGrid>(blocks, [&](int k, const auto& lines) {
        constexpr int kLines = std::remove_cvref_t<decltype(lines)>::kLines, kPart = 2 * kLines / Lane::kLinesPerPair;
        const int64_t at = 2 * Lane::kLinesPerPair * (2 * pair + k);
#pragma GCC unroll 8
        for (int i = 0; i < kLines; ++i) {
          const auto line = lines.line(i);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) sums[r] = Lane::dot(sums[r], line, Lane::x_line(rows[r] + at + 4 * i));
        }
        const int end = k + kPart;
        if (short_groups ? end % 16 == 0 : end == 2 * kGridStep)
          end_group<Isa, R>(sums, panels.scales, p, short_groups ? group + k / 16 : group, y, stride);
      });
    }
}

template <class Isa, class Format, int kMost>
TANDEM_INLINE void grid_block_of(int rows, const PairOfPanels& panels, const uint8_t* const* x, int64_t first,
                                 int64_t last, GridAhead ahead, float* y, int64_t stride) {
  if constexpr (kMost > 1) {
    if (rows < kMost) return grid_block_of<Isa, Format, kMost - 1>(rows, panels, x, first, last, ahead, y, stride);
  }
  grid_block<Isa, Format, kMost>(panels, x, first, last, ahead, y, stride);
}

template <class Isa, template <class> class F>
void grid_rows(const MatmulArgs* args) {
  using Format = F<Isa>;
  constexpr int kMost = Isa::kGridRows;
  const WeightView& w = args->weights;
  const uint8_t* const* x = reinterpret_cast<const uint8_t* const*>(args->x_rows);
  const int64_t depth = w.padded_depth / 2;
  const int64_t step_scales = 2 * kGridStep / w.group * group_bytes(w.scale_type);
  const int step = rows_per_block<kMost>(args->rows);
  for (int p = 0; p < args->pairs; ++p) {
    const PairOfPanels panels = pair_of_panels(w, args->first_pair + p);
    const uint8_t* following = panels.payload[0] + 2 * w.panel_bytes;
    const uint8_t* next = p + 1 < args->pairs || !args->next_panel ? following : args->next_panel;
    const PrefetchAt at =
        prefetch_at(depth / kGridStep, kGridStep * Format::kPairBytes, step_scales, next - panels.payload[0]);
    for (int r = 0; r < args->rows; r += step) {
      const int rows = args->rows - r < step ? args->rows - r : step;
      float* y = args->y + r * args->y_stride + kPairColumns * p;
      const int64_t turn = at.turn * kGridStep;
      grid_block_of<Isa, Format, kMost>(rows, panels, x + r, 0, turn, {at.payload[0], at.scales[0]}, y, args->y_stride);
      grid_block_of<Isa, Format, kMost>(rows, panels, x + r, turn, depth, {at.payload[1], at.scales[1]}, y,
                                        args->y_stride);
    }
  }
}

}  // namespace
}  // namespace tandem
