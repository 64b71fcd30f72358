// Few rows on matrix tiles. All of K of the rows lies in tile order in L2. The weights pass once, and the sums stay in
// tiles from the first k to the last. What tiles multiply next is unpacked to a ring that never leaves L1; if it
// already is lines, it is prefetched into L1.
//
//   pair of panels, or one: a turn
//     step of 32 k   2 panels x 1 or 2 tiles of rows, or 1 panel x 3 to 5; meanwhile step n + kStreamAhead is unpacked,
//                    and what comes 4 to 8 KiB later is asked for
//
// All rows' K must fit 512 KiB: 7936 for 32 rows, 15872 for 16. 33 rows and more may use all of the scratch: 9088 for
// 64, 7264 for 80. Others are left to tile_amx.h. Up to 32 rows, groups of 128 k and more are not scaled before they
// are multiplied, so no weight is rounded. A group's sum is scaled in float and added to those before it, while tiles
// multiply the next group.
//
// Rows need not lie in L1: slices of K that fit there were no faster. More than 80 rows would take six tiles, and with
// the panels' all eight: then no physical register is left over (isa/tiles_amx.h). Figures: docs/lab/kernel-choices.md.
#pragma once

#include "micro/stream_feed.h"
#include "micro/tile_rows.h"

namespace tandem {
namespace {

constexpr int kStreamRows = 80;                              // five tiles
constexpr int64_t kStreamSumsAt = kStreamRing * kStepBytes;  // of two groups
constexpr int64_t kStreamSumsBytes = kFoldedRows * kPairColumns * int64_t(sizeof(float));
constexpr int64_t kStreamRowsAt = kStreamSumsAt + 2 * kStreamSumsBytes;

// Floats of sums of activations by row and group, where they are needed: behind the rows.
inline int64_t stream_x_sums(const MatmulArgs* args) {
  const WeightView& w = args->weights;
  return folds(args) && w.shift_offset ? args->rows * (w.padded_depth / w.group) : 0;
}
inline int64_t stream_rows_bytes(const MatmulArgs* args) {
  const EvenTiles tiles(args->rows);
  return int64_t{tiles.count} * tiles.high * args->weights.padded_depth * 2;
}

// All rows, in tiles of equal height, fit the scratch.
inline bool takes_stream(const MatmulArgs* args) {
  const int64_t most = args->rows <= kFoldedRows ? kFewRowsScratchBytes : kMatmulScratchBytes;
  return args->rows <= kStreamRows && kStreamRowsAt + stream_rows_bytes(args) + 4 * stream_x_sums(args) <= most;
}

// y (+)= the scaled sums of a group of a pair of panels, in turns. sums: [row][32 columns].
template <class Isa, class Format>
class Folding {
  using Vec = typename Isa::Vec;

 public:
  // unit: what a code counts in them. x_sums: of activations, [row][group], where there are shifts.
  // rows: 0 where there is nothing to fold yet.
  TANDEM_INLINE Folding(const MatmulArgs* args, int rows, int pair, int64_t group, const float* sums, float unit,
                        const float* x_sums, int64_t turns)
      : rows_(rows),
        each_((rows_ + int(turns) - 1) / int(turns)),
        onto_(group > 0),
        y_stride_(args->y_stride),
        x_stride_(args->weights.padded_depth / args->weights.group),
        y_(args->y + kPairColumns * pair),
        sums_(sums) {
    const Scales scales = pair_of_panels(args->weights, args->first_pair + pair).scales;
    if (scales.shifts[0]) x_sums_ = x_sums + group;
    for (int p = 0; p < 2; ++p) {
      const Vec scale = scales_for<Isa, Format>(scales.panel[p], scales.type, group);
      if (x_sums_) shift_[p] = load_shifts<Isa>(scales.shifts[p], scales.type, scales.shift_type, group, scale);
      scale_[p] = Isa::mul(scale, Isa::set1(1.0f / unit));
    }
  }

  TANDEM_INLINE void step() { run(done_ + each_ < rows_ ? done_ + each_ : rows_); }
  TANDEM_INLINE void finish() { run(rows_); }

 private:
  TANDEM_INLINE void run(int until) {
    for (; done_ < until; ++done_)
      for (int p = 0; p < 2; ++p) {
        float* out = y_ + done_ * y_stride_ + kPanelRows * p;
        const float* sum = sums_ + done_ * kPairColumns + kPanelRows * p;
        Vec v = Isa::fma(Isa::load(sum), scale_[p], onto_ ? Isa::load(out) : Isa::zero());
        if (x_sums_) v = Isa::fma(Isa::set1(x_sums_[done_ * x_stride_]), shift_[p], v);
        Isa::store(out, v);
      }
  }

  const int rows_, each_;
  int done_ = 0;
  const bool onto_;
  const int64_t y_stride_, x_stride_;
  float* const y_;
  const float *sums_, *x_sums_ = nullptr;
  Vec scale_[2], shift_[2] = {Isa::zero(), Isa::zero()};
};

template <class Isa, class Tiles, template <class> class F>
class StreamProduct {
  template <int kPanels>
  using Feed = StreamFeed<Isa, F, kPanels>;

 public:
  explicit StreamProduct(const MatmulArgs* args)
      : args_(args), tiles_(args->rows), steps_(args->weights.padded_depth / 32) {}

