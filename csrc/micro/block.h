// The inner loop of both algorithms: R rows of activations times one, two or four panels. All run it over K in the same
// order, with one accumulator per output. So a row's result does not depend on the algorithm or on its neighbours.
#pragma once

#include <type_traits>

#include "format/formats.h"

namespace tandem {
namespace {

// Whether P panels are asked for by hand. Hardware follows four streams better alone, but not those of shifts beside
// them (docs/lab/kernel-choices.md).
template <class Format, int P>
constexpr bool kAsksAhead = P == 2 || requires { Format::kShifted; };

// Where the lines of P panels come from: decoded from the payload in registers, or unpacked before.
template <class Isa, class Format, int P = 2>
struct PayloadSource {
  using Lane = typename Format::Lane;
  static constexpr int kPanels = P;
  static constexpr bool kAsks = kAsksAhead<Format, P>;
  static constexpr bool kStreamed = true;
  static constexpr int kPairsPerStep = pairs_at_once<Format>();
  static constexpr int kLinesPerStep = Lane::kLinesPerPair * kPairsPerStep;
  static constexpr int kStepsPerPair = 1;
  static constexpr int kStepsPerBlock = Format::kPairsPerBlock;
  static constexpr int kStepBytes = Format::kPairBytes * kPairsPerStep;
  static constexpr float kUnit = Format::kUnit;
  const uint8_t* panel[P];
  int64_t ahead;  // bytes from here to what is prefetched

  TANDEM_INLINE auto decode(int p, int64_t step, int index) const {
    const uint8_t* block = panel[p] + step * kStepBytes;  // `step` begins a block
    if (kAsks && index == 0)
      for (int i = 0; i < kStepBytes * Format::kPairsPerBlock; i += kCacheLine) Isa::prefetch(block + i + ahead);
    if constexpr (kPairsPerStep > 1)
      return Format::decode_some(block);
    else
      return Format::decode(block, index);
  }
};

// One line per step: with float lanes, a whole pair's lines would take too many of AVX2's 16 registers.
template <class L, int P = 2>
struct ScratchSource {
  using Lane = L;
  static constexpr int kPanels = P;
  static constexpr bool kStreamed = false;  // it is in cache
  static constexpr bool kAsks = false;
  struct Step {
    typename Lane::Line line[1];
  };
  static constexpr int kPairsPerStep = 1;
  static constexpr int kLinesPerStep = 1;
  static constexpr int kStepsPerPair = Lane::kLinesPerPair;
  static constexpr int kStepsPerBlock = P == 4 ? 2 : 1;  // fewer instructions beside the products
  static constexpr float kUnit = 1.0f;
  const uint8_t* panel[P];

  TANDEM_INLINE Step decode(int p, int64_t step, int index) const {
    return {Lane::load_line(panel[p] + (step + index) * kCacheLine)};
  }
};

template <class Isa, int R, int P>
struct Sums {
  typename Isa::Vec v[R][P];
};

// sums += x[:, one step of k) * panels, of which each is a chain of its own.
template <class Isa, class Source, int R>
TANDEM_INLINE void accumulate_step(const Source& source, const uint8_t* const (&row)[R], int64_t step, int index,
                                   Sums<Isa, R, Source::kPanels>& sums) {
  using Lane = typename Source::Lane;
  constexpr int kPanels = Source::kPanels, kBytes = 4 * Source::kLinesPerStep;
  decltype(source.decode(0, step, index)) weights[kPanels];
#pragma GCC unroll 4
  for (int p = 0; p < kPanels; ++p) weights[p] = source.decode(p, step, index);
#pragma GCC unroll 4
  for (int line = 0; line < Source::kLinesPerStep; ++line)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto x_line = Lane::x_line(row[r] + (step + index) * kBytes + 4 * line);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) sums.v[r][p] = Lane::dot(sums.v[r][p], weights[p].line[line], x_line);
    }
}

