// Rows of int8 activations times weights whose scales are integers times a half that 256 k share: GGUF's K-quants and
// codebooks. Activations have one scale for these 256 k, too. So what is between is exact in integers: products of
// codes, sums of a group times its scale, and what is added after scaling. Float comes once for 256 k.
#pragma once

#include <type_traits>

#include "format/int8_formats.h"
#include "micro/dot_rows.h"
#include "micro/int8_prepare.h"

namespace tandem {
namespace {

constexpr int64_t kInt8BlocksBytes = 8 * 1024;  // of payload of a pair of panels, which stay in L1 while rows pass

// How the scales of a format's groups are stored: where their halves and integers lie in a table of 256 k.
template <ScaleType kType>
struct SharedScales {
  static constexpr bool kOdd = kType == ScaleType::odd8 || kType == ScaleType::odd16;
  static constexpr bool kNibbles = kType == ScaleType::nibbles16;
  static constexpr int kGroups = kType == ScaleType::bytes8 || kType == ScaleType::odd8 ? 8 : 16;
  static constexpr int kGroup = int(kSharedBlock) / kGroups;  // k
  static constexpr int64_t kAtIntegers = kPanelRows * (kNibbles ? 4 : 2);
  static constexpr int64_t kTableBytes = kAtIntegers + kPanelRows * kGroups / (kOdd ? 2 : 1);
  static constexpr float kOfHalf = kOdd ? 0.125f : 1.0f;

  template <class Ints>
  TANDEM_INLINE static auto integers(const uint8_t* table, int g) {
    const uint8_t* at = table + kAtIntegers + kPanelRows * (kOdd ? g / 2 : g);
    if constexpr (kOdd) return g % 2 ? Ints::template odd_scales<4>(at) : Ints::template odd_scales<0>(at);
    if constexpr (kNibbles) return Ints::low_nibbles(at);
    if constexpr (!kOdd && !kNibbles) return Ints::signed_scales(at);
  }
  template <class Ints>
  TANDEM_INLINE static auto row_scales(const uint8_t* table, int g) {
    const uint8_t* at = table + kAtIntegers + kPanelRows * (g / 2);
    return g % 2 ? Ints::Grids::template odd_scales<4>(at) : Ints::Grids::template odd_scales<0>(at);
  }
  // Of groups g and g + 1, for dot_shifts. shifts: their halves.
  template <class Ints>
  TANDEM_INLINE static auto shifts(const uint8_t* shifts, int g) {
    return Ints::template shifts<kNibbles>(shifts + kPanelRows * (2 + g));
  }
};

// Whether a tier multiplies codebooks row by row.
template <class Ints>
concept HasGridRows = requires { typename Ints::Grids; };
template <class Ints, bool kByRows>
struct TotalsOf {
  using Type = typename Ints::Sum;
};
template <class Ints>
struct TotalsOf<Ints, true> {
  using Type = typename Ints::Grids::Sum;
};

// Whether weights are asked for by hand: see kAsksAhead.
template <class Ints>
constexpr bool asks_ahead() {
  if constexpr (requires { Ints::kAsksAhead; })
    return Ints::kAsksAhead;
  else
    return true;
}

template <class Ints, template <class> class F, ScaleType kType>
class Int8Blocks {
  using Isa = typename Ints::Isa;
  using Codes = F<Ints>;
  using Scaling = SharedScales<kType>;
  using Vec = typename Isa::Vec;
  using Sum = typename Ints::Sum;
  static constexpr bool kByRows = HasGridRows<Ints> && is_grid(Codes::kFormat);
  static constexpr int kPanels = Codes::kAtOnce, kMostRows = Ints::kBlockRows;
  static constexpr int kWide = kPanels == 2 ? 4 : kPanels;  // of one row, where panels lie in a row
  static constexpr bool kAsks = kPanels == 1 || asks_ahead<Ints>();
  static constexpr int kGroups = Scaling::kGroups;
  static constexpr int kUnit = 32, kUnits = int(kSharedBlock) / kUnit;  // k whose codes are decoded together
  static constexpr int64_t kUnitBytes = kUnit / kInt8Block * Codes::kBlockBytes, kPayload = kUnits * kUnitBytes;

 public:
  explicit Int8Blocks(const MatmulArgs* args)
      : args_(*args), layout_(int8_row_layout(args->weights)), step_(rows_per_block<kMostRows>(args->rows)) {}

  void run() {
    const int64_t most = args_.rows > step_ ? kInt8BlocksBytes / (2 * kPayload) : layout_.blocks;
    const int64_t slice = most < 1 ? 1 : most;
    for (int64_t first = 0; first < layout_.blocks; first += slice) {
      const int64_t last = first + slice < layout_.blocks ? first + slice : layout_.blocks;
      int p = 0;
      if (kWide > kPanels && args_.rows == 1 && args_.weights.pair_bytes == 2 * args_.weights.second)
        for (; p + kWide / 2 <= args_.pairs; p += kWide / 2) run_pair<kWide>(p, first, last);
      for (; p < args_.pairs; ++p) run_pair<kPanels>(p, first, last);
    }
  }

