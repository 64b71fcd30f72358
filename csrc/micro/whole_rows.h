// Weights in whole rows, as a checkpoint has them. 16 rows at a time become the lines of a panel, in cache. They are
// multiplied as a packed panel's lines are, in the same order of sums: results have the same bits.
//
// A row is a stream of its own, and 32 of them are more than hardware follows. So all is prefetched by hand, into L2:
// rows that lie a multiple of 4 KiB apart share one set of L1. A line is loaded once.
#pragma once

#include "micro/block.h"

namespace tandem {
namespace {

constexpr int64_t kBlockPairs = 16;              // of k, that rows become lines at a time
constexpr int64_t kRowsPairs = 4 * kBlockPairs;  // of k, between two passes over the rows of activations

// Pairs [first, last) of k of 16 rows, to lines.
template <class Isa>
void unpack_rows(const uint8_t* rows, int64_t row_bytes, int64_t first, int64_t last, uint8_t* lines) {
  using Lane = typename Isa::Lane;
  for (int64_t pair = first; pair < last; pair += kBlockPairs) {
    const uint8_t* here = rows + pair * Bf16RowsFormat<Isa>::kPairBytes;
    if constexpr (Lane::kType == DType::bf16) {
      Isa::interleave(here, row_bytes, lines);
      lines += kBlockPairs * kCacheLine;
    } else {
      alignas(64) uint8_t block[kBlockPairs * kCacheLine];
      Isa::interleave(here, row_bytes, block);
      for (int i = 0; i < kBlockPairs; ++i) {
        const auto decoded = Isa::decode_bf16(block + i * kCacheLine);
        for (int line = 0; line < Lane::kLinesPerPair; ++line, lines += kCacheLine)
          Lane::store_line(lines, decoded.line[line]);
      }
    }
  }
}

// Asks for pairs [first, last) of k of a panel's rows.
template <class Isa>
TANDEM_INLINE void prefetch_rows(const uint8_t* rows, int64_t row_bytes, int64_t first, int64_t last) {
  for (int r = 0; r < kPanelRows; ++r, rows += row_bytes)
    for (int64_t at = 4 * first; at < 4 * last; at += kCacheLine) Isa::prefetch_l2(rows + at);
}

// One pair of panels whose rows are whole, and what is read after it.
struct PairOfRows {
  PairOfPanels panels;
  const uint8_t* next[2];
};

TANDEM_INLINE PairOfRows pair_of_rows(const MatmulArgs* args, int p) {
  const WeightView& w = args->weights;
  const PairOfPanels panels = pair_of_panels(w, args->first_pair + p);
  const uint8_t* following = panels.payload[0] + w.pair_bytes;
  const uint8_t* next = p + 1 < args->pairs || !args->next_panel ? following : args->next_panel;
  return {panels, {next, next + w.second}};
}

// A slice of a pair's rows to lines in the scratch, while the slice after it is asked for.
template <class Isa>
TANDEM_INLINE void unpack_slice(const PairOfRows& pair, int64_t first, int64_t last, int64_t depth, uint8_t* scratch) {
  const int64_t bytes = (last - first) * Isa::Lane::kLinesPerPair * kCacheLine;
  const int64_t size = last - first, row_bytes = pair.panels.row_bytes;
  for (int p = 0; p < 2; ++p) {
    if (last < depth)
      prefetch_rows<Isa>(pair.panels.payload[p], row_bytes, last, last + size < depth ? last + size : depth);
    else
      prefetch_rows<Isa>(pair.next[p], row_bytes, 0, kRowsPairs < depth ? kRowsPairs : depth);
    unpack_rows<Isa>(pair.panels.payload[p], row_bytes, first, last, scratch + p * bytes);
  }
}

// Few rows of activations: a pair of panels is read from end to end before the next one.
template <class Isa>
void dot_whole_rows(const MatmulArgs* args) {
  using Lane = typename Isa::Lane;
  constexpr int kPanels = Isa::kTilePanels == 1 ? 1 : 2, kRows = kRowsBeside<Isa, kPanels>;
  using Source = ScratchSource<Lane, kPanels>;
  const uint8_t* const* x = reinterpret_cast<const uint8_t* const*>(args->x_rows);
  const int64_t depth = args->weights.padded_depth / 2;
  const int step = rows_per_block<kRows>(args->rows);
  const Scales none{};
  for (int p = 0; p < args->pairs; ++p) {
    const PairOfRows pair = pair_of_rows(args, p);
    for (int64_t first = 0; first < depth; first += kRowsPairs) {
      const int64_t last = first + kRowsPairs < depth ? first + kRowsPairs : depth;
      const int64_t bytes = (last - first) * Lane::kLinesPerPair * kCacheLine;
      unpack_slice<Isa>(pair, first, last, depth, args->scratch);
      for (int q = 0; q < 2; q += kPanels) {
        Source source{{args->scratch + q * bytes}};
        if constexpr (kPanels == 2) source.panel[1] = args->scratch + bytes;
        float* y = args->y + kPairColumns * p + kPanelRows * q;
        for (int r = 0; r < args->rows; r += step)
          block_of<Isa, Source, false, kRows>(args->rows - r < step ? args->rows - r : step, source, first, x + r,
                                              first, last, &none, y + r * args->y_stride, args->y_stride);
      }
    }
  }
}

}  // namespace
}  // namespace tandem
