// What runs between the steps of a tile product, while the tiles multiply: the weights that the next product needs are
// unpacked, or fetched into L2. Tiles and vectors have ports of their own. So 8 lines of int4 a step cost 5 ns on top
// of 22; unpacked beforehand they cost 16 ns. (With 11 instructions a line; 6 to 8 now.)
#pragma once

#include "micro/whole_rows.h"

namespace tandem {
namespace {

constexpr int64_t kUnitPairs = 4;  // pairs of k unpacked at a time: divides every group

// One slice of K of a pair of panels, and the one that will be unpacked after it.
struct PanelSlice {
  PairOfPanels panels;
  int64_t first, last;  // pairs of k
  int64_t ahead;        // bytes from its payload to what comes after it

  TANDEM_INLINE int64_t units() const { return 2 * (last - first) / kUnitPairs; }
};

// kUnits units as bf16 lines: line(block, index) decodes a pair of k of one. kFirst: its place in a block, in pairs.
template <class Isa, class Format, int kFirst, int kUnits, class Line>
TANDEM_INLINE void unpack_lines(const uint8_t* payload, uint8_t* lines, const Line& line) {
#pragma GCC unroll 8
  for (int i = 0; i < kUnits * kUnitPairs; ++i, lines += kCacheLine) {
    const int index = (kFirst + i) % Format::kPairsPerBlock;
    Isa::Lane::store_line(lines, line(payload + (i - index) * Format::kPairBytes, index));
  }
}

// Codes as they are.
template <class Isa, template <class> class F, int kFirst, int kUnits>
TANDEM_INLINE void unpack_codes(const uint8_t* payload, uint8_t* lines) {
  unpack_lines<Isa, F<Isa>, kFirst, kUnits>(
      payload, lines, [](const uint8_t* block, int index) { return F<Isa>::decode(block, index).line[0]; });
}

// Where the tier scales codes as they are decoded, in fewer instructions than floats take. begin is for a group, and
// says whether its scales and shifts allow it.
template <class Isa, template <class> class F>
struct ScaledLines {
  static constexpr float kCodeUnit = 1.0f;
  TANDEM_INLINE bool begin_stored(const Scales&, int, int64_t) { return false; }  // by scales as they lie there
  TANDEM_INLINE bool begin(const Scales&, typename Isa::Vec, typename Isa::Vec) { return false; }
  TANDEM_INLINE bool begin_codes() { return false; }
  template <int kFirst, int kUnits>
  TANDEM_INLINE void unpack(const uint8_t*, uint8_t*) const {}
};

template <class Isa, template <class> class F>
struct ScaledHalfLines {
  using Format = F<Isa>;
  static constexpr float kCodeUnit = Format::kPairBytes == 32 ? Isa::kUnitOfHalves : 1.0f;
  typename Isa::ScaledHalves table;
  bool shifted = false;

  TANDEM_INLINE bool begin_stored(const Scales&, int, int64_t) { return false; }
  TANDEM_INLINE bool begin(const Scales& scales, typename Isa::Vec scale, typename Isa::Vec shift) {
    if (scales.shift_type == ShiftType::zeros) return false;  // code - zero is exact, zero * scale as a half is not
    shifted = scales.shift_type == ShiftType::as_scales || Format::halves_range().offset != 0;
    return shifted ? Isa::shifted_halves(scale, shift, Format::halves_range(), table)
                   : Isa::scaled_halves(scale, Format::halves_range(), table);
  }
  // Codes that are not scaled: those of a byte times a scale that rounds nothing take less than codes as they are.
  TANDEM_INLINE bool begin_codes() {
    shifted = false;
    return kCodeUnit != 1.0f && Isa::scaled_halves(Isa::set1(kCodeUnit), Format::halves_range(), table);
  }
  template <int kFirst, int kUnits>
  TANDEM_INLINE void unpack(const uint8_t* payload, uint8_t* lines) const {
    if (shifted)
      unpack_lines<Isa, Format, kFirst, kUnits>(payload, lines, [&](const uint8_t* p, int index) {
        return Isa::shifted_line(Format::halves(p, index), table);
      });
    else
      unpack_lines<Isa, Format, kFirst, kUnits>(payload, lines, [&](const uint8_t* p, int index) {
        return Isa::scaled_line(Format::halves(p, index), table);
      });
  }
};

template <class Isa>
concept ScalesHalves = requires { typename Isa::ScaledHalves; };

template <ScalesHalves Isa, template <class> class F>
struct ScaledLines<Isa, F> : ScaledHalfLines<Isa, F> {};

// Powers of two only change exponents; e4m3's scales become halves without being floats first.
template <ScalesHalves Isa>
struct ScaledLines<Isa, Fp4Format> : ScaledHalfLines<Isa, Fp4Format> {
  using Base = ScaledHalfLines<Isa, Fp4Format>;
  typename Isa::ScaledFp4 powers;
  bool by_powers = false;

