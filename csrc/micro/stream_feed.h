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

// The order of a call: slices of K, in each all pairs of panels, and each of them for as many blocks of rows as there
// are. A pass is a slice of a pair for a block.
struct StreamOrder {
  int64_t steps, slice;  // of K, and at most of a slice; in steps of 32 k
  int pairs, blocks;

  TANDEM_INLINE int64_t passes() const { return (steps + slice - 1) / slice * pairs * blocks; }
};

struct StreamPass {
  int64_t first, last;  // steps
  int pair = 0, block = 0;

  TANDEM_INLINE explicit StreamPass(const StreamOrder& order) : first(0), last(end_of(order, 0)) {}

  TANDEM_INLINE void next(const StreamOrder& order) {
    if (++block < order.blocks) return;
    block = 0;
    if (++pair < order.pairs) return;
    pair = 0;
    first = last;
    last = end_of(order, first);
  }

 private:
  TANDEM_INLINE static int64_t end_of(const StreamOrder& order, int64_t from) {
    return from + order.slice < order.steps ? from + order.slice : order.steps;
  }
};

// What is asked for meanwhile, by the step: a panel's payload and scales some units of K further on, or what is read
// after this pass.
struct StreamAhead {
  int64_t turn;  // in steps
  int64_t payload[2], scales[2];

  // next: bytes from where this pass begins to where the next one does, in payload and in scales.
  TANDEM_INLINE StreamAhead(const WeightView& w, int64_t pair_bytes, const StreamPass& pass, int64_t next,
                            int64_t next_scales) {
    const int64_t unit = w.group > 32 ? w.group / 32 : 1;
    const Lookahead ahead = look_ahead((pass.last - pass.first) / unit, unit * 16 * pair_bytes,
                                       w.group ? unit * 32 / w.group * group_bytes(w.scale_type) : 0, next, next_scales);
    turn = pass.first + ahead.turn * unit;
    for (int i = 0; i < 2; ++i) payload[i] = ahead.payload[i], scales[i] = ahead.scales[i];
  }
};

// What a call's stream asks for in a pass. step_bytes: of a panel's payload, of 32 k.
TANDEM_INLINE StreamAhead ahead_of(const MatmulArgs* args, const StreamOrder& order, const StreamPass& pass,
                                   int64_t pair_bytes) {
  const WeightView& w = args->weights;
  StreamPass after = pass;
  after.next(order);
  const int64_t pairs = (after.pair - pass.pair) * w.pair_bytes, steps = after.first - pass.first;
  const int64_t scale_bytes = w.group ? steps * 32 / w.group * group_bytes(w.scale_type) : 0;
  if (after.first < order.steps)
    return {w, pair_bytes, pass, pairs + steps * 16 * pair_bytes, pairs + scale_bytes};
  const int64_t here = (args->first_pair + pass.pair) * w.pair_bytes;
  const int64_t next = args->next_panel ? args->next_panel - (w.panels + here) : w.pair_bytes;
  return {w, pair_bytes, pass, next - pass.first * 16 * pair_bytes,
          next - (w.group ? pass.first * 32 / w.group * group_bytes(w.scale_type) : 0)};
}

// A call's pairs of panels step after step, unpacked to the ring, a quarter of a step at a time.
template <class Isa, template <class> class F>
class StreamFeed {
  using Format = F<Isa>;
  static constexpr int kUnitBytes = kUnitPairs * Format::kPairBytes;

 public:
  static constexpr float kCodeUnit = GroupLines<Isa, F>::kCodeUnit;  // what a code counts where lines are not scaled

  StreamFeed(const MatmulArgs* args, const StreamOrder& order)
      : args_(args),
        order_(order),
        pass_(order),
        left_(order.passes()),
        halves_(args->weights.group == 16),
        group_shift_(args->weights.group > 32 ? __builtin_ctz(unsigned(args->weights.group / 32)) : 0),
        folds_(folds(args->weights)),
        ahead_(ahead_of(args, order, pass_, Format::kPairBytes)) {
    begin_pass();
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
    if (kQuarter % 2 == 0 || halves_) begin_group<p>(kQuarter % 2);
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
    const bool begins = !(step_ & ((int64_t{1} << group_shift_) - 1));
    const int64_t group = halves_ ? 2 * step_ + half : step_ >> group_shift_;
    if (folds_ && begins) Isa::prefetch(folded_.of_group(p, group) + ahead_.scales[turned_]);
    if (!panels_.scales.panel[0] || !begins) return;
    Isa::prefetch(panels_.scales.of_group(p, group) + ahead_.scales[turned_]);
    lines_[p].begin(panels_.scales, p, group);
  }

