// Many rows on matrix tiles, for every format: panels become bf16 lines with their group scales multiplied in (rounded
// to bf16 once more: at most a relative 2^-8 per weight), and blocks of 32 rows x 32 columns run over them.
//
//   slice of K            its rows are gathered in tile order: 16 rows x 64 bytes one after the other, so that a tile
//   is
//     pair of panels        16 lines in a row and the lines of one column do not crowd one set of the cache
//       block of 32 rows  2 x 2 tiles of sums over the slice; between the steps the next pair of panels is unpacked
//
// Rows, sums and two pairs of unpacked panels stay in L2. Measured on a Xeon with 16 cores (peak 2.9 TFLOPS each, 220
// GB/s from DRAM, no more from L3), bf16, 512 rows x 256 columns of K = 7168: 2.2 TFLOPS a core from L2 without loading
// and storing sums, 2.0 with them, 1.84 with weights from DRAM, 1.24 with rows gathered too. What gathering costs is
// memory traffic: hiding its latency between the steps, or arranging all rows once and reading tiles from there, made
// whole layers slower by a tenth; twice the columns per gathered row made them faster.
//
// The same on a busy host, all variants in turn, medians of 16 workers (benchmarks/probes/amx_blocking.cc), TFLOPS:
//   14.0  2 x 2 tiles from L1 (registers alone, zeros: 40), in any order of loads; they were not yet zeroed after use
//   13.4  rows and panels in L2; 10.0 with sums, for 512 or 256 rows and slices of 256 or 512 k alike
//    9.0  weights from DRAM as well
//    7.6  rows gathered; 7.2 next slice prefetched, 7.2 copied between the blocks, 7.5 for 256 rows and slices of 512
//    8.4  rows arranged before, which whoever arranges them has to make up for: each is read by C / 512 tasks
// So a layer at 4096 tokens, 0.75 of that peak in bf16, had little to gain here; unpacking had (0.60 int4, 0.56 fp8).
// With scales loaded once per group, and lookups that scale fp8 and mxfp4, such a layer of 128 experts took, in ms and
// in turn: bf16 52.6, int4 56.2, fp8 55.3 (58.0 before), mxfp4 53.6 (58.1), int8 59.9 (61.8).
//
// What a layer of 4096 tokens loses (parts left out, in turn; tiles from L1 gave 21.6 TFLOPS that day), of the time,
// bf16 and int4 of Qwen3-30B's shape, then of DeepSeek-V3's: without gathering 0.85, 0.78, 0.83, 0.88; without sums in
// memory 0.92, 0.86, 0.75, 0.81; without both 0.69, 0.66, 0.65, 0.74; without unpacking (int4) 0.87, 0.91. Products
// alone, rows in L2: 14.7, 14.3, 18.5, 15.6 TFLOPS. Other blockings do not give that back: slices of up to the whole K,
// 64 to 512 rows and up to 64 pairs a task, so a third of the gathering and no sums, took 0.94 to 1.65 of the time,
// since panels then leave L1; other prefetches while gathering (none, 4 to 16 rows ahead, into L1 or L2) 0.98 to 1.10.
#pragma once

#include "micro/peak.h"
#include "micro/tile_few.h"
#include "micro/tile_groups.h"
#include "micro/tile_mm.h"
#include "micro/tile_unpack.h"

namespace tandem {
namespace {

constexpr int64_t kAmxDepthPairs = 256;  // of k per slice, at most
constexpr int64_t kAmxPanelBytes = 2 * kAmxDepthPairs * kCacheLine;
static_assert(2 * kAmxPanelBytes + kAmxRowBytes <= kMatmulScratchBytes);

// The call's slices in the order in which they are multiplied: all pairs of panels of a slice of K, then the next.
struct SliceOrder {
  const MatmulArgs* args;
  int64_t slice;
  int pair_bytes;

  TANDEM_INLINE int64_t count() const { return (args->weights.padded_depth / 2 + slice - 1) / slice * args->pairs; }
  TANDEM_INLINE const uint8_t* payload(int64_t i) const {
    const int64_t pair = args->first_pair + i % args->pairs;
    return args->weights.panels + pair * args->weights.pair_bytes + i / args->pairs * slice * pair_bytes;
  }
  PanelSlice at(int64_t i) const {
    const int64_t first = i / args->pairs * slice, depth = args->weights.padded_depth / 2;
    const uint8_t* after = i + 1 < count() ? payload(i + 1) : args->next_panel;
    return {pair_of_panels(args->weights, args->first_pair + i % args->pairs), first,
            first + slice < depth ? first + slice : depth, after ? after - payload(i) : 0};
  }
};

template <class Isa, class Tiles, template <class> class F>
class TileProduct {
  using Format = F<Isa>;

