// Many rows on matrix tiles, for every format. Panels become bf16 lines with their group scales multiplied in, and
// blocks of 32 columns and 32 or 16 rows run over them. A scaled weight is rounded to bf16 once more, by way of 11 bits
// where scales are halves. The error is at most 1.25 * 2^-8 of the weight; with offsets, of the group's largest one.
//
//   slice of K            unless its rows lie at equal distances, they are gathered in tile order, 64 bytes of each
//                         after the other, so that a tile is up to 16 lines in a row
//     pair of panels      of this slice 32 KiB, which stay in L1 while rows are loaded past it
//       block of rows       2 x 2 or 1 x 2 tiles of sums over the slice; between the steps the next pair of panels is
//                           unpacked, or asked for into L2
//
// Up to 80 rows, if they fit its scratch, are left to tile_stream.h, few of 4-bit codes to tile_groups.h.
//
// Rows, sums and panels must nearly fit 1.5 MiB: L2 gives no more lines at its full speed. What else bounds a step, and
// what was tried: docs/lab/many-rows.md.
#pragma once

#include "micro/peak.h"
#include "micro/tile_groups.h"
#include "micro/tile_mm.h"
#include "micro/tile_stream.h"
#include "micro/tile_unpack.h"

namespace tandem {
namespace {

// Up to so many rows a block is one tile high, so products wait less for registers. Measured with 64 and 128 rows
// (docs/lab/many-rows.md).
constexpr int kOneTileRows = 160;
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
        each_(args->rows <= kOneTileRows ? 1 : 2),
        blocks_((tiles_.count + each_ - 1) / each_),
        in_place_(blocks_in_place(args)),
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
    const int of_block = each_ * tiles_.high, first = in_place_ * of_block;
    gather_rows<Isa>(reinterpret_cast<const uint8_t* const*>(args_->x_rows) + first, args_->rows - first,
                     4 * slice.first, (slice.last - slice.first) / 16, tiles_.high, of_block, gathered_);
  }

  TANDEM_INLINE TileRows rows_of(int block, const PanelSlice& slice) const {
    const int64_t of_block = each_ * tiles_.high, bytes = 4 * (slice.last - slice.first);
    if (block >= in_place_)
      return {gathered_ + (block - in_place_) * of_block * bytes, kCacheLine, of_block * kCacheLine};
    const uint8_t* const x = static_cast<const uint8_t*>(args_->x_rows[0]);
    return {x + block * of_block * args_->x_stride + 4 * slice.first, args_->x_stride, kCacheLine};
  }

  // Tiles are as high as each other, so the last one may have more rows than there are.
  int blocks_in_place(const MatmulArgs* args) const {
    if (!args->x_stride) return 0;
    const int fewer = tiles_.count * tiles_.high - args->rows > 0;
    return blocks_ - fewer;
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
      float* y = args_->y + b * each_ * tiles_.high * args_->y_stride + kPairColumns * (i % args_->pairs);
      const TileRows a = rows_of(b, slice);
      if (each_ == 2 && 2 * b + 1 < tiles_.count)
        Tiles::template multiply<2>(tiles_.high, a, panels, steps, y, args_->y_stride, slice.first > 0, between);
      else
        Tiles::template multiply<1>(tiles_.high, a, panels, steps, y, args_->y_stride, slice.first > 0, between);
    }
    if (more) side.finish();
  }

  const MatmulArgs* args_;
  const SliceOrder order_;
  const EvenTiles tiles_;
  const int each_;           // tiles of a block
  const int blocks_;         // of which
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

// Codes of 4 bits, 81 to 160 rows: two streams. Wider codes and three streams gain nothing
// (docs/lab/kernel-choices.md).
template <class Format>
constexpr bool kStreamsTwice = Format::kPairBytes == 16;

// Many rows. The tier's vector kernels are for few, and for float32 weights, which have no tiles.
template <class Isa, class Tiles, template <class> class F, Format kFormat>
constexpr void add_tiles(KernelTable& table) {
  FormatKernels& kernels = table.formats[int(kFormat)];
  kernels.tile_mm = tile_mm_amx<Isa, Tiles, F, has_groups(kFormat)>;
  kernels.part_rows = kStreamsTwice<F<Isa>> ? kStreamRows : 0;
  kernels.part_bytes = kMatmulScratchBytes - kStreamRowsAt;
}

#define TANDEM_TILES(name, F) add_tiles<Isa, Tiles, F, Format::name>(table);
template <class Isa, class Tiles>
constexpr KernelTable nibble_tiles(Tier tier) {
  KernelTable table{};
  table.tier = tier;
  TANDEM_NIBBLE_FORMATS(TANDEM_TILES)
  return table;
}

template <class Isa, class Tiles>
constexpr KernelTable small_tiles(Tier tier) {
  KernelTable table{};
  table.tier = tier;
  TANDEM_SMALL_FORMATS(TANDEM_TILES)
  return table;
}

template <class Isa, class Tiles>
constexpr KernelTable other_tiles(Tier tier) {
  KernelTable table{};
  table.tier = tier;
  TANDEM_OTHER_FORMATS(TANDEM_TILES)
  table.peak = tile_peak<Tiles>;
  return table;
}
#undef TANDEM_TILES

}  // namespace
}  // namespace tandem
