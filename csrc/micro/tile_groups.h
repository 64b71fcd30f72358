// Few rows on matrix tiles, for 4-bit weights with scales of groups. Codes are unpacked as they are: each is a bf16
// number. Tiles multiply one group of one panel. Its sum is scaled in float and added to sums in registers, so no
// weight is rounded. tile_stream.h scales every line of weights instead, which takes three times the instructions of a
// line.
//
//   pair of panels, panel
//     group      tiles multiply it while vectors unpack the one after the next into L1, and add up the one before the
//                last: neither waits for what was stored a moment ago
#pragma once

#include "micro/dot_rows.h"
#include "micro/tile_rows.h"
#include "micro/tile_unpack.h"

namespace tandem {
namespace {

constexpr int kGroupRows = 16;  // one tile
constexpr int kGroupsAhead = 2, kGroupRing = 4;
constexpr int64_t kGroupMost = 128;                                // k: longer groups are left to others
constexpr int64_t kGroupLinesBytes = kGroupMost / 2 * kCacheLine;  // of one panel
constexpr int64_t kGroupSumsBytes = kGroupRows * kCacheLine;
constexpr int64_t kGroupRowBytes = 1 << 18;  // of gathered rows
constexpr int64_t kGroupSumsAt = kGroupRing * kGroupLinesBytes;
constexpr int64_t kGroupRowsAt = kGroupSumsAt + kGroupRing * kGroupSumsBytes;
constexpr int64_t kGroupShiftsAt = kGroupRowsAt + kGroupRowBytes;
static_assert(kGroupShiftsAt < kFewRowsScratchBytes);

// Bytes of activations up to which this is faster than tile_stream.h: beyond them, tiles of rows come from L2. fp4 is
// left to streams, since its scales are powers of two, which are cheap there. Q4_K stays here because nothing is
// rounded, and zero points because they are dear there. Figures: docs/lab/kernel-choices.md.
constexpr bool has_groups(Format format) { return format == Format::int4 || format == Format::uint4; }
inline int64_t bytes_by_groups(const WeightView& w) {
  return w.shift_type == ShiftType::zeros ? kGroupRowBytes : 32 * 1024;
}

// Groups of 32 to 128 k; all rows, and sums of their activations where they are needed, fit.
inline bool takes_groups(const MatmulArgs* args) {
  const WeightView& w = args->weights;
  const bool whole = w.scale_offset && (w.group == 32 || w.group == 64 || w.group == 128);
  if (!whole || args->one_way || args->rows > kGroupRows) return false;
  const int64_t sums = w.shift_offset ? int64_t{args->rows} * (w.padded_depth / w.group) * 4 : 0;
  return int64_t{args->rows} * w.padded_depth * 2 <= bytes_by_groups(w) &&
         kGroupShiftsAt + sums <= kFewRowsScratchBytes;
}

template <class Isa, class Tiles, template <class> class F>
class GroupsProduct {
  using Format = F<Isa>;
  using Vec = typename Isa::Vec;

 public:
  explicit GroupsProduct(const MatmulArgs* args)
      : args_(*args),
        w_(args->weights),
        groups_(w_.padded_depth / w_.group),
        panels_(w_.panels + 2 * args->first_pair * w_.panel_bytes) {}

  void run() {
    Tiles::begin(args_.rows);
    gather_rows<Isa>(x(), args_.rows, 0, w_.padded_depth / 32, args_.rows, args_.rows, args_.scratch + kGroupRowsAt);
    if (w_.shift_offset) sum_groups<Isa, typename Isa::Lane>(x(), args_.rows, w_.group, 0, groups_, x_sums());
    __builtin_memset(args_.scratch + kGroupSumsAt, 0, kGroupRing * kGroupSumsBytes);  // rows that tiles leave alone
    if (w_.group == 32)
      multiply<1>();
    else if (w_.group == 64)
      multiply<2>();
    else
      multiply<4>();
  }

 private:
  template <int kSteps>
  void multiply() {
    if (args_.rows <= 8)
      stream<kSteps, 8>();
    else
      stream<kSteps, 16>();
  }

