// Few rows on matrix tiles, for weights with scales of groups: codes are unpacked as they are (each is a bf16 number),
// tiles multiply one group of them, and what a group sums up to is scaled in float while it is added to the rest.
// Beside scaling every line of weights before it is rounded to bf16 (tile_amx.h) this takes per tile of 16 rows, 16
// columns and a group
//   16 lines written by the tile, read again and added up, and per line of int4 2 instead of 11 instructions,
// so it pays as long as a group has few tiles of rows; and nothing is rounded.
//
//   slice of K      as many k as rows gathered in tile order fit their scratch: with 16 rows most often all
//     pair of panels
//       chunk       one group: while tiles multiply it, vectors unpack the next one and add up the one before
#pragma once

#include "micro/block.h"
#include "micro/tile_rows.h"
#include "micro/tile_unpack.h"

namespace tandem {
namespace {

constexpr int kFewTileRows = 64;  // scaling weights takes as long as scaling sums at 64 to 100 rows, by count
// Shorter groups are left to tile_amx.h: with groups of 32 sums were stored and read as often as tiles multiplied, and
// layers took 1.2 to 1.5 times as long from 16 rows an expert on (Xeon, 16 cores); with groups of 128, 0.85.
constexpr int kFewRowsGroup = 128;
constexpr int64_t kMostChunkPairs = 128;                              // of k: longer groups are left to tile_amx.h
constexpr int64_t kFewLinesBytes = 2 * kMostChunkPairs * kCacheLine;  // of a chunk of two panels
constexpr int64_t kFewSumsBytes = kFewTileRows * kPairColumns * int64_t(sizeof(float));
constexpr int64_t kFewRowsAt = 2 * (kFewLinesBytes + kFewSumsBytes);
constexpr int64_t kFewShiftsAt = kFewRowsAt + kAmxRowBytes;
static_assert(kFewShiftsAt < kMatmulScratchBytes);

// Groups are whole tiles of 32 k and sums of their activations fit, where they are needed.
inline bool takes_few_rows(const MatmulArgs* args) {
  const WeightView& w = args->weights;
  if (args->rows > kFewTileRows || !w.scale_offset || w.group < kFewRowsGroup || w.group > 2 * kMostChunkPairs)
    return false;
  const int64_t sums = w.shift_offset ? int64_t{args->rows} * (w.padded_depth / w.group) * 4 : 0;
  return kFewShiftsAt + sums <= kMatmulScratchBytes;
}

// A chunk of K of one pair of panels.
struct Chunk {
  PairOfPanels panels;
  int64_t first, last;  // pairs of k
  int64_t slice;        // the pair of k that its slice begins with
  int pair;             // of the call
  int64_t ahead;        // bytes from its payload to what lies there in the next pair of panels, or the next slice
};

// A call's chunks in the order in which they are multiplied.
class ChunkOrder {
 public:
  ChunkOrder(const MatmulArgs* args, int pair_bytes) : args_(args), pair_bytes_(pair_bytes) {
    const WeightView& w = args->weights;
    chunk_ = w.group / 2;
    depth_ = w.padded_depth / 2;
    slice_ = slice_pairs_of_rows(args->rows, depth_, INT64_MAX, chunk_);
  }

  int64_t slice() const { return slice_; }
  int64_t chunk() const { return chunk_; }

  Chunk begin() const { return at(0, 0, 0); }
  bool next(Chunk& c) const {
    const int64_t end = slice_end(c.slice);
    if (c.last < end)
      c.first = c.last, c.last = c.first + chunk_ < end ? c.first + chunk_ : end;
    else if (c.pair + 1 < args_->pairs)
      c = at(c.pair + 1, c.slice, c.slice);
    else if (end < depth_)
      c = at(0, end, end);
    else
      return false;
    return true;
  }

 private:
  int64_t slice_end(int64_t slice) const { return slice + slice_ < depth_ ? slice + slice_ : depth_; }
  const uint8_t* payload(int pair, int64_t first) const {
    const WeightView& w = args_->weights;
    return w.panels + 2 * (args_->first_pair + pair) * w.panel_bytes + first * pair_bytes_;
  }
  Chunk at(int pair, int64_t first, int64_t slice) const {
    const int64_t end = slice_end(slice);
    const uint8_t* after = pair + 1 < args_->pairs ? payload(pair + 1, first)
                           : end < depth_          ? payload(0, end)
                                                   : args_->next_panel;
    return {pair_of_panels(args_->weights, args_->first_pair + pair),
            first,
            first + chunk_ < end ? first + chunk_ : end,
            slice,
            pair,
            after ? after - payload(pair, first) : 0};
  }

  const MatmulArgs* args_;
  int pair_bytes_;
  int64_t chunk_, depth_, slice_;
};

// y (+)= the scaled sums of a chunk, in turns. sums: [row up to whole blocks of 32][32 columns].
template <class Isa, class Format>
class Folding {
  using Vec = typename Isa::Vec;

