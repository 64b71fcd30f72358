// Rows of int8 activations times packed weights. Codes are multiplied as integers, exactly. The sum of a group is
// scaled by the weights' and the activations' scale and added in float, group after group. One algorithm for any number
// of rows: few pass over the weights once; for more, K is cut into slices whose payload stays in L1 while blocks of
// rows pass. A row is computed in the same order either way. Decoding is a few instructions, so nothing is unpacked.
#pragma once

#include "format/int8_formats.h"
#include "micro/dot_rows.h"
#include "micro/int8_blocks.h"
#include "micro/int8_prepare.h"

namespace tandem {
namespace {

constexpr int64_t kInt8SliceBytes = 8 * 1024;     // payload of a pair of panels; the next pair's is in L1, too
constexpr int64_t kScaleFloats = 4 * kPanelRows;  // of a group in scratch: scales of both panels, shifts of both
constexpr int64_t kMostSliceGroups = kFewRowsScratchBytes / int64_t(sizeof(float)) / kScaleFloats;

// Scales and shifts of groups [first, last) of a pair of panels as float, so that no format of them is known further
// in.
template <class Isa>
void widen_scales(const PairOfPanels& panels, int64_t first, int64_t last, float unit, float* to) {
  const Scales& scales = panels.scales;
  for (int64_t g = first; g < last; ++g, to += kScaleFloats)
    for (int p = 0; p < 2; ++p) {
      typename Isa::Vec scale = Isa::set1(1.0f), shift = Isa::zero();  // where rows are scaled at the end
      if (scales.panel[p]) scale = load_scales<Isa>(scales.panel[p], scales.type, g);
      if (scales.shifts[p]) shift = load_shifts<Isa>(scales.shifts[p], scales.type, scales.shift_type, g, scale);
      Isa::store(to + kPanelRows * p, Isa::mul(scale, Isa::set1(unit)));
      Isa::store(to + kPanelRows * (2 + p), shift);
    }
}

template <class Ints, template <class> class F>
class Int8Product {
  using Isa = typename Ints::Isa;
  using Codes = F<Ints>;
  using Vec = typename Isa::Vec;
  using Sum = typename Ints::Sum;
  static constexpr int kPanels = Ints::kPanels, kMostRows = Ints::kRows;

 public:
  explicit Int8Product(const MatmulArgs* args)
      : args_(*args),
        layout_(int8_row_layout(args->weights)),
        group_bytes_(layout_.group / kInt8Block * Codes::kBlockBytes),
        step_(rows_per_block<kMostRows>(args->rows)) {}

  void run() {
    const int64_t by_l1 = args_.rows > step_ ? kInt8SliceBytes / (2 * group_bytes_) : layout_.groups;
    const int64_t slice = by_l1 < 1 ? 1 : by_l1 < kMostSliceGroups ? by_l1 : kMostSliceGroups;
    for (int64_t first = 0; first < layout_.groups; first += slice) {
      const int64_t last = first + slice < layout_.groups ? first + slice : layout_.groups;
      for (int p = 0; p < args_.pairs; ++p) run_pair(p, first, last);
    }
  }

 private:
  // Groups [first, last) of panel pair p of the call.
  void run_pair(int p, int64_t first, int64_t last) {
    const WeightView& w = args_.weights;
    const PairOfPanels panels = pair_of_panels(w, args_.first_pair + p);
    float* const scales = reinterpret_cast<float*>(args_.scratch);
    widen_scales<Isa>(panels, first, last, Codes::kUnit, scales);
    const uint8_t* following = panels.payload[0] + 2 * w.panel_bytes;
    const uint8_t* next = p + 1 < args_.pairs || !args_.next_panel ? following : args_.next_panel;
    if (panels.scales.panel[0]) fetch_scales(panels.scales, next - panels.payload[0], first, last);
    if (args_.rows > step_)
      pass_rows(p, panels, {first, last, next - panels.payload[0]});
    else
      stream(p, panels, {first, last, next - panels.payload[0]});
    if (last == layout_.groups)
      scale_rows<Isa, Unscaled>(panels.row_scales, args_.y + kPairColumns * p, args_.y_stride, args_.rows);
  }
  struct Unscaled {  // for scale_rows: codes of formats with one scale per row count 1
    static constexpr float kUnit = 1.0f;
  };
  struct Slice {
    int64_t first, last;  // groups
    int64_t ahead;        // bytes from payload to what is prefetched
  };

