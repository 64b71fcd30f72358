// Few rows as digits (format/digit_row.h) times packed codes. Every digit's products are summed as integers, exactly,
// over a group of K. The three sums become one float, which is scaled and added, group after group. So nothing but sums
// over groups is rounded. Activations lose at most what is below 2^-22 of their group's largest.
//
// Why: 64 bytes of int4 times one row cost a Xeon 11 cycles of its port 0 with vdpbf16ps (4 instructions of two passes,
// 3 shifts). Memory leaves a core 10. vpdpbusd goes to two ports and takes four products a lane. Three digits need 6
// instructions, decoding 3, and ends of groups of 32 some 2: 5.6 cycles in all.
#pragma once

#include <stddef.h>

#include "format/int8_formats.h"
#include "micro/digit_prepare.h"
#include "micro/dot_rows.h"

namespace tandem {
namespace {

template <class Ints, template <class> class F>
class DigitProduct {
  using Isa = typename Ints::Isa;
  using Codes = F<Ints>;
  using Vec = typename Isa::Vec;
  using Sum = typename Ints::Sum;
  static constexpr int kPanels = 2, kMostRows = Ints::kDigitRows;

 public:
  explicit DigitProduct(const MatmulArgs* args)
      : args_(*args),
        layout_(digit_row_layout(args->weights)),
        group_bytes_(layout_.group / kDigitBlock * Codes::kBlockBytes) {}

  void run() {
    const int step = rows_per_block<kMostRows>(args_.rows);
    for (int p = 0; p < args_.pairs; ++p) {
      const PairOfPanels panels = pair_of_panels(args_.weights, args_.first_pair + p);
      float* y = args_.y + kPairColumns * p;
      for (int r = 0; r < args_.rows; r += step)
        stream<kMostRows>(args_.rows - r < step ? args_.rows - r : step, r, p, panels, y + r * args_.y_stride);
      scale_rows<Isa, UnitCodes>(panels.row_scales, y, args_.y_stride, args_.rows);
    }
  }

 private:
  struct UnitCodes {  // for scale_rows: codes of formats with one scale per row count 1
    static constexpr float kUnit = 1.0f;
  };
  struct Stretch {
    int64_t first, last;          // groups
    int64_t ahead, scales_ahead;  // bytes to what is prefetched
  };

  template <int kMost>
  TANDEM_INLINE void stream(int rows, int r, int p, const PairOfPanels& panels, float* y) {
    if constexpr (kMost > 1) {
      if (rows < kMost) return stream<kMost - 1>(rows, r, p, panels, y);
    }
    const WeightView& w = args_.weights;
    const uint8_t* following = panels.payload[0] + 2 * w.panel_bytes;
    const uint8_t* next = p + 1 < args_.pairs || !args_.next_panel ? following : args_.next_panel;
    const PrefetchAt ahead =
        prefetch_at(layout_.groups, group_bytes_, group_bytes(w.scale_type), next - panels.payload[0]);
    block<kMost>(panels, r, {0, ahead.turn, ahead.payload[0], ahead.scales[0]}, y);
    block<kMost>(panels, r, {ahead.turn, layout_.groups, ahead.payload[1], ahead.scales[1]}, y);
  }

  template <int R>
  void block(const PairOfPanels& panels, int first_row, const Stretch& stretch, float* y) {
    const uint8_t *x[R], *groups[R];
    for (int r = 0; r < R; ++r) {
      x[r] = static_cast<const uint8_t*>(args_.x_rows[first_row + r]);
      groups[r] = x[r] + layout_.at_groups;
    }
    const int64_t blocks = layout_.group / kDigitBlock, all = args_.weights.padded_depth / kDigitBlock;
    for (int64_t g = stretch.first; g < stretch.last; ++g) {
      const int64_t begin = g * blocks, end = begin + blocks < all ? begin + blocks : all;
      Sums<R> sums;
      start(groups, g, sums);
      accumulate(panels, x, begin, end, stretch.ahead, sums);
      add_scaled(panels.scales, stretch.scales_ahead, groups, g, sums, y);
    }
  }

  template <int R>
  struct Sums {
    Sum v[R][kPanels][kDigits];
  };

  template <class T>
  TANDEM_INLINE static T load(const uint8_t* p) {
    T value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
  }
  TANDEM_INLINE static float float_at(const uint8_t* groups, int64_t g, int64_t field) {
    return load<float>(groups + g * int64_t{sizeof(DigitGroup)} + field);
  }

  template <int R>
  TANDEM_INLINE static void start(const uint8_t* const (&groups)[R], int64_t g, Sums<R>& sums) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int d = 0; d < kDigits; ++d) {
        const Sum one = Ints::start(load<int32_t>(groups[r] + g * int64_t{sizeof(DigitGroup)} + 4 * d));
        for (int p = 0; p < kPanels; ++p) sums.v[r][p][d] = one;
      }
  }