  TANDEM_INLINE bool begin_stored(const Scales& scales, int p, int64_t group) {
    if (scales.type != ScaleType::e4m3 || scales.shift_type != ShiftType::none) return false;
    by_powers = Base::shifted = false;
    return Isa::e4m3_halves(scales.panel[p] + kFactorBytes + kPanelRows * group, kE4m3Unit, Base::table);
  }
  TANDEM_INLINE bool begin(const Scales& scales, typename Isa::Vec scale, typename Isa::Vec shift) {
    by_powers = scales.type == ScaleType::e8m0 && scales.shift_type == ShiftType::none;
    return by_powers ? Isa::scaled_fp4(scale, powers) : Base::begin(scales, scale, shift);
  }
  template <int kFirst, int kUnits>
  TANDEM_INLINE void unpack(const uint8_t* payload, uint8_t* lines) const {
    if (!by_powers) return Base::template unpack<kFirst, kUnits>(payload, lines);
    unpack_lines<Isa, Fp4Format<Isa>, kFirst, kUnits>(
        payload, lines, [&](const uint8_t* p, int index) { return Isa::decode_scaled_fp4(p, index, powers); });
  }
};

// How a group of a panel becomes lines: by its scales and shifts, or as codes.
template <class Isa, template <class> class F>
class GroupLines {
  using Vec = typename Isa::Vec;

 public:
  static constexpr float kCodeUnit = ScaledLines<Isa, F>::kCodeUnit;

  TANDEM_INLINE void begin(const Scales& scales, int p, int64_t group) {
    scaled_ = true;
    if (at_once_ = lines_.begin_stored(scales, p, group); at_once_) return;
    scale_ = load_scales<Isa>(scales.panel[p], scales.type, group);
    if (scales.shifts[p]) shift_ = load_shifts<Isa>(scales.shifts[p], scales.type, scales.shift_type, group, scale_);
    at_once_ = lines_.begin(scales, scale_, shift_);
  }
  TANDEM_INLINE void begin_codes() { at_once_ = lines_.begin_codes(); }

  template <int kFirst, int kUnits>
  TANDEM_INLINE void unpack(const uint8_t* payload, uint8_t* to) const {
    if (at_once_)
      lines_.template unpack<kFirst, kUnits>(payload, to);
    else if (scaled_)
      unpack_floats<kFirst, kUnits>(payload, to);
    else
      unpack_codes<Isa, F, kFirst, kUnits>(payload, to);
  }

 private:
  template <int kFirst, int kUnits>
  TANDEM_INLINE void unpack_floats(const uint8_t* payload, uint8_t* to) const {
    using Wide = F<typename Isa::Widened>;
    unpack_lines<Isa, Wide, kFirst, kUnits>(payload, to, [&](const uint8_t* block, int index) {
      const auto wide = Wide::decode(block, index);
      return Isa::line_of(Isa::fma(wide.line[0], scale_, shift_), Isa::fma(wide.line[1], scale_, shift_));
    });
  }

  bool scaled_ = false, at_once_ = false;
  ScaledLines<Isa, F> lines_;
  Vec scale_ = Isa::zero(), shift_ = Isa::zero();
};

// Packed formats: unpacks `slice` to `scratch`, panel after panel, in `steps` turns. What changes with a group only is
// kept from unit to unit: it takes as many instructions as a unit of int4.
template <class Isa, template <class> class F>
class Unpacking {
  using Format = F<Isa>;
  static constexpr int kUnitBytes = kUnitPairs * Format::kPairBytes;

 public:
  Unpacking(const PanelSlice& slice, uint8_t* scratch, int64_t steps)
      : slice_(slice),
        lines_(scratch),
        units_(slice.units()),
        each_((units_ + steps - 1) / steps),
        scaled_(slice.panels.scales.panel[0] != nullptr),
        group_shift_(scaled_ ? __builtin_ctzll(slice.panels.scales.pairs_per_group) : 0) {}