 private:
  struct Stretch {
    int64_t first, last;          // blocks of 256 k
    int64_t ahead, scales_ahead;  // bytes to what is prefetched
  };

  // One or two pairs of panels, P panels at once.
  template <int P>
  void run_pair(int p, int64_t first, int64_t last) {
    constexpr int kPairs = P == 4 ? 2 : 1;
    const WeightView& w = args_.weights;
    const PairOfPanels panels = pair_of_panels(w, args_.first_pair + p);
    const uint8_t* following = panels.payload[0] + kPairs * w.pair_bytes;
    const uint8_t* next = p + kPairs < args_.pairs || !args_.next_panel ? following : args_.next_panel;
    const PrefetchAt at = prefetch_at(layout_.blocks, kPayload, Scaling::kTableBytes, next - panels.payload[0]);
    const int64_t turn = at.turn < first ? first : at.turn > last ? last : at.turn;
    for (int r = 0; r < args_.rows; r += step_) {
      const int rows = args_.rows - r < step_ ? args_.rows - r : step_;
      float* y = args_.y + r * args_.y_stride + kPairColumns * p;
      constexpr int kMost = P == 4 ? 1 : kMostRows;
      some_rows<kMost, P>(rows, panels, r, {first, turn, at.payload[0], at.scales[0]}, y);
      some_rows<kMost, P>(rows, panels, r, {turn, last, at.payload[1], at.scales[1]}, y);
    }
  }

  template <int kMost, int P>
  TANDEM_INLINE void some_rows(int rows, const PairOfPanels& panels, int r, const Stretch& stretch, float* y) {
    if constexpr (kMost > 1) {
      if (rows < kMost) return some_rows<kMost - 1, P>(rows, panels, r, stretch, y);
    }
    for (int q = 0; q < 2; q += P)
      blocks<kMost, P>(panels.payload[q], panels.scales.panel[q], panels.scales.shifts[q], r, stretch,
                       y + kPanelRows * q);
  }

  template <int R, int P>
  struct Sums {
    Sum v[R][P];
  };
  template <int R, int P>
  struct Totals {  // over groups
    typename TotalsOf<Ints, kByRows>::Type v[R][P];
  };

  template <class T>
  TANDEM_INLINE static T load(const uint8_t* p) {
    T value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
  }

  // Of P panels, from these ones on. Not inlined: it is called twice, for every number of rows.
  template <int R, int P>
  __attribute__((noinline)) void blocks(const uint8_t* payload, const uint8_t* scales, const uint8_t* shifts,
                                        int first_row, const Stretch& stretch, float* y) {
    const uint8_t* x[R];
    for (int r = 0; r < R; ++r) x[r] = static_cast<const uint8_t*>(args_.x_rows[first_row + r]);
    const Int8RowLayout layout = layout_;
    const int64_t stride = args_.y_stride, second = args_.weights.second, last = stretch.last;
    const int64_t units = args_.weights.padded_depth / kUnit;
    for (int64_t b = stretch.first; b < last; ++b) {
      const uint8_t* const table = scales + b * Scaling::kTableBytes;
      const int here = units - b * kUnits < kUnits ? int(units - b * kUnits) : kUnits;
      for (int p = 0; kAsks && p < P; ++p)
        for (int64_t i = 0; i < Scaling::kTableBytes; i += kCacheLine)
          Isa::prefetch(table + p * second + i + stretch.scales_ahead);
      Totals<R, P> sums;
      clear(sums);
      for (int u = 0; u < here; ++u)
        add_unit(payload, second, x, layout, table, b * kUnits + u, u, stretch.ahead, sums);
      const uint8_t* const of_block = shifts ? shifts + b * Scaling::kTableBytes : nullptr;
      finish(layout, table, of_block, second, x, b, here * (kUnit / Scaling::kGroup), sums, y, stride);
    }
  }

  template <class Some>
  TANDEM_INLINE static void clear(Some& sums) {
#pragma GCC unroll 16
    for (auto& row : sums.v)
      for (auto& sum : row) {
        if constexpr (std::is_same_v<std::remove_reference_t<decltype(sum)>, Sum>)
          sum = Ints::start(0);
        else
          sum = Ints::Grids::none();
      }
  }