 public:
  explicit TileProduct(const MatmulArgs* args)
      : args_(args),
        order_{args, slice_pairs_of_rows(args->rows, args->weights.padded_depth / 2, kAmxDepthPairs, 16),
               Format::kPairBytes},
        blocks_((args->rows + kTileRowsAmx - 1) / kTileRowsAmx),
        rows_(args->scratch + 2 * kAmxPanelBytes) {}

  void run() {
    PanelSlice here = order_.at(0);
    if constexpr (Format::kPacked) Unpacking<Isa, F>(here, lines(0), 1).finish();
    for (int64_t i = 0, count = order_.count(); i < count; ++i) {
      const PanelSlice next = order_.at(i + 1 < count ? i + 1 : i);
      const int64_t steps = (here.last - here.first) / 16;
      if (i % args_->pairs == 0)
        gather_rows<Isa>(reinterpret_cast<const uint8_t* const*>(args_->x_rows), args_->rows, 4 * here.first, steps,
                         rows_);
      if constexpr (Format::kPacked) {
        Unpacking<Isa, F> side(next, lines(i + 1), blocks_ * steps);
        multiply(i, here, side, i + 1 < count);
      } else {
        Fetching<Isa> side(next, blocks_ * steps);
        multiply(i, here, side, i + 1 < count);
      }
      here = next;
    }
  }

 private:
  uint8_t* lines(int64_t i) const { return args_->scratch + i % 2 * kAmxPanelBytes; }

  template <class Side>
  void multiply(int64_t i, const PanelSlice& slice, Side& side, bool more) {
    const int64_t steps = (slice.last - slice.first) / 16;
    const uint8_t* panels[2];
    for (int p = 0; p < 2; ++p)
      panels[p] =
          Format::kPacked ? lines(i) + p * steps * 1024 : slice.panels.payload[p] + slice.first * Format::kPairBytes;
    for (int b = 0; b < blocks_; ++b) {
      float* y = args_->y + b * kTileRowsAmx * args_->y_stride + kPairColumns * (i % args_->pairs);
      const RowBlock a{rows_ + b * 2 * steps * 1024, kCacheLine, 1024, steps * 1024};
      const auto between = [&] {
        if (more) side.step();
      };
      if (args_->rows - b * kTileRowsAmx > 16)
        Tiles::template multiply<2>(a, panels, steps, y, args_->y_stride, slice.first > 0, between);
      else
        Tiles::template multiply<1>(a, panels, steps, y, args_->y_stride, slice.first > 0, between);
    }
    if (more) side.finish();
  }

  const MatmulArgs* args_;
  const SliceOrder order_;
  const int blocks_;
  uint8_t* rows_;  // of the slice, in tile order
};

template <class Isa, class Tiles, template <class> class F, bool kByGroups>
TANDEM_INLINE void run_tiles(const MatmulArgs* args) {
  if constexpr (kByGroups)
    if (takes_groups(args)) return GroupsProduct<Isa, Tiles, F>(args).run();
  if constexpr (F<Isa>::kScaled)
    if (takes_few_rows(args)) return FewRowsProduct<Isa, Tiles, F>(args).run();
  TileProduct<Isa, Tiles, F>(args).run();
}

template <class Isa, class Tiles, template <class> class F, bool kByGroups>
void tile_mm_amx(const MatmulArgs* args) {
  Tiles::begin(args->rows);
  run_tiles<Isa, Tiles, F, kByGroups>(args);
  Tiles::end();
  for (int p = 0; p < args->pairs; ++p)
    scale_rows<Isa, ScratchSource<typename Isa::Lane>>(pair_of_panels(args->weights, args->first_pair + p).row_scales,
                                                       args->y + kPairColumns * p, args->y_stride, args->rows);
}

// The tier's vector kernels for few rows, tiles for many. float32 weights have no tiles.
template <class Isa, class Tiles>
constexpr KernelTable make_amx_table(Tier tier, KernelTable vectors) {
  KernelTable table = vectors;
  table.tier = tier;
  table.blocking = kTileBlocking;
#define TANDEM_TILES(name, F) \
  table.formats[int(Format::name)].tile_mm = tile_mm_amx<Isa, Tiles, F, is_tiled_by_groups(Format::name)>;
  TANDEM_FORMATS(TANDEM_TILES)
#undef TANDEM_TILES
  table.peak = tile_peak<Tiles>;
  return table;
}

}  // namespace
}  // namespace tandem
