// Codebook formats: blocks of 8 k of 16 rows, whose indices and signs become signed bytes, [4 pairs][16][2] as int8's.
//
//   iq2_xxs  32 bytes  [16] indices, [16] signs
//   iq2_xs   32        [16] of 16 bits: an index of 9, above it 7 signs (the eighth makes their number even)
//   iq2_s    36        [16] lower bytes of indices, [16] signs, [16] upper 2 bits, the first row's lowest
//   iq3_xxs  48        [16][2] indices of 4 k each, [16] signs
//   iq3_s    52        [16][2] lower bytes, [16] signs, [16] 2 bits: the upper one of each index
//   iq1      24        [16] lower bytes, [16] nibbles: the upper 3 bits, then whether values are below their codes
#pragma once

#include "abi/grids.h"
#include "abi/weight_view.h"
#include "isa/inline.h"

namespace tandem {
namespace {

constexpr int kGridPairs = 4;  // of k in a block
constexpr int kGridBlock = 2 * kGridPairs;
constexpr int kExpandedBytes = kPanelRows * kGridBlock;

constexpr bool is_grid(Format f) { return int(f) >= int(Format::iq2_xxs) && int(f) <= int(Format::iq1); }

constexpr int grid_block_bytes(Format f) {
  if (f == Format::iq2_s) return 36;
  if (f == Format::iq3_xxs) return 48;
  if (f == Format::iq3_s) return 52;
  return f == Format::iq1 ? 24 : 32;
}

constexpr bool has_signs(Format f) { return f != Format::iq1; }
// From a block to its 16 bytes of signs, where there are such.
constexpr int signs_at(Format f) { return f == Format::iq3_xxs || f == Format::iq3_s ? 32 : 16; }

// Values of row r of a block, without signs.
template <Format kGrid>
TANDEM_INLINE uint64_t grid_codes(const uint8_t* block, int r) {
  const int upper = kGrid == Format::iq3_s || kGrid == Format::iq2_s
                        ? block[grid_block_bytes(kGrid) - 4 + r / 4] >> 2 * (r % 4) & 3
                        : 0;
  if constexpr (kGrid == Format::iq2_xxs) return kGrids.iq2_xxs[block[r]];
  if constexpr (kGrid == Format::iq2_xs) return kGrids.iq2_xs[block[2 * r] | (block[2 * r + 1] & 1) << 8];
  if constexpr (kGrid == Format::iq2_s) return kGrids.iq2_s[block[r] | upper << 8];
  if constexpr (kGrid == Format::iq3_xxs)
    return kGrids.iq3_xxs[block[2 * r]] | uint64_t{kGrids.iq3_xxs[block[2 * r + 1]]} << 32;
  if constexpr (kGrid == Format::iq3_s)
    return kGrids.iq3_s[block[2 * r] | (upper & 1) << 8] | uint64_t{kGrids.iq3_s[block[2 * r + 1] | (upper & 2) << 7]}
                                                               << 32;
  if constexpr (kGrid == Format::iq1) return kGrids.iq1[block[r] | (block[16 + r / 2] >> 4 * (r % 2) & 15) << 8];
}

// Which of them are negative: bits of a byte.
template <Format kGrid>
TANDEM_INLINE int grid_signs(const uint8_t* block, int r) {
  if constexpr (kGrid == Format::iq2_xs) return kGrids.with_eighth[block[2 * r + 1] >> 1];
  return has_signs(kGrid) ? block[signs_at(kGrid) + r] : 0;
}

typedef uint64_t GridRows __attribute__((vector_size(16)));  // two rows of a block
typedef uint8_t GridBytes __attribute__((vector_size(16)));
typedef uint16_t GridPairsOf __attribute__((vector_size(16)));

TANDEM_INLINE void unpack_eight(GridPairsOf& a, GridPairsOf& b) {
  const GridPairsOf low = picked<0, 8, 1, 9, 2, 10, 3, 11>(a, b), high = picked<4, 12, 5, 13, 6, 14, 7, 15>(a, b);
  a = low, b = high;
}

// A block of a panel to int8's four pairs of k.
template <Format kGrid>
TANDEM_INLINE void expand_grid(const uint8_t* block, uint8_t* bytes) {
  GridPairsOf rows[8];  // i and i + 8
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const GridBytes codes = GridBytes(GridRows{grid_codes<kGrid>(block, i), grid_codes<kGrid>(block, i + 8)});
    rows[i] = GridPairsOf(codes);
    if constexpr (has_signs(kGrid)) {
      const uint64_t low = kGrids.signs[grid_signs<kGrid>(block, i)],
                     high = kGrids.signs[grid_signs<kGrid>(block, i + 8)];
      const GridBytes signs = GridBytes(GridRows{low, high});
      rows[i] = GridPairsOf((codes ^ signs) - signs);
    }
  }
  // 8 x 8 words, transposed: each step makes neighbours of rows that were half as far apart.
  for (int i = 0; i < 4; ++i) unpack_eight(rows[i], rows[i + 4]);
  const GridPairsOf second[8] = {rows[0], rows[4], rows[1], rows[5], rows[2], rows[6], rows[3], rows[7]};
  GridPairsOf third[8];
  for (int i = 0; i < 4; ++i) {
    GridPairsOf a = second[i], b = second[i + 4];
    unpack_eight(a, b);
    third[2 * i] = a, third[2 * i + 1] = b;
  }
  for (int i = 0; i < 4; ++i) {
    GridPairsOf a = third[i], b = third[i + 4];
    unpack_eight(a, b);
    const int first = 2 * i, next = 2 * i + 1;  // words 0 to 3 are of rows 0 to 7, the others of rows 8 to 15
    __builtin_memcpy(bytes + first % 4 * 32 + first / 4 * 16, &a, 16);
    __builtin_memcpy(bytes + next % 4 * 32 + next / 4 * 16, &b, 16);
  }
}

constexpr int kGridAhead = 8;  // blocks that are expanded at once

// `blocks` blocks, up to kGridAhead, to int8's pairs of k.
template <Format kGrid>
__attribute__((noinline)) void expand_grids(const uint8_t* block, int blocks, uint8_t* bytes) {
  for (int b = 0; b < blocks; ++b) expand_grid<kGrid>(block + b * grid_block_bytes(kGrid), bytes + b * kExpandedBytes);
}

}  // namespace
}  // namespace tandem