// sums += x[:, pairs first..last) * panels
template <class Isa, class Source, int R>
TANDEM_INLINE void accumulate(const Source& source, const uint8_t* const* x, int64_t first, int64_t last,
                              Sums<Isa, R, Source::kPanels>& sums) {
  using Lane = typename Source::Lane;
  constexpr int kPanels = Source::kPanels;
  constexpr int kBytes = 4 * Source::kLinesPerStep;  // of one row's activations for one step
  const uint8_t* row[R];
  for (int r = 0; r < R; ++r) row[r] = x[r];
  const int64_t end = last * Source::kStepsPerPair / Source::kPairsPerStep;
  for (int64_t step = first * Source::kStepsPerPair / Source::kPairsPerStep; step < end;
       step += Source::kStepsPerBlock) {
#pragma GCC unroll 8
    for (int index = 0; index < Source::kStepsPerBlock; ++index) {
      if constexpr (Source::kStreamed) {
        accumulate_step<Isa, Source, R>(source, row, step, index, sums);
      } else if constexpr (kPanels == 4) {
        static_assert(Source::kLinesPerStep == 1);
        typename Lane::Line weights[4];
#pragma GCC unroll 4
        for (int p = 0; p < 4; ++p) weights[p] = source.decode(p, step, index).line[0];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) Lane::dot_four(sums.v[r], weights, row[r] + (step + index) * kBytes);
      } else {
        const auto a = source.decode(0, step, index), b = source.decode(kPanels - 1, step, index);
#pragma GCC unroll 4
        for (int line = 0; line < Source::kLinesPerStep; ++line) {
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            const auto x_line = Lane::x_line(row[r] + (step + index) * kBytes + 4 * line);
            sums.v[r][0] = Lane::dot(sums.v[r][0], a.line[line], x_line);
            if constexpr (kPanels == 2) sums.v[r][1] = Lane::dot(sums.v[r][1], b.line[line], x_line);
          }
        }
      }
    }
  }
}

template <class Isa, int R, int P>
TANDEM_INLINE void clear(Sums<Isa, R, P>& sums) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sums.v[r][p] = Isa::zero();
}

template <class Isa, int R, int P>
TANDEM_INLINE void load_sums(Sums<Isa, R, P>& sums, const float* y, int64_t stride) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sums.v[r][p] = Isa::load(y + r * stride + 16 * p);
}

template <class Isa, int R, int P>
TANDEM_INLINE void store_sums(const Sums<Isa, R, P>& sums, float* y, int64_t stride) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) Isa::store(y + r * stride + 16 * p, sums.v[r][p]);
}

// So few rows leave too few chains of sums to hide the latency of a product: they take two pairs of panels at once.
// Where a tier has the registers for it, and it was timed.
template <class Isa>
constexpr int kWideRowsOf = 0;
template <class Isa>
  requires requires { Isa::kWideRows; }
constexpr int kWideRowsOf<Isa> = Isa::kWideRows;

constexpr int64_t kScalesAhead = 1024;  // bytes: scales are streams of their own, prefetched some groups ahead

struct Scales {
  const uint8_t* panel[2];   // null: not scaled here
  const uint8_t* shifts[2];  // as `panel`, of what is added to every weight after scaling; null: nothing
  ScaleType type;
  ShiftType shift_type;
  int64_t pairs_per_group;
  const float* x_sums = nullptr;  // [row][group]: activations summed over each group; only for shifts
  int64_t sums_stride = 0;
  int64_t ahead = kScalesAhead;  // bytes from a group's scales to those that are prefetched

  // About where a group's scales lie: to prefetch them.
  TANDEM_INLINE const uint8_t* of_group(int p, int64_t group) const { return panel[p] + group * group_bytes(type); }

  // Those of panel p alone, for rows from `row` on.
  TANDEM_INLINE Scales at(int p, int row) const {
    return {{panel[p], panel[1]}, {shifts[p], shifts[1]},     type,        shift_type,
            pairs_per_group,      x_sums + row * sums_stride, sums_stride, ahead};
  }
};

// The scales of one group for sums of what the source decodes.
template <class Isa, class Source>
TANDEM_INLINE typename Isa::Vec scales_for(const uint8_t* panel_scales, ScaleType type, int64_t group) {
  const typename Isa::Vec scale = load_scales<Isa>(panel_scales, type, group);
  if constexpr (Source::kUnit == 1.0f) return scale;
  return Isa::mul(scale, Isa::set1(Source::kUnit));
}