  void fetch_scales(const Scales& scales, int64_t ahead, int64_t first, int64_t last) {
    for (int q = 0; q < 2; ++q)
      for (const uint8_t *at = scales.of_group(q, first), *end = scales.of_group(q, last); at < end; at += kCacheLine)
        Isa::prefetch_l2(at + ahead);
  }

  // One block of rows.
  void stream(int p, const PairOfPanels& panels, const Slice& slice) {
    const PrefetchAt ahead = prefetch_at(layout_.groups, group_bytes_, 0, slice.ahead);
    const int64_t turn = ahead.turn < slice.first ? slice.first : ahead.turn > slice.last ? slice.last : ahead.turn;
    float* y = args_.y + kPairColumns * p;
    some_rows<kMostRows>(args_.rows, panels, 0, {slice.first, turn, ahead.payload[0]}, slice.first, y);
    some_rows<kMostRows>(args_.rows, panels, 0, {turn, slice.last, ahead.payload[1]}, slice.first, y);
  }

  // Many: the slice stays in L1 while they pass, and the next pair's is asked for.
  void pass_rows(int p, const PairOfPanels& panels, const Slice& slice) {
    for (int r = 0; r < args_.rows; r += step_) {
      const int rows = args_.rows - r < step_ ? args_.rows - r : step_;
      float* y = args_.y + r * args_.y_stride + kPairColumns * p;
      some_rows<kMostRows>(rows, panels, r, slice, slice.first, y);
    }
  }

  // Scales in scratch begin with those of group `origin`.
  template <int kMost>
  TANDEM_INLINE void some_rows(int rows, const PairOfPanels& panels, int r, const Slice& slice, int64_t origin,
                               float* y) {
    if constexpr (kMost > 1) {
      if (rows < kMost) return some_rows<kMost - 1>(rows, panels, r, slice, origin, y);
    }
    block<kMost>(panels, r, slice, origin, y);
  }

  template <int R>
  struct Sums {
    Sum v[R][kPanels];
  };

  // Not inlined: it is called in three places, for every number of rows.
  template <int R>
  __attribute__((noinline)) void block(const PairOfPanels& panels, int first_row, const Slice& slice, int64_t origin,
                                       float* y) {
    const uint8_t* x[R];
    for (int r = 0; r < R; ++r) x[r] = static_cast<const uint8_t*>(args_.x_rows[first_row + r]);
    const int64_t blocks = layout_.group / kInt8Block, all = args_.weights.padded_depth / kInt8Block;
    const float* scales = reinterpret_cast<const float*>(args_.scratch) + (slice.first - origin) * kScaleFloats;
    const uint8_t* const payload[2] = {panels.payload[0], panels.payload[1]};
    // What is stored might be anything's memory, as far as the compiler knows: what is used between is copied first.
    const Int8RowLayout layout = layout_;
    const int64_t last = slice.last, ahead = slice.ahead, stride = args_.y_stride;
    const bool shifted = args_.weights.shift_offset;
    for (int64_t g = slice.first; g < last; ++g, scales += kScaleFloats) {
      const int64_t begin = g * blocks, end = begin + blocks < all ? begin + blocks : all;
      for (int q = 0; q < 2; q += kPanels) {
        Sums<R> sums;
        start(x, layout.starts + 4 * g, sums);
        accumulate(payload[q], payload[q + kPanels - 1], x, begin, end, ahead, sums);
        add_scaled(layout, stride, shifted, scales + kPanelRows * q, x, g, sums, y + kPanelRows * q);
      }
    }
  }

  template <class T>
  TANDEM_INLINE static T load(const uint8_t* p) {
    T value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
  }

  template <int R>
  TANDEM_INLINE static void start(const uint8_t* const (&x)[R], int64_t at, Sums<R>& sums) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Sum one = Ints::start(load<int32_t>(x[r] + at));
      for (int p = 0; p < kPanels; ++p) sums.v[r][p] = one;
    }
  }

  // Of blocks [begin, end) of one or two panels.
  template <int R>
  TANDEM_INLINE static void accumulate(const uint8_t* first, const uint8_t* second, const uint8_t* const (&rows)[R],
                                       int64_t begin, int64_t end, int64_t ahead, Sums<R>& sums) {
    const uint8_t* x[R];
    for (int r = 0; r < R; ++r) x[r] = rows[r];
    int64_t b = begin;
    do {  // a loop that might not run at all kept every sum twice
      const auto w0 = Codes::decode(first, b), w1 = Codes::decode(second, b);
      for (int i = 0; i < Codes::kBlockBytes; i += kCacheLine) {
        Isa::prefetch(first + b * Codes::kBlockBytes + i + ahead);
        if constexpr (kPanels == 2) Isa::prefetch(second + b * Codes::kBlockBytes + i + ahead);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const typename Ints::X low = Ints::x(x[r] + kInt8Block * b), high = Ints::x(x[r] + kInt8Block * b + 4);
        sums.v[r][0] = Codes::dot(sums.v[r][0], w0, low, high);
        if constexpr (kPanels == 2) sums.v[r][1] = Codes::dot(sums.v[r][1], w1, low, high);
      }
    } while (++b < end);
  }

