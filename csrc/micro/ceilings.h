// The fastest this tier can do anything: what measured kernels are compared with.
#pragma once

#include "micro/row_runs.h"

namespace tandem {
namespace {

template <class Isa>
struct Ceilings {
  using Vec = typename Isa::Vec;

  // Independent streams of adds keep enough loads in flight.
  static float read_memory(const void* data, int64_t bytes) {
    constexpr int kStreams = 4;
    const float* p = static_cast<const float*>(data);
    Vec sum[kStreams];
    for (Vec& s : sum) s = Isa::zero();
    for (int64_t i = 0; i < bytes / 4; i += kStreams * kRowLanes)
      for (int r = 0; r < kStreams; ++r) {
        Isa::prefetch(p + i + r * kRowLanes + 2048);  // 8 KiB ahead
        sum[r] = Isa::add(sum[r], Isa::load(p + i + r * kRowLanes));
      }
    return Isa::reduce_add(Isa::add(Isa::add(sum[0], sum[1]), Isa::add(sum[2], sum[3])));
  }

  // The tier's own multiply-add of prepared lanes (f32 or bf16 pairs), in registers: no loads, no stores.
  template <class Lane>
  static float multiply_add(int64_t rounds, int64_t* flops) {
    constexpr int kChains = sizeof(Vec) > 64 ? 2 : (kLanesPerRegister < kRowLanes ? 6 : 24);
    alignas(64) float ones[kRowLanes];
    for (float& x : ones) x = 0.0f;
    const auto w = Lane::load_line(ones);
    const auto x = Lane::x_line(ones);
    Vec sum[kChains];
#pragma GCC unroll 24
    for (int c = 0; c < kChains; ++c) sum[c] = Isa::set1(static_cast<float>(c));
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 24
      for (int c = 0; c < kChains; ++c) {
        sum[c] = Lane::dot(sum[c], w, x);
        keep(sum[c]);
      }
    *flops = rounds * kChains * kRowLanes * 2 * (Lane::kType == DType::bf16 ? 2 : 1);
    Vec total = Isa::zero();
#pragma GCC unroll 24
    for (int c = 0; c < kChains; ++c) total = Isa::add(total, sum[c]);
    return Isa::reduce_add(total);
  }

 private:
#if defined(__AVX512F__)
  static constexpr int kLanesPerRegister = 16;
  TANDEM_INLINE static void keep(Vec& x) { __asm__ volatile("" : "+v"(x)); }  // or the zeros would be folded away
#elif defined(__AVX2__)
  static constexpr int kLanesPerRegister = 8;
  TANDEM_INLINE static void keep(Vec& x) { __asm__ volatile("" : "+x"(x.lo), "+x"(x.hi)); }
#else
  static constexpr int kLanesPerRegister = 4;
  TANDEM_INLINE static void keep(Vec& x) { __asm__ volatile("" : "+m"(x)); }
#endif
};

}  // namespace
}  // namespace tandem
