// Few rows on matrix tiles: all of K of the rows lies in tile order in L2, the weights pass once, and the sums stay in
// tiles from the first k to the last. What tiles multiply next is unpacked to a ring that never leaves L1, or, if it
// already is lines, fetched into L1: tiles load a line from L2 five times as slowly (3 and 0.3 to 0.6 ns on a Xeon).
//
//   pair of panels
//     step of 32 k   2 panels x 1 or 2 tiles of rows; meanwhile step n + kStreamAhead is unpacked, and what comes 4 to
//                    8 KiB later is asked for
//
// All rows' K must fit 512 KiB: 7936 for 32 rows, 15872 for 16; others are left to tile_amx.h. Groups of 128 k and
// more are not scaled before they are multiplied, so no weight is rounded: what a group sums up to
// is scaled in float and added to the sums of those before it, while tiles multiply the next group.
//
// Weights in L2, 16 threads at once, us a pair of panels of K = 2048 before and with this, 4, 16 and 32 rows: bf16 5.1,
// 7.4, 11.9 and 1.8, 3.4, 5.8; mxfp4 3.8, 6.4, 10.0 and 3.9, 4.3, 5.7; int8 7.9, 8.7, 11.3 and 4.4, 5.5, 7.5; int4 3.4,
// 6.4, 11.5 and 4.8, 4.5, 8.7. Asking for rows in L1 2 to 8 steps ahead took 1.0 to 1.15 times as long.
#pragma once

#include <stdlib.h>
#include "micro/stream_feed.h"
#include "micro/tile_rows.h"

namespace tandem {
namespace {

constexpr int kBlockRows = 32;                               // two tiles
constexpr int kStreamRows = 64;                              // at most
constexpr int64_t kStreamSumsAt = kStreamRing * kStepBytes;  // of two groups
constexpr int64_t kStreamSumsBytes = kBlockRows * kPairColumns * int64_t(sizeof(float));
constexpr int64_t kStreamRowsAt = kStreamSumsAt + 2 * kStreamSumsBytes;

// Rows in one tile, or in blocks of two, all of one height.
struct StreamTiles {
  int blocks, each, high;  // each: tiles of a block

  TANDEM_INLINE explicit StreamTiles(int rows)
      : blocks((rows + kBlockRows - 1) / kBlockRows),
        each(rows > 16 ? 2 : 1),
        high((rows + blocks * each - 1) / (blocks * each)) {}

  TANDEM_INLINE int64_t step_bytes() const { return int64_t{each} * high * kCacheLine; }  // of a block
};

// Floats of sums of activations by row and group, where they are needed: behind the rows.
inline int64_t stream_x_sums(const MatmulArgs* args) {
  const WeightView& w = args->weights;
  return folds(w) && w.shift_offset ? args->rows * (w.padded_depth / w.group) : 0;
}
inline int64_t stream_rows_bytes(const MatmulArgs* args) {
  const StreamTiles tiles(args->rows);
  return tiles.blocks * tiles.step_bytes() * (args->weights.padded_depth / 32);
}

// All rows fit the scratch.
inline int64_t stream_slice_bytes() {
  static const int64_t bytes = [] { const char* s = getenv("TANDEM_SLICE"); return s ? atoll(s) : int64_t{16384}; }();
  return bytes;
}
inline int stream_rows() {
  static const int rows = [] { const char* s = getenv("TANDEM_SROWS"); return s ? atoi(s) : 32; }();
  return rows;
}
inline bool takes_stream(const MatmulArgs* args) {
  return args->rows <= stream_rows() &&
         kStreamRowsAt + stream_rows_bytes(args) + 4 * stream_x_sums(args) <= kMatmulScratchBytes;
}

// y (+)= the scaled sums of a group of a pair of panels, in turns. sums: [row][32 columns].
template <class Isa, class Format>
class Folding {
  using Vec = typename Isa::Vec;

