// The fastest this tier can multiply: what measured kernels are compared with.
#pragma once

#include "abi/kernel_table.h"
#include "isa/inline.h"

namespace tandem {
namespace {

#if defined(__AVX512F__)
constexpr int kPeakChains = 24;                        // of 32 registers
#define TANDEM_KEEP(x) __asm__ volatile("" : "+v"(x))  // or sums of zeros would be folded away
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
  alignas(64) const float zeros[kPanelRows] = {};
  const auto w = Lane::load_line(zeros);
  const auto x = Lane::x_line(zeros);
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
  for (int64_t i = 0; i < Tiles::kPeakBytes; ++i) scratch[i] = 0;
  Tiles::begin();
  Tiles::multiply_in_cache(scratch, rounds);
  Tiles::end();
  return rounds * Tiles::kPeakSteps * 32 * 32 * 32 * 2;
}

}  // namespace
}  // namespace tandem