// Where totals over groups are kept: in memory, or in registers where there are few.
template <class Isa, int R, int P>
struct TotalsInMemory {
  float* y;
  int64_t stride;
  TANDEM_INLINE TotalsInMemory(float* to, int64_t row_stride, bool) : y(to), stride(row_stride) {}
  TANDEM_INLINE typename Isa::Vec get(int r, int p) const { return Isa::load(y + r * stride + kPanelRows * p); }
  TANDEM_INLINE void put(int r, int p, typename Isa::Vec v) { Isa::store(y + r * stride + kPanelRows * p, v); }
  TANDEM_INLINE void finish() const {}
};
template <class Isa, int R, int P>
struct TotalsInRegisters {
  Sums<Isa, R, P> sums;
  float* y;
  int64_t stride;
  TANDEM_INLINE TotalsInRegisters(float* to, int64_t row_stride, bool onto) : y(to), stride(row_stride) {
    if (onto) load_sums<Isa, R, P>(sums, y, stride);
  }
  TANDEM_INLINE typename Isa::Vec get(int r, int p) const { return sums.v[r][p]; }
  TANDEM_INLINE void put(int r, int p, typename Isa::Vec v) { sums.v[r][p] = v; }
  TANDEM_INLINE void finish() const { store_sums<Isa, R, P>(sums, y, stride); }
};

// totals = scale * sums + (totals or 0), and where it is shifted + shift * the sum of the group's activations: weight =
// code * scale + shift. scales: of each pair of panels.
template <class Isa, class Source, bool kShifted, int R, int P, class Totals>
TANDEM_INLINE void add_scaled(const Sums<Isa, R, P>& sums, const Scales* scales, int64_t group, Totals& totals) {
  using Vec = typename Isa::Vec;
  Vec scale[P], shift[P];
  for (int p = 0; p < P; ++p) {
    const Scales& of = scales[p / 2];
    scale[p] = scales_for<Isa, Source>(of.panel[p % 2], of.type, group);
    if constexpr (kShifted)
      shift[p] = load_shifts<Isa>(of.shifts[p % 2], of.type, of.shift_type, group,
                                  Source::kUnit == 1.0f ? scale[p] : load_scales<Isa>(of.panel[p % 2], of.type, group));
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    Vec sum;
    if constexpr (kShifted) sum = Isa::set1(scales->x_sums[r * scales->sums_stride + group]);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      Vec v = Isa::fma(sums.v[r][p], scale[p], group > 0 ? totals.get(r, p) : Isa::zero());
      if constexpr (kShifted) v = Isa::fma(sum, shift[p], v);
      totals.put(r, p, v);
    }
  }
}

// sums[row][group - first] of the activations of every group in [first, last): what shifts are multiplied with. Once
// per call, not once per pair of panels.
template <class Isa, class Lane>
void sum_groups(const uint8_t* const* x, int rows, int64_t group_length, int64_t first, int64_t last, float* sums) {
  constexpr int64_t kBytes = Lane::kType == DType::bf16 ? 2 : 4;
  for (int r = 0; r < rows; ++r)
    for (int64_t group = first; group < last; ++group) {
      const uint8_t* at = x[r] + group * group_length * kBytes;
      typename Isa::Vec sum = Isa::zero();
      for (int64_t k = 0; k < group_length; k += 16, at += 16 * kBytes)
        sum = Isa::add(sum, Lane::kType == DType::bf16 ? Isa::load_bf16(reinterpret_cast<const uint16_t*>(at))
                                                       : Isa::load(reinterpret_cast<const float*>(at)));
      *sums++ = Isa::reduce_add(sum);
    }
}

// y (+)= x * panels over the pairs [first, last) of K; `onto`: y holds the sum over what came before `first`.
// `source` counts pairs from `source_first`. Scaled: groups are summed apart, then scaled into y one after the other.
// scales: of each pair of panels, or of the source's only one.
template <class Isa, class Source, bool kScaled, int R>
void block(const Source& source, int64_t source_first, const uint8_t* const* x, int64_t first, int64_t last,
           const Scales* scales, float* y, int64_t stride) {
  constexpr int kBytes = 4 * Source::Lane::kLinesPerPair, kPanels = Source::kPanels;
  const uint8_t* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = x[r] + source_first * kBytes;
  Sums<Isa, R, kPanels> sums;
  if (!kScaled || !scales->panel[0]) {
    if (first > 0)
      load_sums<Isa, R, kPanels>(sums, y, stride);
    else
      clear<Isa, R, kPanels>(sums);
    accumulate<Isa, Source, R>(source, rows, first - source_first, last - source_first, sums);
    store_sums<Isa, R, kPanels>(sums, y, stride);
    return;
  }
  using Totals = std::conditional_t<(R * kPanels <= 4 * kWideRowsOf<Isa>), TotalsInRegisters<Isa, R, kPanels>,
                                    TotalsInMemory<Isa, R, kPanels>>;
  const int64_t pairs_per_group = scales->pairs_per_group;
  Totals totals(y, stride, first > 0);
  for (int64_t pair = first; pair < last; pair += pairs_per_group) {
    const int64_t group = pair / pairs_per_group, begin = pair - source_first;
    clear<Isa, R, kPanels>(sums);
    accumulate<Isa, Source, R>(source, rows, begin, begin + pairs_per_group, sums);
    if constexpr (Source::kAsks)
      for (int p = 0; p < kPanels; ++p) Isa::prefetch(scales[p / 2].of_group(p % 2, group) + scales->ahead);
    if (scales->shifts[0])
      add_scaled<Isa, Source, true, R, kPanels>(sums, scales, group, totals);
    else
      add_scaled<Isa, Source, false, R, kPanels>(sums, scales, group, totals);
  }
  totals.finish();
}