  // sums += scale * products of the groups of 32 k, which are unit u of the block's and `all` of the row's.
  template <int R, int P>
  TANDEM_INLINE static void add_unit(const uint8_t* payload, int64_t second, const uint8_t* const (&x)[R],
                                     const Int8RowLayout& layout, const uint8_t* table, int64_t all, int u,
                                     int64_t ahead, Totals<R, P>& sums) {
    constexpr int kGroup = Scaling::kGroup, kGroupsOfUnit = kUnit / kGroup;
    const uint8_t* here = payload + all * kUnitBytes;
    for (int p = 0; kAsks && p < P; ++p)
      for (int i = 0; i < kUnitBytes; i += kCacheLine) Isa::prefetch(here + p * second + i + ahead);
    if constexpr (kByRows) {
      add_rows(here, x, kUnit * all, table, u * kGroupsOfUnit, sums);
      return;
    } else {
      Sums<R, P> products;
      each_eight<Ints, Codes, P>(here, second, [&](int p, int k, const auto& lines) TANDEM_ALWAYS_INLINE {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const uint8_t* at = x[r] + kUnit * all + k;
          Sum sum = products.v[r][p];
          if (k % kGroup == 0)
            sum = Ints::start(load<int32_t>(x[r] + layout.starts + 4 * (all * kGroupsOfUnit + k / kGroup)));
          products.v[r][p] = Codes::dot(sum, lines, Ints::x(at), Ints::x(at + 4));
        }
        if ((k + kInt8Block) % kGroup) return;
        const auto scale = Scaling::template integers<Ints>(table + p * second, u * kGroupsOfUnit + k / kGroup);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) sums.v[r][p] = Ints::add_product(sums.v[r][p], products.v[r][p], scale);
      });
    }
  }

  // The same, row by row.
  template <int R, int P>
  TANDEM_INLINE static void add_rows(const uint8_t* blocks, const uint8_t* const (&x)[R], int64_t k,
                                     const uint8_t* table, int group, Totals<R, P>& sums) {
    typename Ints::Grids::Sum* to[R];
    for (int r = 0; r < R; ++r) to[r] = &sums.v[r][0];
    typename Ints::Grids::Scales scale;
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) {
      if (b * int(kInt8Block) % Scaling::kGroup == 0)
        scale = Scaling::template row_scales<Ints>(table, group + b * int(kInt8Block) / Scaling::kGroup);
      const uint8_t* at[R];
      for (int r = 0; r < R; ++r) at[r] = x[r] + k + kInt8Block * b;
      Ints::Grids::template add_block<Codes::kFormat, R>(blocks + b * Codes::kBlockBytes, at, scale, to);
    }
  }
  TANDEM_INLINE static Vec floats(const typename TotalsOf<Ints, kByRows>::Type& sum) {
    if constexpr (kByRows)
      return Ints::row_floats(sum);
    else
      return Ints::floats(sum);
  }

  // y = scale of x * (half * sums + half of shifts * sum of x times shifts) + (y or 0)
  template <int R, int P>
  TANDEM_INLINE static void finish(const Int8RowLayout& layout, const uint8_t* table, const uint8_t* shifts,
                                   int64_t second, const uint8_t* const (&x)[R], int64_t b, int here,
                                   const Totals<R, P>& sums, float* y, int64_t stride) {
    Sums<R, P> shifted;
    if (shifts) add_shifts(layout, shifts, second, x, b, here, shifted);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const Vec half = Isa::mul(halves(table + p * second), Isa::set1(Scaling::kOfHalf));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        Vec v = Isa::mul(floats(sums.v[r][p]), half);
        if (shifts) v = Isa::fma(Ints::floats(shifted.v[r][p]), halves(shifts + p * second), v);
        float* out = y + r * stride + kPanelRows * p;
        const Vec row_scale = Isa::set1(load<float>(x[r] + layout.scales + 4 * b));
        Isa::store(out, Isa::fma(v, row_scale, b > 0 ? Isa::load(out) : Isa::zero()));
      }
    }
  }

  TANDEM_INLINE static Vec halves(const uint8_t* p) { return Isa::load_f16(reinterpret_cast<const uint16_t*>(p)); }

  // shifted = sum over the block's groups of shift * sum of x
  template <int R, int P>
  TANDEM_INLINE static void add_shifts(const Int8RowLayout& layout, const uint8_t* shifts, int64_t second,
                                       const uint8_t* const (&x)[R], int64_t b, int here, Sums<R, P>& shifted) {
    clear(shifted);
    if constexpr (!Scaling::kOdd)
      for (int g = 0; g < here; g += 2)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          const auto two = Scaling::template shifts<Ints>(shifts + p * second, g);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            const auto of_x = Ints::x(x[r] + layout.sums + 2 * (b * kGroups + g));
            shifted.v[r][p] = Ints::dot_shifts(shifted.v[r][p], two, of_x);
          }
        }
  }

  const MatmulArgs& args_;
  const Int8RowLayout layout_;
  const int step_;
};

// Whether a format is multiplied like this depends on how its scales are stored: see has_shared_scale.
template <class Ints, template <class> class F>
void int8_blocks(const MatmulArgs* args) {
  const ScaleType type = args->weights.scale_type;
#define TANDEM_INT8_BLOCKS(kind)                                                          \
  if constexpr (has_shared_scale(F<Ints>::kFormat, ScaleType::kind)) {                    \
    if (type == ScaleType::kind) return Int8Blocks<Ints, F, ScaleType::kind>(args).run(); \
  }
  TANDEM_INT8_BLOCKS(bytes8)
  TANDEM_INT8_BLOCKS(bytes16)
  TANDEM_INT8_BLOCKS(nibbles16)
  TANDEM_INT8_BLOCKS(odd8)
  TANDEM_INT8_BLOCKS(odd16)
#undef TANDEM_INT8_BLOCKS
}

}  // namespace
}  // namespace tandem
