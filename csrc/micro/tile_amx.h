// Many rows on matrix tiles, for every format: panels become bf16 lines with their group scales multiplied in (rounded
// to bf16 once more: at most a relative 2^-8 per weight), and blocks of 32 rows x 32 columns run over them.
#pragma once

#include "micro/tile_mm.h"

namespace tandem {
namespace {

constexpr int kTileRowsAmx = 32;  // rows of activations per block: two tiles

template <class Isa, class Format>
void unpack_scaled_panel(const uint8_t* payload, const Scales& scales, int which, int64_t first, int64_t last,
                         uint8_t* lines) {
  using Lane = typename Format::Lane;
  if (!scales.panel[which]) return unpack_panel<Isa, Format>(payload, first, last, lines);
  for (int64_t pair = first; pair < last; pair += scales.pairs_per_group) {
    const auto scale = load_scales<Isa>(scales.panel[which], scales.type, pair / scales.pairs_per_group);
    uint8_t* group = lines + (pair - first) * kCacheLine;
    unpack_panel<Isa, Format>(payload, pair, pair + scales.pairs_per_group, group);
    for (int64_t i = 0; i < scales.pairs_per_group; ++i)
      Lane::store_line(group + i * kCacheLine, Isa::scale_line(Lane::load_line(group + i * kCacheLine), scale));
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

struct RowBlock {
  const uint8_t* data;
  int64_t stride;
};

// Tiles are loaded with one stride: rows that lie equally spaced are used in place, others are copied together.
TANDEM_INLINE RowBlock row_block(const uint8_t* const* x, int rows, int64_t offset, int64_t bytes, uint8_t* scratch) {
  const int64_t stride = rows > 1 ? x[1] - x[0] : bytes;
  bool in_place = rows % 16 == 0;
  for (int r = 1; in_place && r < rows; ++r) in_place = x[r] - x[r - 1] == stride;
  if (in_place) return {x[0] + offset, stride};
  const int whole = (rows + 15) / 16 * 16;
  for (int r = 0; r < rows; ++r) __builtin_memcpy(scratch + r * bytes, x[r] + offset, uint64_t(bytes));
  __builtin_memset(scratch + rows * bytes, 0, uint64_t((whole - rows) * bytes));
  return {scratch, bytes};
}

template <class Isa, class Tiles, template <class> class F>
void tile_mm_amx(const MatmulArgs* args) {
  using Format = F<Isa>;
  // A slice of a pair takes half of what it takes with float lanes: the other half of the scratch is for rows.
  constexpr int64_t kPairScratch = kMatmulScratchBytes / 2 / kMaxPairsPerCall;
  const WeightView& w = args->weights;
  const uint8_t* const* x = reinterpret_cast<const uint8_t* const*>(args->x_rows);
  uint8_t* row_scratch = args->scratch + kMatmulScratchBytes / 2;
  const int64_t depth = w.padded_depth / 2, slice = slice_pairs(w);
  Tiles::begin();
  for (int64_t first = 0; first < depth; first += slice) {
    const int64_t last = first + slice < depth ? first + slice : depth;
    ScratchSource<typename Format::Lane> sources[kMaxPairsPerCall];
    for (int p = 0; p < args->pairs; ++p)
      sources[p] = scaled_slice_of<Isa, Format>(pair_of_panels(w, args->first_pair + p), first, last,
                                                args->scratch + p * kPairScratch);
    for (int r = 0; r < args->rows; r += kTileRowsAmx) {
      const int rows = args->rows - r < kTileRowsAmx ? args->rows - r : kTileRowsAmx;
      const RowBlock a = row_block(x + r, rows, 4 * first, 4 * (last - first), row_scratch);
      for (int p = 0; p < args->pairs; ++p) {
        float* y = args->y + r * args->y_stride + kPairColumns * p;
        const int64_t steps = (last - first) / 16;
        if (rows > 16)
          Tiles::template multiply<2>(a.data, a.stride, sources[p].panel, steps, y, args->y_stride, first > 0);
        else
          Tiles::template multiply<1>(a.data, a.stride, sources[p].panel, steps, y, args->y_stride, first > 0);
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
  return table;
}

}  // namespace
}  // namespace tandem
