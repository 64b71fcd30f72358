// Many rows on matrix tiles, for every format: panels become bf16 lines with their group scales multiplied in (rounded
// to bf16 once more, by way of 11 bits where scales are multiplied in as halves: at most a relative 1.25 * 2^-8, with
// offsets of the group's largest weight), and blocks of 32 rows x 32 columns run over them.
//
//   slice of K            unless its rows lie at equal distances, they are gathered in tile order, 64 bytes of each
//                         after the other, so that a tile is up to 16 lines in a row
//     pair of panels      of this slice 32 KiB, which stay in L1 while rows are loaded past it
//       two tiles of rows   2 x 2 tiles of sums over the slice; between the steps the next pair of panels is unpacked,
//                           and the next step's weights are asked for into L1: a busy hyperthread may have taken it
//
// Up to 80 rows, if they fit its scratch, are left to tile_stream.h, few of 4-bit codes to tile_groups.h.
//
// What a step of 2 x 2 tiles and 32 k takes, ns, beside somebody else's busy hyperthread, and on a core of one's own (a
// Xeon, 16 threads; benchmarks/results/2026-11-23-xeon-probes-many-rows.json):
//   70   29   all in L1: 4 products of 16 cycles, or half as fast where the other one multiplies, too
//   73   29   rows from up to 1 MiB of L2, weights of 16 KiB in L1
//   83   42   weights of 64 KiB, from L2, asked for a step ahead
//   84   42   all in L1, but sums loaded and stored every 8 steps (73 and 32: every 32)
// L2 gives a line in 0.5 to 0.7 ns up to 1.5 MiB, L3 in 3; so rows, sums and panels must fit these 1.5 MiB, or nearly.
//
// This code on 16 threads, weights from memory, rows out of 4096, 16 pairs of panels a call (probes/many_rows.cc;
// 2026-11-23-xeon-probes-slices.json): the fastest tenth of threads, the median, and what all do together.
//   bf16, K = 7168, 256 rows   57   102    87   and    51    96    77 where rows lie at equal distances
//   int4                       64   100    89          59   100    85
//   int4, K = 2048             63    92    86          57    96    80
// Slices of 1024 k with rows loaded into L1, in turn, took the fastest thread 1.06 to 1.22 times as long, the median
// 0.97 to 1.01; of 512 k with rows loaded into L1 1.02 to 1.24 and 1.03 to 1.08; loaded past it, of 384 and 768 k 0.88
// to 1.16 and 0.95 to 1.06. Layers of 256 to 4096 tokens went to 0.91 to 1.02 of the time, 0.96 in the median.
//
// Without some of its parts, on cores of one's own (ns a step, the fastest thread of one call, bf16, K = 2048;
// 2026-11-23-xeon-probes-parts-of-a-step.json): 55 in all; 50 if no weights come from memory, 49 if rows are gathered
// once for all slices, 45 if sums are neither loaded nor stored; 34 without all three; tiles from L1 29
// (many-rows.json). Of a layer's time 92 to 94 % (DeepSeek-V3's shape, 1024 and 4096 tokens) and 82 to 85 %
// (Qwen3-30B's, 4096) pass here.
//
// What was tried beside this, time of a layer of 256 to 4096 tokens in turn, and of most also for Qwen3-30B's shape:
//   slices          2048 k and the whole K 0.93 to 1.65
//   tasks           64 to 256 rows, or 8 to 64 pairs of panels 0.93 to 1.5 (32 pairs of 256 rows 0.92 to 1.13, and in
//                   another turn 0.95 to 1.06; of 64 and 128 rows 0.94 to 1.01: this is done; from 9
//                   rows an expert on 0.95 to 1.05);
//                   smaller ones at the end 0.93 to 1.03
//   gathering       between the steps 1.1; once for all, and tiles from there 1.1; asked for 4 to 16 rows ahead 0.98 to
//                   1.10; the next slice's asked for into L2 meanwhile 0.97 to 1.10
//   sums            in tile order up to the last slice 0.95 to 1.10; added by vectors 1.0; the next ones asked for 1.0
//                   to 1.1; stored between the next block's first products 0.97 to 1.0 (in a loop); the two tiles of
//                   rows 2 or 4 steps apart, so that their sums change in turn, 0.96 to 1.03 (in a loop)
//   results         activated, or stored past the caches, between the last slice's products 0.97 to 1.23
//   rows            the next ones asked for, 2 or 4 steps ahead 1.05 to 1.2; copied once in the order of experts and
//                   loaded from there 0.93 to 1.21 (the old build against itself 0.91 to 1.27)
//   weights         asked for twice, two slices ahead, by hints T0, T2 or to be written, every second line, 16 lines at
//                   a time, not while the first block passes 0.97 to 1.1 (in a loop, the fastest thread); not at all
//                   1.07 to 1.12, loaded ahead 1.2 to 1.4, by NTA 1.7 to 1.8
//   panels          asked for only while the first block passes 0.98 to 1.03; never 0.88 to 0.96 (in a loop,
//                   the fastest thread of one call; all together 0.89 to 0.99): layers were not timed yet
//   unpacking       after each product instead of each step 0.96 to 1.04; it takes 9 to 13 % of the time (int4)
#pragma once

