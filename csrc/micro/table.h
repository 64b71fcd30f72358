// Lists what a tier offers: every format with both algorithms, and the row kernels.
#pragma once

#include "micro/dot_rows.h"
#include "micro/peak.h"
#include "micro/rows.h"
#include "micro/tile_mm.h"

namespace tandem {
namespace {

// From these many rows on, unpacking a panel pays. The numbers of avx2, avx512 and avx512_bf16 were measured on AMD
// Zen 5, weights from DRAM and from cache; there decoding in registers hides behind AVX-512's multiply-adds. Those of
// 64 are a Xeon's, where it does not: of the peak, dot_rows and tile_mm reach with avx512_bf16 0.74 to 0.81 and 0.78 to
// 0.87 (int4), 0.61 to 0.68 and 0.78 to 0.83 (fp8), with avx512 0.57 to 0.62 and 0.59 to 0.66 (int4), at 256 rows; Zen
// 5 takes the same time within 2 %. Those of amx belong to Intel machines, too: tiles take 16 rows whether there are
// that many or not. One row of fp8 takes the same time either way (weights from DRAM, three times in turn: 0.97
// to 1.05).
constexpr int32_t kNever = kMaxRowsPerCall + 1;

// Plain AVX-512 on a Xeon, many rows, 12 rows x 2 panels a block: 0.74 to 0.77 of what registers give on a core of
// one's own, 0.60 to 0.62 beside somebody else's hyperthread, where registers still give as much: a core then issues
// hardly more than products take. (With BF16 a product takes twice as long: 0.89 to 0.95.) 6 rows x 4 panels take 78
// instructions for 48 products, 12 x 2 92: layers of 1024 tokens, in turn, 0.93 to 1.04 of the time (on a quiet host;
// 0.89 of registers). Blocking did not matter: 64 to 512 rows a call, 4 or 16 pairs, slices of 8 to 32 KiB 0.87
// to 1.11. 12 rows x 2 panels with activations that the products broadcast themselves, 52 instructions for 48 products:
// 0.97 to 1.16, the old build against itself 0.97 to 1.10 (2026-11-23-xeon-turns-results-between-products.json).
constexpr Blocking kVectorBlocking = {256, 8, 8, 16, 16, 256, false};  // results of a call: 256 KiB, of tiles 1 MiB
// Many rows of an expert: on a Xeon of 16 threads, from 4, 8, 16 and 32 on, ms, in turn: Qwen3-30B's shape, 64 tokens
// (4 rows an expert in the mean), fp8 5.2, 4.5, 4.8, 4.2, int8 5.4, 4.8, 5.0, 4.4, int4 3.8, 3.3, 3.8, 3.2; 256
// tokens 6.8, 6.4, 6.7, 5.2, int8 6.8, 6.2, 6.9, 5.0, int4 5.5, 5.5, 6.0, 4.3; DeepSeek-V3's, 64 tokens: within what
// repeats differ.
constexpr Blocking kTileBlocking = {kMaxRowsPerCall, 16, 32, 4, 32, 2048, true};
struct TileFromRows {
  int32_t f32, bf16, int8, int4, fp8, fp4, uint4, int6, bf16_rows;
};

template <class Isa, template <class> class Format>
constexpr FormatKernels vector_kernels(int32_t tile_from_rows) {
  if constexpr (HasWholeRows<Format<Isa>>)
    return {dot_whole_rows<Isa>, tile_mm<Isa, Format>, tile_from_rows, 0, 0};
  else
    return {dot_rows<Isa, Format>, tile_mm<Isa, Format>, tile_from_rows, 0, 0};
}

template <class Isa>
constexpr KernelTable make_table(Tier tier, TileFromRows from) {
  return {
      tier,
      Isa::Lane::kType,
      kVectorBlocking,
      {vector_kernels<Isa, F32Format>(from.f32),
#define TANDEM_VECTOR_KERNELS(name, F) vector_kernels<Isa, F>(from.name),
       TANDEM_FORMATS(TANDEM_VECTOR_KERNELS)
#undef TANDEM_VECTOR_KERNELS
      },
      prepare_row<Isa>,
      activate_row<Isa>,
      add_scaled_row<Isa>,
      add_row<Isa>,
      stream_rows<Isa>,
      store_row<Isa>,
      lane_peak<Isa, typename Isa::Lane>,
      lane_peak<Isa, typename Isa::FloatLane>,
      {},  // int8 activations: see with_int8
      nullptr,
      nullptr,
      {},  // digits: see with_digits
      nullptr,
  };
}

}  // namespace
}  // namespace tandem