  // Of blocks [begin, end).
  template <int R>
  TANDEM_INLINE static void accumulate(const PairOfPanels& panels, const uint8_t* const (&rows)[R], int64_t begin,
                                       int64_t end, int64_t ahead, Sums<R>& sums) {
    const uint8_t *const first = panels.payload[0], *const second = panels.payload[1];
    const uint8_t* x[R];
    for (int r = 0; r < R; ++r) x[r] = rows[r];
    int64_t b = begin;
    do {  // a loop that might not run at all would keep every sum twice
      const auto w0 = Codes::decode(first, b), w1 = Codes::decode(second, b);
      for (int i = 0; i < Codes::kBlockBytes; i += kCacheLine) {
        Isa::prefetch(first + b * Codes::kBlockBytes + i + ahead);
        Isa::prefetch(second + b * Codes::kBlockBytes + i + ahead);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
        for (int d = 0; d < kDigits; ++d) {
          const uint8_t* at = x[r] + kDigitBlockBytes * b + kDigitBlock * d;
          const typename Ints::X low = Ints::x(at), high = Ints::x(at + 4);
          sums.v[r][0][d] = Codes::dot(sums.v[r][0][d], w0, low, high);
          sums.v[r][1][d] = Codes::dot(sums.v[r][1][d], w1, low, high);
        }
    } while (++b < end);
  }

  // Exact but for two roundings: 256 * d1 + d0 to float, and the last sum.
  TANDEM_INLINE static Vec joined(const Sum (&sums)[kDigits], const uint8_t* groups, int64_t g) {
    const Vec unit = Isa::set1(float_at(groups, g, offsetof(DigitGroup, unit)));
    const Vec high_unit = Isa::set1(float_at(groups, g, offsetof(DigitGroup, high_unit)));
    const Vec low = Isa::mul(Codes::floats(Ints::joined(sums[1], sums[0])), unit);
    return Isa::fma(Codes::floats(sums[2]), high_unit, low);
  }

  // y = scale * sum + shift * sum of x + (y or 0), in group g.
  template <int R>
  TANDEM_INLINE void add_scaled(const Scales& scales, int64_t ahead, const uint8_t* const (&groups)[R], int64_t g,
                                const Sums<R>& sums, float* y) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      const bool scaled = scales.panel[0], shifted = scales.shifts[0];
      Vec scale = Isa::set1(1.0f), shift = Isa::zero();
      if (scaled) Isa::prefetch(scales.of_group(p, g) + ahead);
      if (scaled) scale = load_scales<Isa>(scales.panel[p], scales.type, g);
      if (shifted) shift = load_shifts<Isa>(scales.shifts[p], scales.type, scales.shift_type, g, scale);
      if constexpr (Codes::kUnit != 1.0f) scale = Isa::mul(scale, Isa::set1(Codes::kUnit));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        float* out = y + r * args_.y_stride + kPanelRows * p;
        Vec v = Isa::fma(joined(sums.v[r][p], groups[r], g), scale, g > 0 ? Isa::load(out) : Isa::zero());
        if (shifted) v = Isa::fma(Isa::set1(float_at(groups[r], g, offsetof(DigitGroup, sum))), shift, v);
        Isa::store(out, v);
      }
    }
  }

  const MatmulArgs& args_;
  const DigitRowLayout layout_;
  const int64_t group_bytes_;  // payload of a panel
};

template <class Ints, template <class> class F>
void digit_rows(const MatmulArgs* args) {
  DigitProduct<Ints, F>(args).run();
}

// From how many rows on an expert is left to others, by format; 0: always, unless a test asks for digits.
struct DigitsBelow {
  int32_t int8, int4, fp4, uint4, int6, uint2, int3, nl4;
};
// AMX: to tiles. More than 9 was not timed (docs/lab/kernel-choices.md).
constexpr DigitsBelow kDigitsBelowTiles = {9, 9, 9, 9, 9, 9, 9, 9};
// Where weights have scales of groups of 16 to 128 k; weights lay in L2.
constexpr DigitsBelow kDigitsBelowTilesOfGroups = {5, 5, 3, 5, 5, 5, 5, 5};

// Adds products of digits.
template <class Ints>
constexpr KernelTable with_digits(KernelTable table, DigitsBelow below = {}, DigitsBelow below_of_groups = {}) {
#define TANDEM_DIGIT_KERNELS(name, F)                                                                         \
  table.digits[int(Format::name)] = {digit_rows<Ints, F>, below.name, below_of_groups.name, F<Ints>::kOffset, \
                                     F<Ints>::kSplit};
  TANDEM_INT8_FORMATS(TANDEM_DIGIT_KERNELS)
#undef TANDEM_DIGIT_KERNELS
  table.cut_row = DigitRows<Ints>::cut_row;
  return table;
}

}  // namespace
}  // namespace tandem