  TANDEM_INLINE void turn_step() {
    slot_ = (slot_ + 1) % kStreamRing;
    if (++step_ < pass_.last || --left_ == 0) return;
    pass_.next(order_);
    begin_pass();
  }

  TANDEM_INLINE void begin_pass() {
    step_ = pass_.first;
    panels_ = pair_of_panels(args_->weights, args_->first_pair + pass_.pair);
    if (folds_) {
      folded_ = panels_.scales;
      panels_.scales.panel[0] = panels_.scales.panel[1] = nullptr;
    }
    ahead_ = ahead_of(args_, order_, pass_, Format::kPairBytes);
  }

  const MatmulArgs* args_;
  const StreamOrder order_;
  StreamPass pass_;
  int64_t step_ = 0, slot_ = 0, left_;  // left_: passes
  const bool halves_;                   // of a step: groups of 16
  const int group_shift_;               // groups are powers of two, in steps
  const bool folds_;
  PairOfPanels panels_;
  Scales folded_;  // only asked for here
  StreamAhead ahead_;
  int turned_ = 0;
  GroupLines<Isa, F> lines_[2];
};

// Rows as they are: half a step interleaves 16 pairs of k of one panel's rows. What comes later is asked for row by row,
// so slices are whole rows.
template <class Isa>
class StreamFeed<Isa, Bf16RowsFormat> {
 public:
  static constexpr float kCodeUnit = 1.0f;

  StreamFeed(const MatmulArgs* args, const StreamOrder& order)
      : args_(args), order_(order), pass_(order), left_(order.passes()), rows_(pair_of_rows(args, 0)) {}

  TANDEM_INLINE const uint8_t* lines(int64_t n, int p) const {
    return args_->scratch + n % kStreamRing * kStepBytes + p * kStepBytes / 2;
  }

  template <int kQuarter>
  TANDEM_INLINE void quarter() {
    if (left_ == 0) return;
    if constexpr (kQuarter % 2 == 0) {
      constexpr int p = kQuarter / 2;
      const int64_t row_bytes = rows_.panels.row_bytes, later = step_ + kRowsAhead;
      if (later < order_.steps)
        prefetch_rows<Isa>(rows_.panels.payload[p], row_bytes, later * kBlockPairs, (later + 1) * kBlockPairs);
      else
        prefetch_rows<Isa>(rows_.next[p], row_bytes, (later - order_.steps) * kBlockPairs,
                           (later - order_.steps + 1) * kBlockPairs);
      Isa::interleave(rows_.panels.payload[p] + step_ * kCacheLine, row_bytes,
                      args_->scratch + slot_ * kStepBytes + p * kStepBytes / 2);
    }
    if constexpr (kQuarter == 3) {
      slot_ = (slot_ + 1) % kStreamRing;
      if (++step_ < pass_.last || --left_ == 0) return;
      pass_.next(order_);
      step_ = pass_.first;
      rows_ = pair_of_rows(args_, pass_.pair);
    }
  }

 private:
  static constexpr int64_t kRowsAhead = 4;  // steps: a pass of kRowsPairs, as with few rows

  const MatmulArgs* args_;
  const StreamOrder order_;
  StreamPass pass_;
  int64_t step_ = 0, slot_ = 0, left_;
  PairOfRows rows_;
};

// Formats whose payload already is lines: nothing is unpacked, only asked for.
template <class Isa>
class StreamFeed<Isa, Bf16Format> {
 public:
  static constexpr float kCodeUnit = 1.0f;

  StreamFeed(const MatmulArgs* args, const StreamOrder& order)
      : args_(args), order_(order), pass_(order), left_(order.passes()), ahead_(ahead_of(args, order, pass_, 64)) {
    begin_pass();
  }

  TANDEM_INLINE const uint8_t* lines(int64_t, int p) const { return panels_.payload[p] + step_ * 1024; }

  template <int kQuarter>
  TANDEM_INLINE void quarter() {
    const uint8_t* from =
        panels_.payload[kQuarter / 2] + step_ * 1024 + kQuarter % 2 * 512 + ahead_.payload[step_ >= ahead_.turn];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) Isa::prefetch(from + i * kCacheLine);
    if constexpr (kQuarter == 3) {
      if (++step_ < pass_.last || --left_ == 0) return;
      pass_.next(order_);
      begin_pass();
    }
  }

 private:
  TANDEM_INLINE void begin_pass() {
    step_ = pass_.first;
    panels_ = pair_of_panels(args_->weights, args_->first_pair + pass_.pair);
    ahead_ = ahead_of(args_, order_, pass_, 64);
  }

  const MatmulArgs* args_;
  const StreamOrder order_;
  StreamPass pass_;
  int64_t step_ = 0, left_;
  PairOfPanels panels_;
  StreamAhead ahead_;
};

}  // namespace
}  // namespace tandem
