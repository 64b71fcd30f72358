// Many rows on matrix tiles, for every format: panels become bf16 lines with their group scales multiplied in (rounded
// to bf16 once more: at most a relative 2^-8 per weight), and blocks of 32 rows x 32 columns run over them.
#pragma once

#include "micro/peak.h"
#include "micro/tile_mm.h"

namespace tandem {
namespace {

constexpr int kTileRowsAmx = 32;  // rows of activations per block: two tiles
// Pairs of k per slice: the 16 KiB of a pair of panels stay in L1 (which two hyperthreads may share) while the rows
// stream over them from L2. 64 was slower in most runs, 256 no different.
constexpr int64_t kAmxDepthPairs = 128;

// Pairs [first, last) of K of one panel as bf16 lines, group scales multiplied in.
template <class Isa, class Format>
void unpack_scaled_panel(const uint8_t* payload, const Scales& scales, int which, int64_t first, int64_t last,
                         uint8_t* lines) {
  using Lane = typename Format::Lane;
  if (!scales.panel[which]) return unpack_panel<Isa, Format>(payload, first, last, lines);
  for (int64_t pair = first; pair < last;) {
    const int64_t group = pair / scales.pairs_per_group, end = (group + 1) * scales.pairs_per_group;
    const auto scale = load_scales<Isa>(scales.panel[which], scales.type, group);
    const auto offset = scales.shifts[which] ? load_scales<Isa>(scales.shifts[which], scales.type, group) : Isa::zero();
    for (const int64_t stop = end < last ? end : last; pair < stop; pair += Format::kPairsPerBlock) {
#pragma GCC unroll 4
      for (int index = 0; index < Format::kPairsPerBlock; ++index, lines += kCacheLine) {
        const auto decoded = Format::decode(payload + pair * Format::kPairBytes, index);
        Lane::store_line(lines, Isa::scale_line(decoded.line[0], scale, offset));
      }
    }
  }
}

template <class Isa, class Format>
TANDEM_INLINE ScratchSource<typename Format::Lane> scaled_slice_of(const PairOfPanels& panels, int64_t first,
                                                                   int64_t last, uint8_t* scratch) {
  if constexpr (Format::kPacked) {
    const int64_t bytes = (last - first) * kCacheLine;
    for (int p = 0; p < 2; ++p)
      unpack_scaled_panel<Isa, Format>(panels.payload[p], panels.scales, p, first, last, scratch + p * bytes);
    return {{scratch, scratch + bytes}};
  } else {
    return slice_of<Isa, Format>(panels, first, last, scratch);
  }
}

// Rows that lie equally spaced are used in place; others are gathered tile by tile: each of the
// pairs that follow then reads one stream.
TANDEM_INLINE RowBlock row_block(const uint8_t* const* x, int rows, int64_t offset, int64_t bytes, uint8_t* scratch) {
  const int64_t stride = rows > 1 ? x[1] - x[0] : 0;
  bool in_place = rows % 16 == 0;
  for (int r = 1; in_place && r < rows; ++r) in_place = x[r] - x[r - 1] == stride;
  if (in_place) return {x[0] + offset, stride, kCacheLine, 16 * stride};
  const int whole = (rows + 15) / 16 * 16;
  const int64_t step = whole * kCacheLine;
  for (int r = 0; r < whole; ++r)
    for (int64_t s = 0; s * kCacheLine < bytes; ++s) {
      uint8_t* to = scratch + s * step + r * kCacheLine;
      if (r < rows)
        __builtin_memcpy(to, x[r] + offset + s * kCacheLine, kCacheLine);
      else
        __builtin_memset(to, 0, kCacheLine);
    }
  return {scratch, kCacheLine, step, 16 * kCacheLine};
}

// Equal slices of K, rounded up to whole tiles; the last one may be shorter.
TANDEM_INLINE int64_t amx_slice_pairs(const WeightView& w) {
  const int64_t pairs = w.padded_depth / 2, slices = (pairs + kAmxDepthPairs - 1) / kAmxDepthPairs;
  return ((pairs + slices - 1) / slices + 15) / 16 * 16;
}

template <class Isa, class Tiles, template <class> class F>
void tile_mm_amx(const MatmulArgs* args) {
  using Format = F<Isa>;
  constexpr int kMaxBlocks = kMaxRowsPerCall / kTileRowsAmx;
  constexpr int64_t kPanelScratch = 2 * kAmxDepthPairs * kCacheLine;
  static_assert(kPanelScratch + kMaxRowsPerCall * 4 * kAmxDepthPairs <= kMatmulScratchBytes);
  const WeightView& w = args->weights;
  const uint8_t* const* x = reinterpret_cast<const uint8_t* const*>(args->x_rows);
  const int64_t depth = w.padded_depth / 2, slice = amx_slice_pairs(w);
  const int blocks = (args->rows + kTileRowsAmx - 1) / kTileRowsAmx;
  Tiles::begin();
  for (int64_t first = 0; first < depth; first += slice) {
    const int64_t last = first + slice < depth ? first + slice : depth, bytes = 4 * (last - first);
    RowBlock a[kMaxBlocks];
    for (int b = 0; b < blocks; ++b) {
      const int r = b * kTileRowsAmx, rows = args->rows - r < kTileRowsAmx ? args->rows - r : kTileRowsAmx;
      a[b] = row_block(x + r, rows, 4 * first, bytes, args->scratch + kPanelScratch + r * bytes);
    }
    for (int p = 0; p < args->pairs; ++p) {
      const auto source =
          scaled_slice_of<Isa, Format>(pair_of_panels(w, args->first_pair + p), first, last, args->scratch);
      prefetch_after<Isa, Format>(args, p, first, last);
      for (int b = 0; b < blocks; ++b) {
        float* y = args->y + b * kTileRowsAmx * args->y_stride + kPairColumns * p;
        const int64_t steps = (last - first) / 16;
        if (args->rows - b * kTileRowsAmx > 16)
          Tiles::template multiply<2>(a[b], source.panel, steps, y, args->y_stride, first > 0);
        else
          Tiles::template multiply<1>(a[b], source.panel, steps, y, args->y_stride, first > 0);
      }
    }
  }
  Tiles::end();
  for (int p = 0; p < args->pairs; ++p)
    scale_rows<Isa>(pair_of_panels(w, args->first_pair + p).row_scales, args->y + kPairColumns * p, args->y_stride,
                    args->rows);
}

// The tier's vector kernels for few rows, tiles for many. float32 weights have no tiles.
template <class Isa, class Tiles>
constexpr KernelTable make_amx_table(Tier tier, KernelTable vectors) {
  KernelTable table = vectors;
  table.tier = tier;
  table.formats[int(Format::bf16)].tile_mm = tile_mm_amx<Isa, Tiles, Bf16Format>;
  table.formats[int(Format::int8)].tile_mm = tile_mm_amx<Isa, Tiles, Int8Format>;
  table.formats[int(Format::int4)].tile_mm = tile_mm_amx<Isa, Tiles, Int4Format>;
  table.formats[int(Format::fp8)].tile_mm = tile_mm_amx<Isa, Tiles, Fp8Format>;
  table.formats[int(Format::fp4)].tile_mm = tile_mm_amx<Isa, Tiles, Fp4Format>;
  table.peak = tile_peak<Tiles>;
  table.formats[int(Format::uint4)].tile_mm = tile_mm_amx<Isa, Tiles, Uint4Format>;
  return table;
}

}  // namespace
}  // namespace tandem
