// What few rows on matrix tiles are multiplied with (tile_stream.h), step after step of 32 k through a call's pairs of
// panels: unpacked to a ring, or, if they already are lines, where they lie; and what comes later is asked for.
#pragma once

#include "micro/dot_rows.h"
#include "micro/tile_unpack.h"

namespace tandem {
namespace {

constexpr int64_t kStreamAhead = 2, kStreamRing = 4;
constexpr int64_t kStepBytes = 2 * 16 * kCacheLine;  // of unpacked lines: two tiles

// Sums of groups from this size on are scaled, instead of weights.
constexpr int kFoldedGroup = 128;

inline bool folds(const WeightView& w) { return w.scale_offset && w.group >= kFoldedGroup; }

// What is asked for meanwhile, by the step: a panel's payload and scales some units of K further on, or the next one's.
struct StreamAhead {
  int64_t turn;  // in steps
  int64_t payload[2], scales[2];

  TANDEM_INLINE StreamAhead(const WeightView& w, int64_t pair_bytes, int64_t next) {
    const int64_t unit = w.group > 32 ? w.group / 32 : 1, steps = w.padded_depth / 32;
    const Lookahead ahead = look_ahead(steps / unit, unit * 16 * pair_bytes,
                                       w.group ? unit * 32 / w.group * group_bytes(w.scale_type) : 0, next);
    turn = ahead.turn * unit;
    for (int i = 0; i < 2; ++i) payload[i] = ahead.payload[i], scales[i] = ahead.scales[i];
  }
};

// A call's pairs of panels step after step, unpacked to the ring, a quarter of a step at a time.
template <class Isa, template <class> class F>
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
        folds_(folds(args->weights)),
        ahead_(args->weights, Format::kPairBytes, 0) {
    begin_pair();
    if (folds_ || !args->weights.group)  // what is multiplied are codes
      for (int p = 0; p < 2; ++p) lines_[p].begin_codes();
  }

  // Where step n of all lies.
  TANDEM_INLINE const uint8_t* lines(int64_t n, int p) const {
    return args_->scratch + n % kStreamRing * kStepBytes + p * kStepBytes / 2;
  }

  template <int kQuarter>
  TANDEM_INLINE void quarter() {
    if (left_ == 0) return;
    constexpr int p = kQuarter / 2;
    if constexpr (kQuarter == 0) turned_ = step_ >= ahead_.turn;
    if (kQuarter % 2 == 0 || half_steps_) begin_group<p>(kQuarter % 2);
    const uint8_t* payload = panels_.payload[p] + (step_ * 4 + kQuarter % 2 * 2) * kUnitBytes;
    uint8_t* const to = args_->scratch + slot_ * kStepBytes + kQuarter * (kStepBytes / 4);
    for (int i = 0; i < 2 * kUnitBytes; i += kCacheLine) Isa::prefetch(payload + i + ahead_.payload[turned_]);
    lines_[p].template unpack<0, 2>(payload, to);
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
    ++pair_;
    if (--left_ == 0) return;
    begin_pair();
  }

  TANDEM_INLINE void begin_pair() {
    panels_ = pair_of_panels(args_->weights, args_->first_pair + pair_);
    if (folds_) {
      folded_ = panels_.scales;
      panels_.scales.panel[0] = panels_.scales.panel[1] = nullptr;
    }
    ahead_ = {args_->weights, Format::kPairBytes, next()};
  }

  // Bytes from this pair to what is read after it.
  TANDEM_INLINE int64_t next() const {
    const WeightView& w = args_->weights;
    return pair_ + 1 < args_->pairs || !args_->next_panel ? w.pair_bytes : args_->next_panel - panels_.payload[0];
  }

