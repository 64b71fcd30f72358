// The fastest this tier can read: what measured kernels are compared with.
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
};

}  // namespace
}  // namespace tandem
