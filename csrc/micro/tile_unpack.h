// What runs between the steps of a tile product, while the tiles multiply: the weights that the next product needs are
// unpacked, or fetched into L2. Tiles and vectors have ports of their own: 8 lines of int4 a step cost 5 ns on top of
// 22, and 16 ns when they are unpacked beforehand.
#pragma once

#include "micro/block.h"

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

// kUnitPairs pairs of k of one panel as bf16 lines, group scales and offsets multiplied in.
template <class Isa, template <class> class F, int kFirst = 0>
TANDEM_INLINE void unpack_unit(const PairOfPanels& panels, int which, int64_t pair, int group_shift, uint8_t* lines) {
  using Format = F<Isa>;
  if constexpr (Format::kPairsPerBlock > kUnitPairs && kFirst == 0) {  // a block of two units
    if (pair % Format::kPairsPerBlock) return unpack_unit<Isa, F, kUnitPairs>(panels, which, pair, group_shift, lines);
  }
  const uint8_t* payload = panels.payload[which] + (pair - kFirst) * Format::kPairBytes;
  const Scales& scales = panels.scales;
  const bool scaled = scales.panel[which] != nullptr;
  typename Isa::Vec scale = Isa::zero(), offset = Isa::zero();
  if (scaled) {
    const int64_t group = pair >> group_shift;
    scale = load_scales<Isa>(scales.panel[which], scales.type, group);
    if (scales.shifts[which])
      offset = load_shifts<Isa>(scales.shifts[which], scales.type, scales.shift_type, group, scale);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kUnitPairs; ++i, lines += kCacheLine) {
    const int at = kFirst + i, index = at % Format::kPairsPerBlock;
    const uint8_t* block = payload + (at - index) * Format::kPairBytes;
    if (scaled) {
      const auto wide = F<typename Isa::Widened>::decode(block, index);
      Isa::Lane::store_line(lines, Isa::line_of(Isa::fma(wide.line[0], scale, offset),  //
                                                Isa::fma(wide.line[1], scale, offset)));
    } else {
      Isa::Lane::store_line(lines, Format::decode(block, index).line[0]);
    }
  }
}

// Packed formats: unpacks `slice` to `scratch`, panel after panel, in `steps` turns.
template <class Isa, template <class> class F>
class Unpacking {
 public:
  Unpacking(const PanelSlice& slice, uint8_t* scratch, int64_t steps)
      : slice_(slice),
        lines_(scratch),
        each_((slice.units() + steps - 1) / steps),
        group_shift_(slice.panels.scales.panel[0] ? __builtin_ctzll(slice.panels.scales.pairs_per_group) : 0) {}

  TANDEM_INLINE void step() { run(each_); }
  void finish() { run(slice_.units()); }

 private:
  TANDEM_INLINE void run(int64_t units) {
    using Format = F<Isa>;
    constexpr int kUnitBytes = kUnitPairs * Format::kPairBytes;
    const int64_t pairs = slice_.last - slice_.first;
    for (const int64_t end = done_ + units < slice_.units() ? done_ + units : slice_.units(); done_ < end; ++done_) {
      const int64_t at = done_ * kUnitPairs;
      const int which = at >= pairs;
      const int64_t pair = slice_.first + at - which * pairs;
      const uint8_t* payload = slice_.panels.payload[which] + pair * Format::kPairBytes;
      for (int i = 0; i < kUnitBytes; i += kCacheLine) Isa::prefetch_l2(payload + slice_.ahead + i);
      unpack_unit<Isa, F>(slice_.panels, which, pair, group_shift_, lines_ + done_ * kUnitPairs * kCacheLine);
    }
  }

  const PanelSlice slice_;
  uint8_t* lines_;
  int64_t each_, done_ = 0;
  int group_shift_;  // groups are powers of two
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
