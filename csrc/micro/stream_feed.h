// What tile_stream.h multiplies few rows with, step after step of 32 k through a call's pairs of panels: both panels at
// once, or one after the other (kPanels). Codes are unpacked to a ring; panels that already are lines are used where
// they lie. What comes later is prefetched.
#pragma once

#include "micro/dot_rows.h"
#include "micro/tile_unpack.h"

namespace tandem {
namespace {

constexpr int64_t kStreamAhead = 2, kStreamRing = 4;
constexpr int64_t kStepBytes = 2 * 16 * kCacheLine;  // of unpacked lines: two tiles

// Sums of groups from this size on are scaled, instead of weights, for so many rows; of more, that takes longer than
// scaling weights.
constexpr int kFoldedGroup = 128, kFoldedRows = 32;

inline bool folds(const MatmulArgs* args) {
  const WeightView& w = args->weights;
  return !args->one_way && args->rows <= kFoldedRows && w.scale_offset && w.group >= kFoldedGroup;
}

// What is asked for meanwhile, by the step: a panel's payload and scales some units of K further on, or the next one's.
struct StreamAhead {
  int64_t turn;  // in steps
  int64_t payload[2], scales[2];

  TANDEM_INLINE StreamAhead(const WeightView& w, int64_t pair_bytes, int64_t next) {
    const int64_t unit = w.group > 32 ? w.group / 32 : 1, steps = w.padded_depth / 32;
    const PrefetchAt ahead = prefetch_at(steps / unit, unit * 16 * pair_bytes,
                                         w.group ? unit * 32 / w.group * group_bytes(w.scale_type) : 0, next);
    turn = ahead.turn * unit;
    for (int i = 0; i < 2; ++i) payload[i] = ahead.payload[i], scales[i] = ahead.scales[i];
  }
};

// The panels of a turn: a pair's, or one of them, which then is the first.
template <int kPanels>
TANDEM_INLINE PairOfPanels panels_of_turn(const MatmulArgs* args, int turn) {
  PairOfPanels found = pair_of_panels(args->weights, args->first_pair + turn * kPanels / 2);
  if (kPanels == 2 || turn % 2 == 0) return found;
  found.payload[0] = found.payload[1];
  found.scales.panel[0] = found.scales.panel[1];
  found.scales.shifts[0] = found.scales.shifts[1];
  return found;
}
template <int kPanels>
TANDEM_INLINE int turns_of(const MatmulArgs* args) {
  return args->pairs * 2 / kPanels;
}

// Bytes from a turn's first panel to what is read after it.
template <int kPanels>
TANDEM_INLINE int64_t after_turn(const MatmulArgs* args, int turn, const uint8_t* panel) {
  const WeightView& w = args->weights;
  if (kPanels == 1 && turn % 2 == 0) return w.second;
  const bool more = turn + 1 < turns_of<kPanels>(args) || !args->next_panel;
  return more ? w.pair_bytes - (kPanels == 1 ? w.second : 0) : args->next_panel - panel;
}

// A call's panels step after step, unpacked to the ring, a quarter of a step at a time.
template <class Isa, template <class> class F, int kPanels>
class StreamFeed {
  using Format = F<Isa>;
  static constexpr int kUnitBytes = kUnitPairs * Format::kPairBytes;

 public:
  static constexpr float kCodeUnit = GroupLines<Isa, F>::kCodeUnit;  // what a code counts where lines are not scaled

  explicit StreamFeed(const MatmulArgs* args)
      : args_(args),
        steps_(args->weights.padded_depth / 32),
        half_steps_(args->weights.group == 16),
        group_shift_(args->weights.group > 32 ? __builtin_ctz(unsigned(args->weights.group / 32)) : 0),
        folds_(folds(args)),
        ahead_(args->weights, Format::kPairBytes, 0) {
    begin_turn();
    if (folds_ || !args->weights.group)  // what is multiplied are codes
      for (int p = 0; p < kPanels; ++p) lines_[p].begin_codes();
  }

  // Where step n of all lies.
  TANDEM_INLINE const uint8_t* lines(int64_t n, int p) const {
    return args_->scratch + n % kStreamRing * kStepBytes + p * kStepBytes / 2;
  }

  template <int kQuarter>
  TANDEM_INLINE void quarter() {
    if (left_ == 0) return;
    constexpr int p = kQuarter * kPanels / 4, unit = kQuarter * kPanels % 4;  // of 4 that a step has of a panel
    if constexpr (kQuarter == 0) turned_ = step_ >= ahead_.turn;
    if (unit == 0 || (unit == 2 && half_steps_)) begin_group<p>(unit / 2);
    const uint8_t* payload = panels_.payload[p] + (step_ * 4 + unit) * kUnitBytes;
    uint8_t* const to = args_->scratch + slot_ * kStepBytes + (4 * p + unit) * (kUnitPairs * kCacheLine);
    for (int i = 0; i < kPanels * kUnitBytes; i += kCacheLine) Isa::prefetch(payload + i + ahead_.payload[turned_]);
    lines_[p].template unpack<unit * kUnitPairs % Format::kPairsPerBlock, kPanels>(payload, to);
    if constexpr (kQuarter == 3) turn_step();
  }

 private:
  // half: of the step.
  template <int p>
  TANDEM_INLINE void begin_group(int half) {
    const Scales& scales = panels_.scales;
    const bool begins = !(step_ & ((int64_t{1} << group_shift_) - 1));
    const int64_t group = half_steps_ ? 2 * step_ + half : step_ >> group_shift_;
    if (folds_ && begins) Isa::prefetch(folded_.of_group(p, group) + ahead_.scales[turned_]);
    if (!scales.panel[0] || !begins) return;
    Isa::prefetch(scales.of_group(p, group) + ahead_.scales[turned_]);
    lines_[p].begin(scales, p, group);
  }

