#include "format/quantise.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "format/codes.h"
#include "format/interleave.h"
#include "format/scale_table.h"
#include "runtime/tiers.h"

namespace tandem {
namespace {

// Initial values of a group's scale around the likely one, which comes first and wins where others are no better:
// formats/rounding.py. The int4 weight of the largest magnitude has a negative code, so that all 16 codes are used.
struct Grid {
  static constexpr int kTried = 16;
  float low, high;
  std::array<float, kTried> targets{};

  Grid(float lowest, float highest, double likely, double spread) : low(lowest), high(highest) {
    for (int i = 0; i < kTried; ++i) {
      const int step = i % 2 ? -(i + 1) / 2 : i / 2;  // 0, -1, 1, -2, 2, …
      targets[size_t(i)] = float(likely + spread * step / (kTried / 2));
    }
  }
  FitGrid view() const { return {low, high, targets.data(), kTried}; }
};

const Grid& grid_of(Format format) {
  static const Grid int8(-127.0f, 127.0f, 127, 4), int4(-8.0f, 7.0f, -8, 2.4);
  return format == Format::int8 ? int8 : int4;
}

// At least `bytes` of this thread's own: a panel's rows are more than an allocator keeps between two of them.
uint8_t* scratch(int which, int64_t bytes) {
  static thread_local std::vector<uint8_t> buffers[3];
  std::vector<uint8_t>& buffer = buffers[which];
  if (int64_t(buffer.size()) < bytes + kCacheLine) buffer.resize(size_t(bytes + kCacheLine));
  const uintptr_t start = reinterpret_cast<uintptr_t>(buffer.data());
  return buffer.data() + (-start & (kCacheLine - 1));
}

// Weights [padded_depth][16], one row per lane.
const uint8_t* side_by_side(const WeightView& w, const MatrixSource& source, int64_t first_row) {
  const int64_t size = source.type == DType::f32 ? 4 : 2, stride = source.depth * size;
  const int64_t rows = std::clamp<int64_t>(source.rows - first_row, 0, kPanelRows);
  uint8_t* lanes = scratch(0, kPanelRows * size * w.padded_depth);
  const auto interleave = source.type == DType::f32 ? interleave32 : interleave16;
  interleave(static_cast<const uint8_t*>(source.data) + first_row * stride, stride, rows, source.depth, lanes);
  const int64_t used = kPanelRows * stride;
  std::memset(lanes + used, 0, size_t(kPanelRows * size * w.padded_depth - used));
  return lanes;
}

void fit_groups_of(const WeightView& w, const uint8_t* lanes, DType type, int8_t* codes, uint8_t* panel) {
  const int64_t groups = groups_of(w);
  uint16_t* scales = reinterpret_cast<uint16_t*>(scratch(2, groups * kPanelRows * int64_t(sizeof(uint16_t))));
  const PanelFit fit{lanes, type, groups, w.group, grid_of(w.format).view(), codes, scales};
  widest_kernels().fit_panel(&fit);
  for (int64_t i = 0; i < groups * kPanelRows; ++i)
    put_scale(w, panel, i / kPanelRows, i % kPanelRows, float_of_bf16(scales[i]));
}

float number_at(const uint8_t* lanes, DType type, int64_t i) {
  return type == DType::f32 ? reinterpret_cast<const float*>(lanes)[i]
                            : float_of_bf16(reinterpret_cast<const uint16_t*>(lanes)[i]);
}

// int8 with one scale per row: that of its largest weight, since a search finds hardly anything better.
void round_row(const WeightView& w, const uint8_t* lanes, DType type, int64_t row, int8_t* codes, uint8_t* panel) {
  float largest = 0.0f;
  for (int64_t k = 0; k < w.padded_depth; ++k)
    largest = std::max(largest, std::fabs(number_at(lanes, type, k * kPanelRows + row)));
  put_scale(w, panel, 0, row, largest / 127.0f);
  const float scale = get_scale(w, panel, 0, row), inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  for (int64_t k = 0; k < w.padded_depth; ++k) {
    const float code = std::nearbyint(number_at(lanes, type, k * kPanelRows + row) * inverse);
    codes[k * kPanelRows + row] = int8_t(code > -127.0f ? std::min(code, 127.0f) : -127.0f);  // of NaN, too
  }
}

}  // namespace

void quantise_rows(const WeightView& w, const MatrixSource& source, int64_t first_row, uint8_t* panel) {
  const uint8_t* lanes = side_by_side(w, source, first_row);
  int8_t* codes = reinterpret_cast<int8_t*>(scratch(1, kPanelRows * int64_t{w.padded_depth}));
  if (w.group)
    fit_groups_of(w, lanes, source.type, codes, panel);
  else
    for (int64_t row = 0; row < kPanelRows; ++row) round_row(w, lanes, source.type, row, codes, panel);
  (is_nibble(w.format) ? join_nibbles : join_bytes)(codes, w.padded_depth, panel);
}

}  // namespace tandem
