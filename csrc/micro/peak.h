// The fastest this tier can multiply: what measured kernels are compared with.
#pragma once

#include "abi/kernel_table.h"
#include "isa/inline.h"

namespace tandem {
namespace {

#if defined(__AVX512F__)
constexpr int kPeakChains = 24;                        // of 32 registers
#define TANDEM_KEEP(x) __asm__ volatile("" : "+v"(x))  // or the sums would be folded away
#elif defined(__AVX2__)
constexpr int kPeakChains = 6;  // of two registers each
#define TANDEM_KEEP(x) __asm__ volatile("" : "+x"((x).lo), "+x"((x).hi))
#else
constexpr int kPeakChains = 2;
#define TANDEM_KEEP(x) __asm__ volatile("" : "+m"(x))
#endif

// The lane's multiply-add in registers: enough independent sums to hide its latency, no loads, no stores. Returns the
// floating-point operations done. Every loop over the sums is unrolled, else they would live in memory.
template <class Isa, class Lane>
int64_t lane_peak(int64_t rounds, uint8_t*) {
  using Vec = typename Isa::Vec;
  alignas(64) uint32_t operands[kPanelRows];
  for (int i = 0; i < kPanelRows; ++i) operands[i] = i % 2 ? 0x3fa93fb7u : 0xbfa9bfb7u;  // +-1.3: see tile_peak
  const auto w = Lane::load_line(operands);
  const auto x = Lane::x_line(operands);
  Vec sum[kPeakChains];
#pragma GCC unroll 24
  for (int c = 0; c < kPeakChains; ++c) sum[c] = Isa::zero();
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 24
    for (int c = 0; c < kPeakChains; ++c) {
      sum[c] = Lane::dot(sum[c], w, x);
      TANDEM_KEEP(sum[c]);
    }
  return rounds * kPeakChains * kPanelRows * 2 * (2 / Lane::kLinesPerPair);
}

#undef TANDEM_KEEP

// The block of tile_mm_amx, 2 x 2 tiles, over operands that stay in L1. `scratch` is kMatmulScratchBytes.
template <class Tiles>
int64_t tile_peak(int64_t rounds, uint8_t* scratch) {
  // Not zeros: with them an AMX machine showed 62 TFLOPS, at a clock that real data does not allow. bf16 in +-[1, 2).
  uint32_t state = 1;
  for (int64_t i = 0; i < Tiles::kPeakBytes; i += 2) {
    state = state * 1664525u + 1013904223u;
    const uint16_t value = uint16_t(0x3f80 | (state >> 16 & 0x807f));
    __builtin_memcpy(scratch + i, &value, 2);
  }
  Tiles::begin(16);
  Tiles::multiply_in_cache(scratch, rounds);
  Tiles::end();
  return rounds * Tiles::kPeakSteps * 32 * 32 * 32 * 2;
}

}  // namespace
}  // namespace tandem
