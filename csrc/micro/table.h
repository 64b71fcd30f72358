// Lists what a tier's vectors offer: every format with both algorithms, and the row kernels.
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

// Blocks of more rows than dot_rows is given are not compiled.
template <class Isa, int32_t kTileFromRows>
constexpr int kMostDotRows = kTileFromRows > Isa::kDotRows ? Isa::kDotRows : kTileFromRows - 1;

// kTiled: other units have many rows.
template <class Isa, template <class> class Format, int32_t kTileFromRows, bool kTiled>
constexpr FormatKernels vector_kernels() {
  FormatKernels kernels{};
  if constexpr (HasWholeRows<Format<Isa>>)
    kernels.dot_rows = dot_whole_rows<Isa>;
  else
    kernels.dot_rows = dot_rows<Isa, Format, kMostDotRows<Isa, kTileFromRows>>;
  if constexpr (!kTiled) kernels.tile_mm = tile_mm<Isa, Format>;
  kernels.tile_from_rows = kTileFromRows;
  return kernels;
}

// kTiled: the tier has matrix tiles, which other units list; float32 weights have none.
template <class Isa, TileFromRows kFrom, bool kTiled = false>
constexpr KernelTable vectors(Tier tier) {
  KernelTable table{};
  table.tier = tier;
  table.lane_type = Isa::Lane::kType;
  table.blocking = kTiled ? kTileBlocking : kVectorBlocking;
  table.formats[int(Format::f32)] = vector_kernels<Isa, F32Format, kFrom.f32, false>();
#define TANDEM_VECTOR_KERNELS(name, F) table.formats[int(Format::name)] = vector_kernels<Isa, F, kFrom.name, kTiled>();
  TANDEM_FORMATS(TANDEM_VECTOR_KERNELS)
#undef TANDEM_VECTOR_KERNELS
  table.prepare_row = prepare_row<Isa>;
  table.activate_row = activate_row<Isa>;
  table.add_scaled_row = add_scaled_row<Isa>;
  table.add_row = add_row<Isa>;
  table.stream_rows = stream_rows<Isa>;
  table.store_row = store_row<Isa>;
  table.peak = lane_peak<Isa, typename Isa::Lane>;
  table.peak_f32 = lane_peak<Isa, typename Isa::FloatLane>;
  return table;
}

}  // namespace
}  // namespace tandem
