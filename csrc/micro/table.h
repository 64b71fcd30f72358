// Lists what a tier's vectors offer: every format with both algorithms, and the row kernels.
#pragma once

#include "micro/dot_rows.h"
#include "micro/peak.h"
#include "micro/rows.h"
#include "micro/tile_mm.h"

namespace tandem {
namespace {

// From these many rows on, unpacking a panel pays. The numbers of avx2, avx512 and avx512_bf16 were measured on AMD
// Zen 5, where decoding in registers hides behind AVX-512's multiply-adds. Those of 64 are a Xeon's, where it does not.
// Those of amx belong to Intel machines, too: tiles take 16 rows whether there are that many or not. All figures of
// this file: docs/lab/kernel-choices.md.
constexpr int32_t kNever = kMaxRowsPerCall + 1;

// Plain AVX-512 on a Xeon is bound by the instructions that a core issues beside a busy hyperthread. Other blockings,
// and products that broadcast activations themselves, made no difference.
constexpr Blocking kVectorBlocking = {256, 8, 8, 16, 16, 256, false};  // results of a call: 256 KiB, of tiles 1 MiB
// An expert has many rows from 32 on, by Qwen3-30B's shape; DeepSeek-V3's takes the same time with 4 to 32.
constexpr Blocking kTileBlocking = {kMaxRowsPerCall, 16, 32, 4, 32, 2048, true};
struct TileFromRows {
  int32_t f32, bf16, int8, int4, fp8, fp4, uint4, int6, bf16_rows, uint2, int3, nl4;
};

// Blocks of more rows than dot_rows is given are not compiled.
template <class Isa, int32_t kTileFromRows>
constexpr int kMostDotRows = kTileFromRows > Isa::kDotRows ? Isa::kDotRows : kTileFromRows - 1;

// Codebooks.
template <class Isa, template <class> class Format>
constexpr FormatKernels grid_kernels() {
  FormatKernels kernels{};
  kernels.dot_rows = kernels.tile_mm = tile_mm<Isa, Format>;
  kernels.tile_from_rows = 1;
  if constexpr (HasGridLines<Isa>) {
    kernels.dot_rows = grid_rows<Isa, Format>;
    kernels.tile_from_rows = Isa::template kTileFromGridRows<Format<Isa>::kGrid>;
  }
  return kernels;
}

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
#define TANDEM_GRID_KERNELS(name, F) table.formats[int(Format::name)] = grid_kernels<Isa, F>();
  TANDEM_GRID_FORMATS(TANDEM_GRID_KERNELS)
#undef TANDEM_GRID_KERNELS
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
