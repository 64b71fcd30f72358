// Rows of int8 activations times packed weights: codes are multiplied as integers, exactly, and the sum of a group is
// scaled by the weights' and the activations' scale and added in float, group after group. One algorithm for any number
// of rows: few pass over the weights once; for more, K is cut into slices whose payload stays in L1 while blocks of
// rows pass. A row is computed in the same order either way. Decoding is a few instructions, so nothing is unpacked.
#pragma once

#include "format/int8_formats.h"
#include "micro/dot_rows.h"
#include "micro/int8_prepare.h"

namespace tandem {
namespace {

constexpr int64_t kInt8SliceBytes = 16 * 1024;  // payload of a pair of panels

template <class Ints, template <class> class F>
class Int8Product {
  using Isa = typename Ints::Isa;
  using Codes = F<Ints>;
  using Vec = typename Isa::Vec;
  using Sum = typename Ints::Sum;
  static constexpr int kPanels = Ints::kPanels, kMostRows = Ints::kRows;

 public:
  explicit Int8Product(const MatmulArgs* args)
      : args_(*args), layout_(int8_row_layout(args->weights)), step_(rows_per_block<kMostRows>(args->rows)) {}

  void run() {
    const int64_t slice = args_.rows > step_ ? slice_groups() : layout_.groups;
    for (int64_t first = 0; first < layout_.groups; first += slice) {
      const int64_t last = first + slice < layout_.groups ? first + slice : layout_.groups;
      for (int p = 0; p < args_.pairs; ++p) run_pair(p, first, last);
    }
  }

 private:
  int64_t slice_groups() const {
    const int64_t bytes = 2 * layout_.group / kInt8Block * Codes::kBlockBytes;
    return bytes < kInt8SliceBytes ? kInt8SliceBytes / bytes : 1;
  }

  // Groups [first, last) of panel pair p of the call. What is prefetched lies a fixed distance ahead; from `turn` on
  // that is in other panels.
  void run_pair(int p, int64_t first, int64_t last) {
    const WeightView& w = args_.weights;
    const PairOfPanels panels = pair_of_panels(w, args_.first_pair + p);
    const uint8_t* following = panels.payload[0] + 2 * w.panel_bytes;
    const uint8_t* next = p + 1 < args_.pairs || !args_.next_panel ? following : args_.next_panel;
    const int64_t group_bytes = layout_.group / kInt8Block * Codes::kBlockBytes;
    int64_t turn = w.panel_bytes > kPrefetchBytes ? (w.panel_bytes - kPrefetchBytes) / group_bytes : 0;
    turn = turn < first ? first : turn > last ? last : turn;
    const int64_t beyond = next - panels.payload[0] + kPrefetchBytes - w.panel_bytes;
    for (int r = 0; r < args_.rows; r += step_) {
      const int rows = args_.rows - r < step_ ? args_.rows - r : step_;
      float* y = args_.y + r * args_.y_stride + kPairColumns * p;
      some_rows<kMostRows>(rows, panels, r, first, turn, kPrefetchBytes, y);
      some_rows<kMostRows>(rows, panels, r, turn, last, beyond, y);
    }
    if (last == layout_.groups)
      scale_rows<Isa, Unscaled>(panels.row_scales, args_.y + kPairColumns * p, args_.y_stride, args_.rows);
  }
  struct Unscaled {  // for scale_rows: codes of formats with one scale per row count 1
    static constexpr float kUnit = 1.0f;
  };

  template <int kMost>
  TANDEM_INLINE void some_rows(int rows, const PairOfPanels& panels, int r, int64_t first, int64_t last, int64_t ahead,
                               float* y) {
    if constexpr (kMost > 1) {
      if (rows < kMost) return some_rows<kMost - 1>(rows, panels, r, first, last, ahead, y);
    }
    block<kMost>(panels, r, first, last, ahead, y);
  }

  template <int R>
  struct Sums {
    Sum v[R][kPanels];
  };

  template <int R>
  void block(const PairOfPanels& panels, int first_row, int64_t first, int64_t last, int64_t ahead, float* y) {
    const uint8_t* x[R];
    for (int r = 0; r < R; ++r) x[r] = static_cast<const uint8_t*>(args_.x_rows[first_row + r]);
    const int64_t blocks = layout_.group / kInt8Block, all = args_.weights.padded_depth / kInt8Block;
    for (int64_t g = first; g < last; ++g) {
      const int64_t begin = g * blocks, end = begin + blocks < all ? begin + blocks : all;
      for (int q = 0; q < 2; q += kPanels) {
        Sums<R> sums;
        start(x, layout_.starts + 4 * g, sums);
        accumulate(panels.payload[q], panels.payload[q + kPanels - 1], x, begin, end, ahead, sums);
        add_scaled(panels.scales, q, x, g, sums, y + kPanelRows * q);
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
  TANDEM_INLINE void add_scaled(const Scales& scales, int q, const uint8_t* const (&x)[R], int64_t g,
                                const Sums<R>& sums, float* y) {
    const bool scaled = scales.panel[0], shifted = scales.shifts[0];
    Vec scale[kPanels], shift[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      scale[p] = Isa::set1(1.0f);  // where rows are scaled at the end
      shift[p] = Isa::zero();
      if (!scaled) continue;
      scale[p] = load_scales<Isa>(scales.panel[q + p], scales.type, g);
      if (shifted) shift[p] = load_shifts<Isa>(scales.shifts[q + p], scales.type, scales.shift_type, g, scale[p]);
      if (Codes::kUnit != 1.0f) scale[p] = Isa::mul(scale[p], Isa::set1(Codes::kUnit));
      Isa::prefetch(scales.of_group(q + p, g) + kScalesAhead);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec row_scale = Isa::set1(load<float>(x[r] + layout_.scales + 4 * g));
      for (int p = 0; p < kPanels; ++p) {
        Vec v = Isa::mul(Codes::floats(sums.v[r][p]), scale[p]);
        if (shifted) v = Isa::fma(Isa::set1(load<float>(x[r] + layout_.sums + 4 * g)), shift[p], v);
        float* out = y + r * args_.y_stride + kPanelRows * p;
        Isa::store(out, Isa::fma(v, row_scale, g > 0 ? Isa::load(out) : Isa::zero()));
      }
    }
  }

  const MatmulArgs& args_;
  const Int8RowLayout layout_;
  const int step_;
};

template <class Ints, template <class> class F>
void int8_rows(const MatmulArgs* args) {
  Int8Product<Ints, F>(args).run();
}

template <class Ints, template <class> class F>
constexpr Int8Kernels int8_kernels() {
  return {int8_rows<Ints, F>, nullptr, 0, F<Ints>::kOffset, F<Ints>::kSplit};
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

// Adds what a tier can do with int8 activations.
template <class Ints>
constexpr KernelTable with_int8(KernelTable table) {
#define TANDEM_INT8_KERNELS(name, F) table.int8[int(Format::name)] = int8_kernels<Ints, F>();
  TANDEM_INT8_FORMATS(TANDEM_INT8_KERNELS)
#undef TANDEM_INT8_KERNELS
  table.round_row = Int8Rounding<Ints>::round_row;
  table.peak_int8 = int8_peak<Ints>;
  return table;
}

}  // namespace
}  // namespace tandem