  void run() {
    Tiles::begin(tiles_.high);
    gather_rows<Isa>(x(), args_->rows, 0, steps_, tiles_.high, tiles_.count * tiles_.high,
                     args_->scratch + kStreamRowsAt);
    if constexpr (F<Isa>::kScaled)
      if (folds(args_)) return tiles_.count == 1 ? fold_groups<1>() : fold_groups<2>();
    if (tiles_.count == 1) return stream<1, 2>();
    if (tiles_.count == 2) return stream<2, 2>();
    if (tiles_.count == 3) return stream<3, 1>();
    if (tiles_.count == 4) return stream<4, 1>();
    stream<5, 1>();
  }

 private:
  template <int kTiles, int kPanels>
  void stream() {
    const Feed<kPanels> begun = begin<kPanels>(args_);
    Feed<kPanels> feed = begun;  // nobody has its address: it need not lie in memory
    typename Tiles::Sums sums;
    const int64_t a_step = int64_t{kTiles} * tiles_.high * kCacheLine;
    float* y = args_->y;
    int64_t n = 0;
    for (int turn = 0, turns = turns_of<kPanels>(args_); turn < turns; ++turn, y += kPanels * kPanelRows) {
      Tiles::template clear<kTiles, kPanels>(sums);
      const uint8_t* a = args_->scratch + kStreamRowsAt;
      for (int64_t s = 0; s < steps_; ++s, ++n, a += a_step)
        Tiles::template step<kTiles, kPanels>(sums, tiles_.high, a, feed.lines(n, 0), feed.lines(n, kPanels - 1), feed);
      Tiles::template store<kTiles, kPanels>(sums, tiles_.high, y, args_->y_stride);
      if constexpr (F<Isa>::kScaled)
        if (!args_->weights.group && feed.kCodeUnit != 1.0f) in_codes<kPanels>(y);
    }
  }

  // Sums of products with codes that counted kCodeUnit.
  template <int kPanels>
  void in_codes(float* y) const {
    const typename Isa::Vec scale = Isa::set1(1.0f / Feed<kPanels>::kCodeUnit);
    for (int r = 0; r < args_->rows; ++r, y += args_->y_stride)
      for (int p = 0; p < kPanels; ++p) Isa::store(y + kPanelRows * p, Isa::mul(Isa::load(y + kPanelRows * p), scale));
  }

  // The same, a group at a time; the one before is folded meanwhile.
  template <int kTiles>
  void fold_groups() {
    sum_activations();
    const Feed<2> begun = begin<2>(args_);
    Feed<2> feed = begun;
    typename Tiles::Sums sums;
    const int64_t a_step = int64_t{kTiles} * tiles_.high * kCacheLine, each = args_->weights.group / 32;
    const int64_t groups = steps_ / each, count = groups * args_->pairs;
    int64_t n = 0;
    for (int64_t i = 0; i <= count; ++i) {
      const uint8_t* a = args_->scratch + kStreamRowsAt + i % groups * each * a_step;
      const int64_t before = i > 0 ? i - 1 : 0;
      Folding<Isa, F<Isa>> fold(args_, i > 0 ? args_->rows : 0, int(before / groups), before % groups, part(before),
                                feed.kCodeUnit, x_sums(), each);
      if (i < count) multiply_group<kTiles>(sums, a, feed, n, each, [&] { fold.step(); });
      fold.finish();
      if (i < count) Tiles::template store<kTiles, 2>(sums, tiles_.high, part(i), kPairColumns);
    }
  }

  template <int kTiles, class Between>
  TANDEM_INLINE void multiply_group(typename Tiles::Sums& sums, const uint8_t* a, Feed<2>& feed, int64_t& n,
                                    int64_t steps, const Between& between) const {
    Tiles::template clear<kTiles, 2>(sums);
    for (int64_t s = 0; s < steps; ++s, ++n, a += kTiles * tiles_.high * kCacheLine) {
      Tiles::template step<kTiles, 2>(sums, tiles_.high, a, feed.lines(n, 0), feed.lines(n, 1), feed);
      between();
    }
  }

  const uint8_t* const* x() const { return reinterpret_cast<const uint8_t* const*>(args_->x_rows); }
  float* part(int64_t i) const {
    return reinterpret_cast<float*>(args_->scratch + kStreamSumsAt + i % 2 * kStreamSumsBytes);
  }
  float* x_sums() const { return reinterpret_cast<float*>(args_->scratch + kStreamRowsAt + stream_rows_bytes(args_)); }
  void sum_activations() const {
    const WeightView& w = args_->weights;
    if (w.shift_offset)
      sum_groups<Isa, typename Isa::Lane>(x(), args_->rows, w.group, 0, w.padded_depth / w.group, x_sums());
  }

  template <int kPanels>
  __attribute__((noinline)) static Feed<kPanels> begin(const MatmulArgs* args) {
    Feed<kPanels> feed(args);
    for (int64_t n = 0; n < (F<Isa>::kPacked ? kStreamAhead : 0); ++n) {
      feed.template quarter<0>();
      feed.template quarter<1>();
      feed.template quarter<2>();
      feed.template quarter<3>();
    }
    return feed;
  }

  const MatmulArgs* args_;
  const EvenTiles tiles_;
  const int64_t steps_;
};

}  // namespace
}  // namespace tandem