  // What is done with the groups of all panels, one after the other, keeps to registers what it can: between the tiles
  // nothing is known about memory.
  template <int kSteps, int R>
  void stream() {
    const int rows = args_.rows;
    const int64_t count = 2 * args_.pairs * groups_, row_step = int64_t{rows} * kCacheLine * kSteps;
    const uint8_t* const first_row = args_.scratch + kGroupRowsAt;
    const uint8_t* const last_row = first_row + (groups_ - 1) * row_step;
    uint8_t* const scratch = args_.scratch;
    Stream unpacked{panels_, groups_, groups_, w_.panel_bytes - groups_ * kGroupBytes<kSteps>};
    Ahead ahead{panels_ + kPrefetchBytes, panels_ + 2 * args_.pairs * w_.panel_bytes, args_.next_panel};
    const int64_t each_ahead = w_.panel_bytes / groups_;
    Fold fold{panels_, 0, args_.y};
    Vec sums[R];
    clear(sums);
    for (int64_t n = 0; n < kGroupsAhead && n < count; ++n) unpack<kSteps>(unpacked, lines(scratch, n));
    const uint8_t* row = first_row;
    for (int64_t n = 0; n < count + kGroupsAhead; ++n) {
      if (n < count) Tiles::template multiply_group<kSteps>(rows, row, lines(scratch, n), part(scratch, n));
      row = row == last_row ? first_row : row + row_step;
      if (n + kGroupsAhead < count) {
        unpack<kSteps>(unpacked, lines(scratch, n + kGroupsAhead));
        ahead.template fetch<kSteps>(each_ahead);
      }
      if (n >= kGroupsAhead) add<R>(fold, part(scratch, n - kGroupsAhead), sums);
    }
  }

  template <int kSteps>
  static constexpr int64_t kGroupBytes = 16 * kSteps * Format::kPairBytes;

  struct Stream {
    const uint8_t* payload;
    int64_t groups, left;  // of a panel
    int64_t gap;           // from a panel's payload to the next one's
  };

  template <int kSteps>
  TANDEM_INLINE static void unpack(Stream& from, uint8_t* to) {
#pragma GCC unroll 4
    for (int unit = 0; unit < 16 * kSteps / kUnitPairs; ++unit)
      unpack_codes<Isa, F, 0, 1>(from.payload + unit * kUnitPairs * Format::kPairBytes,
                                 to + unit * kUnitPairs * kCacheLine);
    from.payload += kGroupBytes<kSteps>;
    if (--from.left == 0) from.payload += from.gap, from.left = from.groups;
  }

  // Payload and scales alike, as much as a group takes of both.
  struct Ahead {
    const uint8_t *at, *end, *next;

    template <int kSteps>
    TANDEM_INLINE void fetch(int64_t bytes) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < kGroupBytes<kSteps> + kCacheLine; i += kCacheLine) Isa::prefetch_l2(at + i);
      at += bytes;
      if (at >= end && next) at += next - end, next = nullptr, end = at + (int64_t{1} << 40);
    }
  };

  struct Fold {
    const uint8_t* panel;
    int64_t group;
    float* y;
  };

  template <int R>
  TANDEM_INLINE void add(Fold& to, const float* part, Vec (&sums)[R]) const {
    const uint8_t* const scales = to.panel + w_.scale_offset;
    const Vec scale = scales_for<Isa, Format>(scales, w_.scale_type, to.group);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r] = Isa::fma(Isa::load(part + r * kPanelRows), scale, sums[r]);
    if (w_.shift_offset) add_shifts<R>(to, sums);
    if (++to.group < groups_) return;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      if (r < args_.rows) Isa::store(to.y + r * args_.y_stride, sums[r]);
    clear(sums);
    to = {to.panel + w_.panel_bytes, 0, to.y + kPanelRows};
  }

  template <int R>
  TANDEM_INLINE void add_shifts(const Fold& to, Vec (&sums)[R]) const {
    const Vec shift = load_shifts<Isa>(to.panel + w_.shift_offset, w_.scale_type, w_.shift_type, to.group,
                                       load_scales<Isa>(to.panel + w_.scale_offset, w_.scale_type, to.group));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      if (r < args_.rows) sums[r] = Isa::fma(Isa::set1(x_sums()[r * groups_ + to.group]), shift, sums[r]);
  }

  template <int R>
  TANDEM_INLINE static void clear(Vec (&sums)[R]) {
#pragma GCC unroll 16
    for (Vec& sum : sums) sum = Isa::zero();
  }

  const uint8_t* const* x() const { return reinterpret_cast<const uint8_t* const*>(args_.x_rows); }
  float* x_sums() const { return reinterpret_cast<float*>(args_.scratch + kGroupShiftsAt); }
  TANDEM_INLINE static uint8_t* lines(uint8_t* scratch, int64_t n) {
    return scratch + n % kGroupRing * kGroupLinesBytes;
  }
  TANDEM_INLINE static float* part(uint8_t* scratch, int64_t n) {
    return reinterpret_cast<float*>(scratch + kGroupSumsAt + n % kGroupRing * kGroupSumsBytes);
  }

  const MatmulArgs& args_;
  const WeightView& w_;
  const int64_t groups_;  // of K
  const uint8_t* const panels_;
};

}  // namespace
}  // namespace tandem