  TANDEM_INLINE void turn_step() {
    slot_ = (slot_ + 1) % kStreamRing;
    if (++step_ < steps_) return;
    step_ = 0;
    ++turn_;
    if (--left_ == 0) return;
    begin_turn();
  }

  TANDEM_INLINE void begin_turn() {
    panels_ = panels_of_turn<kPanels>(args_, turn_);
    if (folds_) {
      folded_ = panels_.scales;
      panels_.scales.panel[0] = panels_.scales.panel[1] = nullptr;
    }
    ahead_ = {args_->weights, Format::kPairBytes, after_turn<kPanels>(args_, turn_, panels_.payload[0])};
  }

  const MatmulArgs* args_;
  const int64_t steps_;
  const bool half_steps_;  // groups of 16
  const int group_shift_;  // longer ones are powers of two, in steps
  int64_t step_ = 0, slot_ = 0;
  int turn_ = 0, left_ = turns_of<kPanels>(args_);
  const bool folds_;
  PairOfPanels panels_;
  Scales folded_;  // only asked for here
  StreamAhead ahead_;
  int turned_ = 0;
  GroupLines<Isa, F> lines_[kPanels];
};

// Rows as they are: half a step, or all of it, interleaves 16 pairs of k of one panel's rows.
template <class Isa, int kPanels>
class StreamFeed<Isa, Bf16RowsFormat, kPanels> {
 public:
  explicit StreamFeed(const MatmulArgs* args) : args_(args), steps_(args->weights.padded_depth / 32) { begin_turn(); }

  TANDEM_INLINE const uint8_t* lines(int64_t n, int p) const {
    return args_->scratch + n % kStreamRing * kStepBytes + p * kStepBytes / 2;
  }

  template <int kQuarter>
  TANDEM_INLINE void quarter() {
    if (left_ == 0) return;
    if constexpr (kQuarter % (4 / kPanels) == 0) {
      constexpr int p = kQuarter * kPanels / 4;
      const int64_t row_bytes = panels_.row_bytes, later = step_ + kRowsAhead;
      if (later < steps_)
        prefetch_rows<Isa>(panels_.payload[p], row_bytes, later * kBlockPairs, (later + 1) * kBlockPairs);
      else
        prefetch_rows<Isa>(next_[p], row_bytes, (later - steps_) * kBlockPairs, (later - steps_ + 1) * kBlockPairs);
      Isa::interleave(panels_.payload[p] + step_ * kCacheLine, row_bytes,
                      args_->scratch + slot_ * kStepBytes + p * kStepBytes / 2);
    }
    if constexpr (kQuarter == 3) {
      slot_ = (slot_ + 1) % kStreamRing;
      if (++step_ < steps_) return;
      step_ = 0;
      ++turn_;
      if (--left_) begin_turn();
    }
  }

 private:
  static constexpr int64_t kRowsAhead = 4;  // steps: a pass of kRowsPairs, as with few rows

  TANDEM_INLINE void begin_turn() {
    panels_ = panels_of_turn<kPanels>(args_, turn_);
    const uint8_t* const next = panels_.payload[0] + after_turn<kPanels>(args_, turn_, panels_.payload[0]);
    next_[0] = next;
    next_[1] = next + args_->weights.second;
  }

  const MatmulArgs* args_;
  const int64_t steps_;
  int64_t step_ = 0, slot_ = 0;
  int turn_ = 0, left_ = turns_of<kPanels>(args_);
  PairOfPanels panels_;
  const uint8_t* next_[2];
};

// Formats whose payload already is lines: nothing is unpacked, only asked for.
template <class Isa, int kPanels>
class StreamFeed<Isa, Bf16Format, kPanels> {
 public:
  explicit StreamFeed(const MatmulArgs* args) : args_(args), steps_(args->weights.padded_depth / 32) { begin_turn(); }

  TANDEM_INLINE const uint8_t* lines(int64_t, int p) const { return panels_.payload[p] + step_ * 1024; }

  template <int kQuarter>
  TANDEM_INLINE void quarter() {
    constexpr int p = kQuarter * kPanels / 4, part = kQuarter * kPanels % 4;
    const uint8_t* from = panels_.payload[p] + step_ * 1024 + part * 256 + ahead_[step_ >= ahead_turn_];
#pragma GCC unroll 8
    for (int i = 0; i < 4 * kPanels; ++i) Isa::prefetch(from + i * kCacheLine);
    if constexpr (kQuarter == 3) {
      if (++step_ < steps_ || ++turn_ == turns_of<kPanels>(args_)) return;
      step_ = 0;
      begin_turn();
    }
  }

 private:
  TANDEM_INLINE void begin_turn() {
    panels_ = panels_of_turn<kPanels>(args_, turn_);
    const StreamAhead ahead(args_->weights, 64, after_turn<kPanels>(args_, turn_, panels_.payload[0]));
    ahead_turn_ = ahead.turn;
    for (int i = 0; i < 2; ++i) ahead_[i] = ahead.payload[i];
  }

  const MatmulArgs* args_;
  const int64_t steps_;
  int64_t step_ = 0, ahead_turn_ = 0, ahead_[2];
  int turn_ = 0;
  PairOfPanels panels_;
};

}  // namespace
}  // namespace tandem