 public:
  // rows: from first_row on. unit: what a code counts in the sums. x_sums: of activations, [row][group], where there
  // are shifts.
  TANDEM_INLINE Folding(const MatmulArgs* args, int pair, int64_t group, int first_row, int rows, const float* sums,
                        float unit, const float* x_sums, int64_t turns)
      : rows_(rows),
        each_((rows_ + int(turns) - 1) / int(turns)),
        onto_(group > 0),
        y_stride_(args->y_stride),
        x_stride_(args->weights.padded_depth / args->weights.group),
        y_(args->y + first_row * args->y_stride + kPairColumns * pair),
        sums_(sums) {
    const Scales scales = pair_of_panels(args->weights, args->first_pair + pair).scales;
    if (scales.shifts[0]) x_sums_ = x_sums + first_row * x_stride_ + group;
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
  using Feed = StreamFeed<Isa, F>;

 public:
  explicit StreamProduct(const MatmulArgs* args)
      : args_(args), tiles_(args->rows), order_(order_of(args, tiles_)), a_step_(tiles_.step_bytes()) {}

  void run() {
    Tiles::begin(tiles_.high);
    gather_rows<Isa>(x(), args_->rows, 0, order_.steps, tiles_.high, tiles_.each * tiles_.high,
                     args_->scratch + kStreamRowsAt);
    if constexpr (F<Isa>::kScaled)
      if (folds(args_->weights)) return tiles_.each == 1 ? fold_groups<1>() : fold_groups<2>();
    tiles_.each == 1 ? stream<1>() : stream<2>();
  }

 private:
  static StreamOrder order_of(const MatmulArgs* args, const StreamTiles& tiles) {
    const WeightView& w = args->weights;
    const int64_t steps = w.padded_depth / 32, unit = w.group > 32 ? w.group / 32 : 1;
    const bool whole = args->pairs == 1 || HasWholeRows<F<Isa>>;
    const int64_t most = stream_slice_bytes() / tiles.step_bytes() / unit * unit;
    const int64_t slices = whole || most < 1 ? 1 : (steps + most - 1) / most;
    const int64_t each = (steps + slices - 1) / slices;
    return {steps, (each + unit - 1) / unit * unit, args->pairs, tiles.blocks};
  }

  template <int kTiles>
  void stream() {
    const Feed begun = begin();
    Feed feed = begun;  // nobody has its address: it need not lie in memory
    typename Tiles::Sums sums;
    StreamPass pass(order_);
    for (int64_t n = 0, left = order_.passes(); left > 0; --left, pass.next(order_)) {
      float* const y = sums_of(pass);
      start<kTiles>(sums, y, pass.first > 0);
      const uint8_t* a = rows_of(pass);
      for (int64_t s = pass.first; s < pass.last; ++s, ++n, a += a_step_)
        Tiles::template step<kTiles>(sums, tiles_.high, a, feed.lines(n, 0), feed.lines(n, 1), feed);
      Tiles::template store<kTiles>(sums, tiles_.high, y, args_->y_stride);
    }
    if constexpr (Feed::kCodeUnit != 1.0f)
      if (!args_->weights.group) in_codes();
  }

  template <int kTiles>
  TANDEM_INLINE void start(typename Tiles::Sums& sums, const float* y, bool onto) const {
    if (onto)
      Tiles::template load<kTiles>(sums, tiles_.high, y, args_->y_stride);
    else
      Tiles::template clear<kTiles>(sums);
  }

  // Sums of products with codes that counted kCodeUnit.
  void in_codes() const {
    const typename Isa::Vec scale = Isa::set1(1.0f / Feed::kCodeUnit);
    for (int r = 0; r < args_->rows; ++r)
      for (int64_t i = 0; i < int64_t{args_->pairs} * kPairColumns; i += kPanelRows) {
        float* const y = args_->y + r * args_->y_stride + i;
        Isa::store(y, Isa::mul(Isa::load(y), scale));
      }
  }

  // The same, a group at a time; the one before is folded meanwhile.
  template <int kTiles>
  void fold_groups() {
    sum_activations();
    const Feed begun = begin();
    Feed feed = begun;
    typename Tiles::Sums sums;
    const int64_t each = args_->weights.group / 32;
    StreamPass pass(order_);
    Group before{-1};
    int64_t n = 0, i = 0;
    for (int64_t left = order_.passes(); left > 0; --left, pass.next(order_))
      for (int64_t s = pass.first; s < pass.last; s += each, ++i) {
        const Group here{s / each, pass.pair, pass.block};
        const uint8_t* a = rows_of(pass) + (s - pass.first) * a_step_;
        if (before.group < 0) {
          multiply_group<kTiles>(sums, a, feed, n, each, [] {});
        } else {
          Folding<Isa, F<Isa>> fold = folding(before, i - 1, each);
          multiply_group<kTiles>(sums, a, feed, n, each, [&] { fold.step(); });
          fold.finish();
        }
        Tiles::template store<kTiles>(sums, tiles_.high, part(i), kPairColumns);
        before = here;
      }
    folding(before, i - 1, each).finish();
  }

  struct Group {
    int64_t group;
    int pair = 0, block = 0;
  };
  TANDEM_INLINE Folding<Isa, F<Isa>> folding(const Group& of, int64_t i, int64_t turns) const {
    const int first = of.block * rows_each(), left = args_->rows - first;
    return {args_, of.pair, of.group, first, left < rows_each() ? left : rows_each(), part(i), Feed::kCodeUnit,
            x_sums(), turns};
  }

  template <int kTiles, class Between>
  TANDEM_INLINE void multiply_group(typename Tiles::Sums& sums, const uint8_t* a, Feed& feed, int64_t& n, int64_t steps,
                                    const Between& between) const {
    Tiles::template clear<kTiles>(sums);
    for (int64_t s = 0; s < steps; ++s, ++n, a += a_step_) {
      Tiles::template step<kTiles>(sums, tiles_.high, a, feed.lines(n, 0), feed.lines(n, 1), feed);
      between();
    }
  }

  int rows_each() const { return tiles_.each * tiles_.high; }  // of a block
  const uint8_t* const* x() const { return reinterpret_cast<const uint8_t* const*>(args_->x_rows); }
  const uint8_t* rows_of(const StreamPass& pass) const {
    return args_->scratch + kStreamRowsAt + (pass.block * order_.steps + pass.first) * a_step_;
  }
  float* sums_of(const StreamPass& pass) const {
    return args_->y + pass.block * rows_each() * args_->y_stride + kPairColumns * pass.pair;
  }
  float* part(int64_t i) const {
    return reinterpret_cast<float*>(args_->scratch + kStreamSumsAt + i % 2 * kStreamSumsBytes);
  }
  float* x_sums() const { return reinterpret_cast<float*>(args_->scratch + kStreamRowsAt + stream_rows_bytes(args_)); }
  void sum_activations() const {
    const WeightView& w = args_->weights;
    if (w.shift_offset)
      sum_groups<Isa, typename Isa::Lane>(x(), args_->rows, w.group, 0, w.padded_depth / w.group, x_sums());
  }

  __attribute__((noinline)) Feed begin() const {
    Feed feed(args_, order_);
    for (int64_t n = 0; n < (F<Isa>::kPacked ? kStreamAhead : 0); ++n) {
      feed.template quarter<0>();
      feed.template quarter<1>();
      feed.template quarter<2>();
      feed.template quarter<3>();
    }
    return feed;
  }

  const MatmulArgs* args_;
  const StreamTiles tiles_;
  const StreamOrder order_;
  const int64_t a_step_;
};

}  // namespace
}  // namespace tandem