  const MatmulArgs* args_;
  const int64_t steps_;
  const bool half_steps_;  // groups of 16
  const int group_shift_;  // longer ones are powers of two, in steps
  int64_t step_ = 0, pair_ = 0, slot_ = 0, left_ = args_->pairs;
  const bool folds_;
  PairOfPanels panels_;
  Scales folded_;  // only asked for here
  StreamAhead ahead_;
  int turned_ = 0;
  GroupLines<Isa, F> lines_[2];
};

// Rows as they are: half a step interleaves 16 pairs of k of one panel's rows.
template <class Isa>
class StreamFeed<Isa, Bf16RowsFormat> {
 public:
  explicit StreamFeed(const MatmulArgs* args)
      : args_(args), steps_(args->weights.padded_depth / 32), rows_(pair_of_rows(args, 0)) {}

  TANDEM_INLINE const uint8_t* lines(int64_t n, int p) const {
    return args_->scratch + n % kStreamRing * kStepBytes + p * kStepBytes / 2;
  }

  template <int kQuarter>
  TANDEM_INLINE void quarter() {
    if (left_ == 0) return;
    if constexpr (kQuarter % 2 == 0) {
      constexpr int p = kQuarter / 2;
      const int64_t row_bytes = rows_.panels.row_bytes, later = step_ + kRowsAhead;
      if (later < steps_)
        prefetch_rows<Isa>(rows_.panels.payload[p], row_bytes, later * kBlockPairs, (later + 1) * kBlockPairs);
      else
        prefetch_rows<Isa>(rows_.next[p], row_bytes, (later - steps_) * kBlockPairs,
                           (later - steps_ + 1) * kBlockPairs);
      Isa::interleave(rows_.panels.payload[p] + step_ * kCacheLine, row_bytes,
                      args_->scratch + slot_ * kStepBytes + p * kStepBytes / 2);
    }
    if constexpr (kQuarter == 3) {
      slot_ = (slot_ + 1) % kStreamRing;
      if (++step_ < steps_) return;
      step_ = 0;
      if (--left_) rows_ = pair_of_rows(args_, ++pair_);
    }
  }

 private:
  static constexpr int64_t kRowsAhead = 4;  // steps: a pass of kRowsPairs, as with few rows

  const MatmulArgs* args_;
  const int64_t steps_;
  int64_t step_ = 0, slot_ = 0, left_ = args_->pairs;
  int pair_ = 0;
  PairOfRows rows_;
};

// Formats whose payload already is lines: nothing is unpacked, only asked for.
template <class Isa>
class StreamFeed<Isa, Bf16Format> {
 public:
  explicit StreamFeed(const MatmulArgs* args)
      : args_(args), steps_(args->weights.padded_depth / 32), panels_(pair_of_panels(args->weights, args->first_pair)) {
    look();
  }

  TANDEM_INLINE const uint8_t* lines(int64_t, int p) const { return panels_.payload[p] + step_ * 1024; }

  template <int kQuarter>
  TANDEM_INLINE void quarter() {
    const uint8_t* from = panels_.payload[kQuarter / 2] + step_ * 1024 + kQuarter % 2 * 512 + ahead_[step_ >= turn_];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) Isa::prefetch(from + i * kCacheLine);
    if constexpr (kQuarter == 3) {
      if (++step_ < steps_ || ++pair_ == args_->pairs) return;
      step_ = 0;
      panels_ = pair_of_panels(args_->weights, args_->first_pair + pair_);
      look();
    }
  }

 private:
  TANDEM_INLINE void look() {
    const WeightView& w = args_->weights;
    const bool more = pair_ + 1 < args_->pairs || !args_->next_panel;
    const StreamAhead ahead(w, 64, more ? w.pair_bytes : args_->next_panel - panels_.payload[0]);
    turn_ = ahead.turn;
    for (int i = 0; i < 2; ++i) ahead_[i] = ahead.payload[i];
  }

  const MatmulArgs* args_;
  const int64_t steps_;
  int64_t step_ = 0, turn_ = 0, ahead_[2];
  int pair_ = 0;
  PairOfPanels panels_;
};

}  // namespace
}  // namespace tandem
