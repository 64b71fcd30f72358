// Rows of activations in the order in which matrix tiles load them.
#pragma once

#include "abi/kernel_table.h"
#include "isa/inline.h"

namespace tandem {
namespace {

constexpr int64_t kAmxRowBytes = 1 << 20;  // of gathered rows: many take shorter slices; measured in tile_amx.h
static_assert(kAmxRowBytes / (4 * kMaxRowsPerCall) >= 16);

// Rows in as few tiles as they take, all of one height: 65 rows are 5 tiles of 13 and not of 16, 16, 16, 16 and 1.
struct EvenTiles {
  int count, high;

  TANDEM_INLINE explicit EvenTiles(int rows) : count((rows + 15) / 16), high((rows + count - 1) / count) {}
};

// Rows of one slice in tile order, `across` rows (a tile's, or two tiles') side by side, step after step of 32 k; zeros
// up to a whole tile.
template <class Isa>
void gather_rows(const uint8_t* const* x, int rows, int64_t offset, int64_t steps, int high, int across, uint8_t* to) {
  using Lane = typename Isa::Lane;
  const int whole = (rows + high - 1) / high * high;
  const int64_t apart = int64_t{across} * kCacheLine;
  for (int r = 0; r < whole; ++r) {
    uint8_t* line = to + r / across * steps * apart + r % across * kCacheLine;
    const uint8_t* next = r + 2 < rows ? x[r + 2] + offset : nullptr;  // rows are short and lie anywhere
    for (int64_t s = 0; s < steps; ++s, line += apart) {
      if (r >= rows) {
        __builtin_memset(line, 0, kCacheLine);
        continue;
      }
      if (next) Isa::prefetch(next + s * kCacheLine);
      Lane::store_line(line, Lane::load_line(x[r] + offset + s * kCacheLine));
    }
  }
}

// Equal slices of K that so many rows can be gathered of, in multiples of `unit`, at most `most` pairs of k if that is
// a multiple; the last one may be shorter.
TANDEM_INLINE int64_t slice_pairs_of_rows(int rows, int64_t pairs, int64_t most, int64_t unit) {
  const int64_t whole = (rows + 31) / 32 * 32, by_rows = kAmxRowBytes / (4 * whole) / unit * unit;
  const int64_t each = by_rows < most ? by_rows : most, slices = (pairs + each - 1) / each;
  return ((pairs + slices - 1) / slices + unit - 1) / unit * unit;
}

}  // namespace
}  // namespace tandem