 public:
  // x_sums: of activations, [row][group], for shifts; else null. No chunk: nothing to do.
  Folding(const MatmulArgs* args, const Chunk* chunk, const float* sums, const float* x_sums, int64_t turns)
      : rows_(chunk ? args->rows : 0), each_((rows_ + int(turns) - 1) / int(turns)) {
    if (!chunk) return;
    y_ = args->y + kPairColumns * chunk->pair;
    y_stride_ = args->y_stride;
    sums_ = sums;
    const Scales& scales = chunk->panels.scales;
    const int64_t group = chunk->first / scales.pairs_per_group;
    onto_ = chunk->first > 0;
    x_sums_ = scales.shifts[0] ? x_sums + group : nullptr;
    x_stride_ = args->weights.padded_depth / args->weights.group;
    for (int p = 0; p < 2; ++p) {
      scale_[p] = scales_for<Isa, Format>(scales.panel[p], scales.type, group);
      if (x_sums_) shift_[p] = load_shifts<Isa>(scales.shifts[p], scales.type, scales.shift_type, group, scale_[p]);
      Isa::prefetch(scales.of_group(p, group) + kScalesAhead);
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

  int rows_, each_, done_ = 0;
  float* y_ = nullptr;
  int64_t y_stride_ = 0;
  const float* sums_ = nullptr;
  bool onto_ = false;
  const float* x_sums_ = nullptr;
  int64_t x_stride_ = 0;
  Vec scale_[2], shift_[2];
};

template <class Isa, class Tiles, template <class> class F>
class FewRowsProduct {
  using Format = F<Isa>;

 public:
  explicit FewRowsProduct(const MatmulArgs* args)
      : args_(args),
        order_(args, Format::kPairBytes),
        blocks_((args->rows + kTileRowsAmx - 1) / kTileRowsAmx),
        rows_(args->scratch + kFewRowsAt) {}

  void run() {
    sum_activations();
    Chunk here = order_.begin(), before = here;
    Unpacking<Isa, F>(unscaled(here), lines(0), 1).finish();
    int64_t i = 0;
    for (bool more = true; more; ++i) {
      Chunk next = here;
      more = order_.next(next);
      if (here.pair == 0 && here.first == here.slice) gather(here);
      multiply(i, here, more ? &next : nullptr, i > 0 ? &before : nullptr);
      before = here;
      here = next;
    }
    Folding<Isa, Format>(args_, &before, sums(i - 1), x_sums(), 1).finish();
  }

 private:
  uint8_t* lines(int64_t i) const { return args_->scratch + i % 2 * kFewLinesBytes; }
  float* sums(int64_t i) const {
    return reinterpret_cast<float*>(args_->scratch + 2 * kFewLinesBytes + i % 2 * kFewSumsBytes);
  }
  float* x_sums() const { return reinterpret_cast<float*>(args_->scratch + kFewShiftsAt); }
  const uint8_t* const* x() const { return reinterpret_cast<const uint8_t* const*>(args_->x_rows); }

  static PanelSlice unscaled(const Chunk& c) {
    PanelSlice slice{c.panels, c.first, c.last, c.ahead};
    slice.panels.scales.panel[0] = slice.panels.scales.panel[1] = nullptr;
    return slice;
  }

  void sum_activations() const {
    const WeightView& w = args_->weights;
    if (w.shift_offset)
      sum_groups<Isa, typename Isa::Lane>(x(), args_->rows, w.group, 0, w.padded_depth / w.group, x_sums());
  }

  void gather(const Chunk& c) {
    const int64_t left = args_->weights.padded_depth / 2 - c.slice;
    slice_steps_ = (order_.slice() < left ? order_.slice() : left) / 16;
    gather_rows<Isa>(x(), args_->rows, 4 * c.slice, slice_steps_, rows_);
  }

  void multiply(int64_t i, const Chunk& here, const Chunk* next, const Chunk* before) {
    const int64_t steps = (here.last - here.first) / 16, turns = steps * blocks_;
    const Chunk& unpacked = next ? *next : here;
    Unpacking<Isa, F> unpacking(unscaled(unpacked), lines(i + 1), turns);
    Folding<Isa, Format> folding(args_, before, sums(i + 1), x_sums(), turns);
    const auto between = [&] {
      if (next) unpacking.step();
      folding.step();
    };
    const uint8_t* const panels[2] = {lines(i), lines(i) + steps * 1024};
    const int64_t step = (here.first - here.slice) / 16;
    for (int b = 0; b < blocks_; ++b) {
      float* y = sums(i) + b * kTileRowsAmx * kPairColumns;
      const RowBlock a{rows_ + (b * 2 * slice_steps_ + step) * 1024, kCacheLine, 1024, slice_steps_ * 1024};
      if (args_->rows - b * kTileRowsAmx > 16)
        Tiles::template multiply<2>(a, panels, steps, y, kPairColumns, false, between);
      else
        Tiles::multiply_in_turn(turn_++ % 2, a, panels, steps, y, kPairColumns, between);
    }
    if (next) unpacking.finish();
    folding.finish();
  }

  const MatmulArgs* args_;
  const ChunkOrder order_;
  const int blocks_;
  uint8_t* rows_;  // of the slice, in tile order
  int64_t slice_steps_ = 0, turn_ = 0;
};

}  // namespace
}  // namespace tandem