#include "micro/peak.h"
#include "micro/tile_groups.h"
#include "micro/tile_mm.h"
#include "micro/tile_stream.h"
#include "micro/tile_unpack.h"

namespace tandem {
namespace {

constexpr int64_t kAmxDepthPairs = 256;  // of k per slice, at most
constexpr int64_t kAmxPanelBytes = 2 * kAmxDepthPairs * kCacheLine;
constexpr int64_t kAmxRowBytes = 4 * kAmxDepthPairs * kMaxRowsPerCall;
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
        order_{args, equal_slices(args->weights.padded_depth / 2, kAmxDepthPairs, 16), Format::kPairBytes},
        tiles_(args->rows),
        blocks_((tiles_.count + 1) / 2),
        in_place_(blocks_in_place(args, tiles_)),
        gathered_(args->scratch + 2 * kAmxPanelBytes) {}

  void run() {
    Tiles::begin(tiles_.high);
    PanelSlice here = order_.at(0);
    if constexpr (Format::kPacked) Unpacking<Isa, F>(here, lines(0), 1).finish();
    for (int64_t i = 0, count = order_.count(); i < count; ++i) {
      const PanelSlice next = order_.at(i + 1 < count ? i + 1 : i);
      const int64_t steps = (here.last - here.first) / 16;
      if (i % args_->pairs == 0) gather(here);
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

  // A slice's rows but those that are loaded where they lie.
  void gather(const PanelSlice& slice) const {
    const int first = in_place_ * 2 * tiles_.high;
    gather_rows<Isa>(reinterpret_cast<const uint8_t* const*>(args_->x_rows) + first, args_->rows - first,
                     4 * slice.first, (slice.last - slice.first) / 16, tiles_.high, 2 * tiles_.high, gathered_);
  }

  TANDEM_INLINE TileRows rows_of(int block, const PanelSlice& slice) const {
    const int64_t of_block = 2 * tiles_.high, bytes = 4 * (slice.last - slice.first);
    if (block >= in_place_)
      return {gathered_ + (block - in_place_) * of_block * bytes, kCacheLine, of_block * kCacheLine};
    const uint8_t* const x = static_cast<const uint8_t*>(args_->x_rows[0]);
    return {x + block * of_block * args_->x_stride + 4 * slice.first, args_->x_stride, kCacheLine};
  }

  // Tiles are as high as each other, so the last one may have more rows than there are.
  static int blocks_in_place(const MatmulArgs* args, const EvenTiles& tiles) {
    if (!args->x_stride) return 0;
    const int fewer = tiles.count * tiles.high - args->rows > 0;
    return (tiles.count + 1) / 2 - fewer;
  }

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
      const TileRows a = rows_of(b, slice);
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
  const int blocks_;         // of two tiles, of which
  const int in_place_;       // ... these are loaded where they lie, and
  uint8_t* const gathered_;  // ... the others' rows of the slice are here, in tile order
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

// Codes of 4 bits, 81 to 160 rows: two streams. Of 65 to 128 rows, of at most 64 each, they took 0.79 to 0.91 of the
// time, in turn with one TileProduct (int4, mxfp4, 256 and 384 tokens of DeepSeek-V3's shape, 1024 and 1536 of
// Qwen3-30B's); of 128 rows in the mean, of at most 80 each instead of 64, 0.94 (int4, 512 and 2048 tokens). Codes of 8
// bits as two streams 0.97 to 1.05; three streams of 4 bits, for 161 to 240 rows, 1.02 to 1.08.
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
  table.formats[int(Format::name)].part_bytes = kMatmulScratchBytes - kStreamRowsAt;
  TANDEM_FORMATS(TANDEM_TILES)
#undef TANDEM_TILES
  table.peak = tile_peak<Tiles>;
  return table;
}

}  // namespace
}  // namespace tandem