  // y = scale of x * (scale of w * sum + shift * sum of x) + (y or 0)
  template <int R>
  TANDEM_INLINE static void add_scaled(const Int8RowLayout& layout, int64_t stride, bool shifted, const float* scales,
                                       const uint8_t* const (&x)[R], int64_t g, const Sums<R>& sums, float* y) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec row_scale = Isa::set1(load<float>(x[r] + layout.scales + 4 * g));
      for (int p = 0; p < kPanels; ++p) {
        const float* scale = scales + kPanelRows * p;
        Vec v = Isa::mul(Codes::floats(sums.v[r][p]), Isa::load(scale));
        if (shifted) {
          const Vec row_sum = Isa::set1(load<float>(x[r] + layout.sums + 4 * g));
          v = Isa::fma(row_sum, Isa::load(scale + 2 * kPanelRows), v);
        }
        float* out = y + r * stride + kPanelRows * p;
        Isa::store(out, Isa::fma(v, row_scale, g > 0 ? Isa::load(out) : Isa::zero()));
      }
    }
  }

  const MatmulArgs& args_;
  const Int8RowLayout layout_;
  const int64_t group_bytes_;  // payload of a panel
  const int step_;
};

template <class Ints, template <class> class F>
void int8_rows(const MatmulArgs* args) {
  const Int8RowLayout layout = int8_row_layout(args->weights);
  if (layout.block > layout.group) return int8_blocks<Ints, F>(args);
  if constexpr (!is_grid(F<Ints>::kFormat)) Int8Product<Ints, F>(args).run();
}

template <class Ints, template <class> class F>
constexpr IntegerKernels int8_kernels(int32_t below_rows) {
  return {int8_rows<Ints, F>, below_rows, below_rows, F<Ints>::kOffset, F<Ints>::kSplit};
}

// See lane_peak. Every loop over the sums is unrolled, else they would live in memory.
template <class Ints>
int64_t int8_peak(int64_t rounds, uint8_t* scratch) {
  constexpr int kChains = Ints::kPanels * Ints::kRows;
  for (int i = 0; i < 192; ++i) scratch[i] = uint8_t(i * 37 & 63);
  const auto w = Ints::nibbles(scratch);
  auto low = Ints::x(scratch + 64), high = Ints::x(scratch + 68);
  typename Ints::Sum sum[kChains];
#pragma GCC unroll 24
  for (int c = 0; c < kChains; ++c) sum[c] = Ints::start(0);
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 24
    for (int c = 0; c < kChains; ++c) {
      sum[c] = Ints::dot_small(sum[c], w, low, high);
      Ints::keep(sum[c]);
      Ints::keep(low);  // or products would be shared
    }
  return rounds * kChains * kPanelRows * kInt8Block * 2;
}

// From this many rows on AMX does not round to integers. Matrix tiles multiply bf16 three times as fast as AVX-512 does
// integers: 17 to 22 against 6.6 TOPS on a Xeon of 16 threads. Tiles of integers would have to be scaled in float after
// every group. The limit comes from these ceilings; both ways were not timed.
constexpr int32_t kInt8BelowTiles = 12;

// What a tier can do with int8 activations.
template <class Ints>
constexpr KernelTable int8_activations(Tier tier, int32_t below_rows = INT32_MAX) {
  KernelTable table{};
  table.tier = tier;
#define TANDEM_INT8_KERNELS(name, F) table.int8[int(Format::name)] = int8_kernels<Ints, F>(below_rows);
  TANDEM_INT8_FORMATS(TANDEM_INT8_KERNELS)
  TANDEM_INT8_GRID_FORMATS(TANDEM_INT8_KERNELS)
#undef TANDEM_INT8_KERNELS
  table.round_row = Int8Rounding<Ints>::round_row;
  table.peak_int8 = int8_peak<Ints>;
  return table;
}

}  // namespace
}  // namespace tandem
