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
// until it is whole. Rows in L3, 16 threads of a Xeon, ns a line: 64 rows of K = 7168 4.0 to 4.1 (row after row 6.9
// to 7.0; no more than read 2.4), K = 2048 2.9 (4.4), slices of 1024 k of 512 rows 5.3 to 5.9 (5.4 to 6.5). Steps of 8
// and 16 at a time, and asking for lines before, took up to 1.9 times as long.
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
