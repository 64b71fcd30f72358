// Many rows on matrix tiles, for every format: panels become bf16 lines with their group scales multiplied in (rounded
// to bf16 once more, by way of 11 bits where scales are multiplied in as halves: at most a relative 1.25 * 2^-8, with
// offsets of the group's largest weight), and blocks of 32 rows x 32 columns run over them.
//
//   slice of K            its rows are gathered in tile order, 64 bytes of each after the other, so that a tile is up
//                         to 16 lines in a row and the lines of one column do not crowd one set of the cache
//     pair of panels
//       two tiles of rows   2 x 2 tiles of sums over the slice; between the steps the next pair of panels is unpacked,
//                           and the next step's weights are asked for into L1
//
// Up to 64 rows, if they fit its scratch, are left to tile_stream.h, few of 4-bit codes to tile_groups.h.
//
// Rows, sums and two pairs of unpacked panels of up to 2 MiB in all lie in L2, or nearly. Measured on a Xeon with 16
// cores (peak 2.9 TFLOPS each, 220 GB/s from DRAM, no more from L3), bf16, 512 rows x 256 columns of K = 7168: 2.2
// TFLOPS a core from L2 without loading and storing sums, 2.0 with them, 1.84 with weights from DRAM, 1.24 with rows
// gathered too. What gathering costs is memory traffic: hiding its latency between the steps, or arranging all rows
// once and reading tiles from there, made whole layers slower by a tenth; twice the columns per gathered row made them
// faster.
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
// alone, rows in L2: 14.7, 14.3, 18.5, 15.6 TFLOPS. Other blockings did not give that back: slices of up to the whole
// K, 64 to 512 rows and up to 64 pairs a task, so a third of the gathering and no sums, took 0.94 to 1.65 of the time,
// since panels then leave L1; other prefetches while gathering (none, 4 to 16 rows ahead, into L1 or L2) 0.98 to 1.10.
// Nor do these, in turn: the next rows asked for into L1 2 or 4 steps ahead 1.05 to 1.2 (48 to 256 rows, weights in
// L2), the next sums 1.0 to 1.1, both and slices of 256 k 1.1 to 1.4; sums in tile order 0.95 to 1.01; intermediate
// activations read where they lie, a row of tiles 0.94 to 0.97.
//
// Rows of 1 MiB instead of 256 KiB, so slices of 1024 k, and weights asked for a step ahead: 0.84 to 1.03 of the time,
// 0.96 in the mean (q3, ds3, bf16 and int4, 256 to 4096 tokens, in turn). No better: slices of 2048 k or 128 to 256
// rows a task (0.93 to 1.19), unpacking after each product instead of each step (0.96 to 1.04), tasks of a quarter of
// the size at the end (0.93 to 1.03). Parts of 32 rows for tile_stream.h, so that weights are unpacked once for each:
// mxfp4 with 64 rows an expert 0.81, int4 1.00, fp8 1.42, bf16 1.65, with 256 rows 1.5 to 3.3; 64 rows in one call, so
// that each pair of panels comes from L2 the second time: mxfp4 0.95, int4 1.06, nvfp4 1.08, fp8 1.31.
//
// Phase 2 alone in a loop, rows and weights from DRAM, of what tiles gave from L1 (18 to 26 TFLOPS on those hosts),
// 1024 rows an expert, K = 7168: 0.44 to 0.58 in every such arrangement; with rows that stay in L2 0.55 to 0.71,
// without sums 0.70 to 0.78, with weights in L1, too (slices of 256 k) 0.83 to 0.86. 64 rows, int8: 0.33 to 0.42 in all
// of 8 arrangements; rows that stay in L2, weights unpacked in L1 and no sums 0.46 to 0.55. All in L1, 16 lines of int4
// unpacked a step cost nothing: 62 ns a step, 69 without, on a core that is shared, 38 and 29 on one's own
// (benchmarks/results/2026-11-22-xeon-probes-many-rows.json). So what is left is what passes between L2 and L1: 32
// lines of rows a step, and sums.
#pragma once

#include "micro/peak.h"
#include "micro/tile_groups.h"
#include "micro/tile_mm.h"
#include "micro/tile_stream.h"
#include "micro/tile_unpack.h"