// Rows per block when `rows` are cut evenly into blocks of at most kMax: a short last block would leave too few
// independent chains to hide the latency of the dot product.
template <int kMax>
TANDEM_INLINE int rows_per_block(int rows) {
  const int blocks = (rows + kMax - 1) / kMax;
  return (rows + blocks - 1) / blocks;
}

// Rows of a block of so many panels: as many sums as of a block of tile_mm's.
template <class Isa, int kPanels>
constexpr int kRowsBeside = Isa::kTileRows * Isa::kTilePanels / kPanels;

// Calls block<R> with R = rows (1 to kMax).
template <class Isa, class Source, bool kScaled, int kMax>
TANDEM_INLINE void block_of(int rows, const Source& source, int64_t source_first, const uint8_t* const* x,
                            int64_t first, int64_t last, const Scales* scales, float* y, int64_t stride) {
  if constexpr (kMax > 1) {
    if (rows < kMax)
      return block_of<Isa, Source, kScaled, kMax - 1>(rows, source, source_first, x, first, last, scales, y, stride);
  }
  block<Isa, Source, kScaled, kMax>(source, source_first, x, first, last, scales, y, stride);
}

// What both algorithms need of the weights of one pair of panels.
struct PairOfPanels {
  const uint8_t* payload[2];
  Scales scales;      // of groups; none where a format has one scale per row
  Scales row_scales;  // one per output row (or e4m3's factors), applied to the finished sum
  int64_t row_bytes;  // of a panel whose rows are whole
};

TANDEM_INLINE PairOfPanels pair_of_panels(const WeightView& w, int64_t pair) {
  const uint8_t* panel = w.panels + pair * w.pair_bytes;
  const uint8_t* scales = panel + w.scale_offset;
  const uint8_t* shifts = panel + w.shift_offset;
  const Scales none{{nullptr, nullptr}, {nullptr, nullptr}, w.scale_type, w.shift_type, 0};
  Scales found = none;
  if (w.scale_offset)
    found = {{scales, scales + w.second}, {nullptr, nullptr}, w.scale_type, w.shift_type, w.group / 2};
  if (w.shift_offset)
    for (int p = 0; p < 2; ++p) found.shifts[p] = shifts + p * w.second;
  const bool by_row = !w.group || w.scale_type == ScaleType::e4m3;
  return {{panel, panel + w.second}, w.group ? found : none, by_row ? found : none, w.panel_bytes / kPanelRows};
}

template <class Isa, class Source>
TANDEM_INLINE typename Isa::Vec row_scales_for(const Scales& scales, int p) {
  if (scales.type == ScaleType::e4m3) return load_factors<Isa>(scales.panel[p]);
  return scales_for<Isa, Source>(scales.panel[p], scales.type, 0);
}

template <class Isa, class Source>
TANDEM_INLINE void scale_rows(const Scales& scales, float* y, int64_t stride, int rows) {
  if (!scales.panel[0]) return;
  const typename Isa::Vec s0 = row_scales_for<Isa, Source>(scales, 0), s1 = row_scales_for<Isa, Source>(scales, 1);
  for (int r = 0; r < rows; ++r, y += stride) {
    Isa::store(y, Isa::mul(Isa::load(y), s0));
    Isa::store(y + 16, Isa::mul(Isa::load(y + 16), s1));
  }
}

}  // namespace
}  // namespace tandem