  TANDEM_INLINE void step() { run(done_ + each_ < units_ ? done_ + each_ : units_); }
  void finish() { run(units_); }

 private:
  TANDEM_INLINE void run(int64_t until) {
    for (; done_ < until; ++done_, --left_, payload_ += kUnitBytes, lines_ += kUnitPairs * kCacheLine) {
      if (left_ == 0) begin_group();
      for (int i = 0; i < kUnitBytes; i += kCacheLine) Isa::prefetch_l2(payload_ + slice_.ahead + i);
      if constexpr (Format::kPairsPerBlock > kUnitPairs) {  // a block of two units
        if (done_ % 2) {
          group_.template unpack<kUnitPairs, 1>(payload_, lines_);
          continue;
        }
      }
      group_.template unpack<0, 1>(payload_, lines_);
    }
  }

  // The next group, or where nothing is scaled, panel.
  TANDEM_INLINE void begin_group() {
    const int64_t pairs = slice_.last - slice_.first, at = done_ * kUnitPairs;
    const int which = at >= pairs;
    const int64_t pair = slice_.first + at - which * pairs;
    payload_ = slice_.panels.payload[which] + pair * Format::kPairBytes;
    int64_t end = slice_.last;
    if (scaled_) {
      const int64_t group = pair >> group_shift_, group_end = (group + 1) << group_shift_;
      if (group_end < end) end = group_end;
      group_.begin(slice_.panels.scales, which, group);
    }
    left_ = (end - pair) / kUnitPairs;
  }

  const PanelSlice slice_;
  uint8_t* lines_;
  const int64_t units_, each_;
  int64_t done_ = 0, left_ = 0;  // units, of the group
  const bool scaled_;
  const int group_shift_;  // groups are powers of two
  const uint8_t* payload_ = nullptr;
  GroupLines<Isa, F> group_;
};

// Rows as they are: a step interleaves 16 pairs of k of 16 rows.
template <class Isa>
class Unpacking<Isa, Bf16RowsFormat> {
 public:
  Unpacking(const PanelSlice& slice, uint8_t* scratch, int64_t steps)
      : slice_(slice),
        lines_(scratch),
        of_panel_((slice.last - slice.first) / kBlockPairs),
        each_((2 * of_panel_ + steps - 1) / steps) {}

  TANDEM_INLINE void step() { run(done_ + each_ < 2 * of_panel_ ? done_ + each_ : 2 * of_panel_); }
  void finish() { run(2 * of_panel_); }

 private:
  TANDEM_INLINE void run(int64_t until) {
    for (; done_ < until; ++done_, lines_ += kBlockPairs * kCacheLine) {
      const int which = done_ >= of_panel_;
      const int64_t pair = slice_.first + (done_ - which * of_panel_) * kBlockPairs;
      const uint8_t* rows = slice_.panels.payload[which] + pair * Bf16RowsFormat<Isa>::kPairBytes;
      prefetch_rows<Isa>(rows + slice_.ahead, slice_.panels.row_bytes, 0, kBlockPairs);
      Isa::interleave(rows, slice_.panels.row_bytes, lines_);
    }
  }

  const PanelSlice slice_;
  uint8_t* lines_;
  const int64_t of_panel_, each_;  // blocks
  int64_t done_ = 0;
};

// Formats whose payload already is lines: fetches `slice` into L2.
template <class Isa>
class Fetching {
 public:
  Fetching(const PanelSlice& slice, int64_t steps) : slice_(slice), each_((lines() + steps - 1) / steps) {}

  TANDEM_INLINE void step() {
    const int64_t pairs = slice_.last - slice_.first;
    for (const int64_t end = done_ + each_ < lines() ? done_ + each_ : lines(); done_ < end; ++done_) {
      const int which = done_ >= pairs;
      Isa::prefetch_l2(slice_.panels.payload[which] + (slice_.first + done_ - which * pairs) * kCacheLine);
    }
  }
  void finish() {}

 private:
  TANDEM_INLINE int64_t lines() const { return 2 * (slice_.last - slice_.first); }

  const PanelSlice slice_;
  int64_t each_, done_ = 0;
};

}  // namespace
}  // namespace tandem