namespace tandem {
namespace {

constexpr int64_t kAmxDepthPairs = 512;  // of k per slice, at most
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
        tiles_(args->rows),
        blocks_((tiles_.count + 1) / 2),
        rows_(args->scratch + 2 * kAmxPanelBytes) {}

  void run() {
    Tiles::begin(tiles_.high);
    PanelSlice here = order_.at(0);
    if constexpr (Format::kPacked) Unpacking<Isa, F>(here, lines(0), 1).finish();
    for (int64_t i = 0, count = order_.count(); i < count; ++i) {
      const PanelSlice next = order_.at(i + 1 < count ? i + 1 : i);
      const int64_t steps = (here.last - here.first) / 16;
      if (i % args_->pairs == 0)
        gather_rows<Isa>(reinterpret_cast<const uint8_t* const*>(args_->x_rows), args_->rows, 4 * here.first, steps,
                         tiles_.high, 2 * tiles_.high, rows_);
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
    const auto between = [&] {
      if (more) side.step();
    };
    for (int b = 0; b < blocks_; ++b) {
      float* y = args_->y + b * 2 * tiles_.high * args_->y_stride + kPairColumns * (i % args_->pairs);
      const uint8_t* a = rows_ + b * steps * 2 * tiles_.high * kCacheLine;
      if (2 * b + 1 < tiles_.count)
        Tiles::template multiply<2>(tiles_.high, a, panels, steps, y, args_->y_stride, slice.first > 0, between);
      else
        Tiles::template multiply<1>(tiles_.high, a, panels, steps, y, args_->y_stride, slice.first > 0, between);
    }
    if (more) side.finish();
  }

  const MatmulArgs* args_;
  const SliceOrder order_;
  const EvenTiles tiles_;
  const int blocks_;  // of two tiles
  uint8_t* rows_;     // of the slice, in tile order
};

template <class Isa, class Tiles, template <class> class F, bool kByGroups>
void multiply_on_tiles(const MatmulArgs* args) {
  if constexpr (kByGroups)
    if (takes_groups(args)) return GroupsProduct<Isa, Tiles, F>(args).run();
  if (takes_stream(args)) return StreamProduct<Isa, Tiles, F>(args).run();
  TileProduct<Isa, Tiles, F>(args).run();
}

template <class Isa, class Tiles, template <class> class F, bool kByGroups>
void tile_mm_amx(const MatmulArgs* args) {
  multiply_on_tiles<Isa, Tiles, F, kByGroups>(args);
  Tiles::end();
  for (int p = 0; p < args->pairs; ++p)
    scale_rows<Isa, ScratchSource<typename Isa::Lane>>(pair_of_panels(args->weights, args->first_pair + p).row_scales,
                                                       args->y + kPairColumns * p, args->y_stride, args->rows);
}

// Codes of 4 bits, 65 to 128 rows: two streams in 0.79 to 0.91 of the time, in turn with one TileProduct (int4, mxfp4,
// 256 and 384 tokens of DeepSeek-V3's shape, 1024 and 1536 of Qwen3-30B's); where most experts had 128 rows and more,
// 0.97 to 1.02; codes of 8 bits 0.95 to 1.09.
template <class Format>
constexpr bool kStreamsTwice = Format::kPairBytes == 16;

// The tier's vector kernels for few rows, tiles for many. float32 weights have no tiles.
template <class Isa, class Tiles>
constexpr KernelTable make_amx_table(Tier tier, KernelTable vectors) {
  KernelTable table = vectors;
  table.tier = tier;
  table.blocking = kTileBlocking;
#define TANDEM_TILES(name, F)                                                                      \
  table.formats[int(Format::name)].tile_mm = tile_mm_amx<Isa, Tiles, F, has_groups(Format::name)>; \
  table.formats[int(Format::name)].part_rows = kStreamsTwice<F<Isa>> ? kStreamRows : 0;            \
  table.formats[int(Format::name)].parts_to_rows = kStreamsTwice<F<Isa>> ? 2 * kStreamRows : 0;
  TANDEM_FORMATS(TANDEM_TILES)
#undef TANDEM_TILES
  table.peak = tile_peak<Tiles>;
  return table;
}

}  // namespace
}  // namespace tandem
