// What runs between the steps of a tile product, while the tiles multiply: the weights that the next product needs are
// unpacked, or fetched into L2. Tiles and vectors have ports of their own: 8 lines of int4 a step cost 5 ns on top of
// 22, and 16 ns when they were unpacked beforehand (with 11 instructions a line; 6 to 8 now).
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

// kUnitPairs pairs of k as bf16 lines, codes as they are. kFirst: of a block of two units, the second.
template <class Isa, template <class> class F, int kFirst>
TANDEM_INLINE void unpack_codes(const uint8_t* payload, uint8_t* lines) {
  using Format = F<Isa>;
#pragma GCC unroll 4
  for (int i = 0; i < kUnitPairs; ++i, lines += kCacheLine) {
    const int at = kFirst + i, index = at % Format::kPairsPerBlock;
    Isa::Lane::store_line(lines, Format::decode(payload + (i - index) * Format::kPairBytes, index).line[0]);
  }
}

// The same, times the scales of their group, plus what it adds.
template <class Isa, template <class> class F, int kFirst>
TANDEM_INLINE void unpack_scaled(const uint8_t* payload, typename Isa::Vec scale, typename Isa::Vec offset,
                                 uint8_t* lines) {
  using Format = F<typename Isa::Widened>;
#pragma GCC unroll 4
  for (int i = 0; i < kUnitPairs; ++i, lines += kCacheLine) {
    const int at = kFirst + i, index = at % Format::kPairsPerBlock;
    const auto wide = Format::decode(payload + (i - index) * Format::kPairBytes, index);
    Isa::Lane::store_line(lines, Isa::line_of(Isa::fma(wide.line[0], scale, offset),  //
                                              Isa::fma(wide.line[1], scale, offset)));
  }
}

// Where the tier decodes codes to scaled lines at once. kCodeUnit: a scale with which that is faster than decoding
// codes as they are, and as exact.
template <class Isa, template <class> class F>
struct ScaledLines {
  TANDEM_INLINE bool begin(typename Isa::Vec) { return false; }
  TANDEM_INLINE void unpack(const uint8_t*, uint8_t*) const {}
};

template <class Isa>
concept ScalesHalves = requires { typename Isa::ScaledHalves; };

template <ScalesHalves Isa>
struct ScaledLines<Isa, Int4Format> {
  typename Isa::ScaledHalves table;

  TANDEM_INLINE bool begin(typename Isa::Vec scale) { return Isa::scaled_int4(scale, table); }
  TANDEM_INLINE void unpack(const uint8_t* payload, uint8_t* lines) const {
#pragma GCC unroll 4
    for (int i = 0; i < kUnitPairs; ++i)
      Isa::Lane::store_line(lines + i * kCacheLine, Isa::decode_scaled_int4(payload, i, table));
  }
};

template <ScalesHalves Isa>
struct ScaledLines<Isa, Int8Format> {
  static constexpr float kCodeUnit = Isa::kUnitOfHalves;
  typename Isa::ScaledHalves table;

  TANDEM_INLINE bool begin(typename Isa::Vec scale) { return Isa::scaled_int8(scale, table); }
  TANDEM_INLINE void unpack(const uint8_t* payload, uint8_t* lines) const {
#pragma GCC unroll 4
    for (int i = 0; i < kUnitPairs; ++i)
      Isa::Lane::store_line(lines + i * kCacheLine,
                            Isa::decode_scaled_int8(payload + i * Int8Format<Isa>::kPairBytes, table));
  }
};

template <ScalesHalves Isa>
struct ScaledLines<Isa, Fp8Format> {
  static constexpr float kCodeUnit = Isa::kUnitOfHalves;
  typename Isa::ScaledHalves table;

  TANDEM_INLINE bool begin(typename Isa::Vec scale) { return Isa::scaled_fp8(scale, table); }
  TANDEM_INLINE void unpack(const uint8_t* payload, uint8_t* lines) const {
#pragma GCC unroll 4
    for (int i = 0; i < kUnitPairs; ++i)
      Isa::Lane::store_line(lines + i * kCacheLine,
                            Isa::decode_scaled_fp8(payload + i * Fp8Format<Isa>::kPairBytes, table));
  }
};

template <class Isa>
  requires requires { typename Isa::ScaledFp4; }
struct ScaledLines<Isa, Fp4Format> {
  typename Isa::ScaledFp4 table;

  TANDEM_INLINE bool begin(typename Isa::Vec scale) { return Isa::scaled_fp4(scale, table); }
  TANDEM_INLINE void unpack(const uint8_t* payload, uint8_t* lines) const {
#pragma GCC unroll 4
    for (int i = 0; i < kUnitPairs; ++i)
      Isa::Lane::store_line(lines + i * kCacheLine, Isa::decode_scaled_fp4(payload, i, table));
  }
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
          unit<kUnitPairs>();
          continue;
        }
      }
      unit<0>();
    }
  }

  template <int kFirst>
  TANDEM_INLINE void unit() {
    if (at_once_)
      at_once_lines_.unpack(payload_, lines_);
    else if (scaled_)
      unpack_scaled<Isa, F, kFirst>(payload_, scale_, offset_, lines_);
    else
      unpack_codes<Isa, F, kFirst>(payload_, lines_);
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
      load_scales_of(which, group);
    }
    left_ = (end - pair) / kUnitPairs;
  }

  TANDEM_INLINE void load_scales_of(int which, int64_t group) {
    const Scales& scales = slice_.panels.scales;
    scale_ = load_scales<Isa>(scales.panel[which], scales.type, group);
    at_once_ = !scales.shifts[which] && at_once_lines_.begin(scale_);
    if (scales.shifts[which])
      offset_ = load_shifts<Isa>(scales.shifts[which], scales.type, scales.shift_type, group, scale_);
  }

  const PanelSlice slice_;
  uint8_t* lines_;
  const int64_t units_, each_;
  int64_t done_ = 0, left_ = 0;  // units, of the group
  const bool scaled_;
  const int group_shift_;  // groups are powers of two
  const uint8_t* payload_ = nullptr;
  bool at_once_ = false;
  ScaledLines<Isa, F> at_once_lines_;
  typename Isa::Vec scale_ = Isa::zero(), offset_ = Isa::zero();
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
