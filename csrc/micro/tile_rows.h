// Rows of activations in the order in which matrix tiles load them.
#pragma once

#include "abi/kernel_table.h"
#include "isa/inline.h"

namespace tandem {
namespace {

// Rows in as few tiles as they take, all of one height: 65 rows are 5 tiles of 13 and not of 16, 16, 16, 16 and 1.
struct EvenTiles {
  int count, high;

  TANDEM_INLINE explicit EvenTiles(int rows) : count((rows + 15) / 16), high((rows + count - 1) / count) {}
};

// Rows of one slice in tile order, `across` rows (of one tile or more) side by side, step after step of 32 k; zeros up
// to a whole tile. Some steps of all rows that lie side by side, then the next ones: what is written then stays in L1
// until it is whole. More steps at a time were slower, and so was asking for lines before (docs/lab/kernel-choices.md).
template <class Isa>
void gather_rows(const uint8_t* const* x, int rows, int64_t offset, int64_t steps, int high, int across, uint8_t* to) {
  using Lane = typename Isa::Lane;
  constexpr int64_t kSteps = 4;
  const int whole = (rows + high - 1) / high * high;
  const int64_t apart = int64_t{across} * kCacheLine;
  for (int first = 0; first < whole; first += across, to += steps * apart)
    for (int64_t begin = 0; begin < steps; begin += kSteps) {
      const int64_t end = begin + kSteps < steps ? begin + kSteps : steps;
      for (int r = first; r < first + across && r < whole; ++r) {
        uint8_t* const lines = to + (r - first) * kCacheLine;
        for (int64_t s = begin; s < end; ++s)
          if (r < rows)
            Lane::store_line(lines + s * apart, Lane::load_line(x[r] + offset + s * kCacheLine));
          else
            __builtin_memset(lines + s * apart, 0, kCacheLine);
      }
    }
}

// Equal slices of K, in multiples of `unit` pairs of k, at most `most` if that is a multiple; the last one may be
// shorter.
TANDEM_INLINE int64_t equal_slices(int64_t pairs, int64_t most, int64_t unit) {
  const int64_t slices = (pairs + most - 1) / most;
  return ((pairs + slices - 1) / slices + unit - 1) / unit * unit;
}

}  // namespace
}  // namespace tandem
