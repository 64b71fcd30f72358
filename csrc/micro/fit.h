// Codes and scales of a group of weights with the least squared error (formats/rounding.py is the reference).
#pragma once

#include "abi/dense_kernels.h"
#include "isa/inline.h"

namespace tandem {
namespace {

// 16 groups at a time, one per lane, so that nothing is ever added across lanes. All weights of a group are divided by
// the one of the largest magnitude first: a guess `target` is the code that this one would get.
template <class Isa>
struct GroupFitter {
  using Vec = typename Isa::Vec;
  static constexpr int kLanes = 16;
  static constexpr int kMaxGroup = 256;

  // [k][lane]
  alignas(64) float relative[kMaxGroup * kLanes];
  alignas(64) float share[kMaxGroup * kLanes];
  alignas(64) float extreme[kLanes], ratio[kLanes], gain[kLanes];

  static void fit(const GroupFit* f) {
    GroupFitter self;
    for (int64_t first = 0; first < f->groups; first += kLanes) {
      const int lanes = f->groups - first < kLanes ? int(f->groups - first) : kLanes;
      self.take(*f, first, lanes);
      for (int t = 0; t < f->target_count; ++t)
        f->importance ? self.template guess<true>(*f, f->targets[t]) : self.template guess<false>(*f, f->targets[t]);
      for (int lane = 0; lane < lanes; ++lane) self.give(*f, first + lane, lane);
    }
  }

 private:
  void take(const GroupFit& f, int64_t first, int lanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t group = first + (lane < lanes ? lane : 0);
      const float* w = f.weights + group * f.group;
      extreme[lane] = largest(w, f.group);
      ratio[lane] = gain[lane] = 0.0f;
      for (int64_t k = 0; k < f.group; ++k) relative[k * kLanes + lane] = w[k];
      if (!f.importance) continue;
      const float* h = f.importance + group % f.groups_per_row * f.group;
      for (int64_t k = 0; k < f.group; ++k) share[k * kLanes + lane] = h[k];
    }
    alignas(64) float divisors[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) divisors[lane] = extreme[lane] != 0.0f ? extreme[lane] : 1.0f;
    const Vec divisor = Isa::load(divisors);
    for (int64_t k = 0; k < f.group; ++k)
      Isa::store(relative + k * kLanes, Isa::div(Isa::load(relative + k * kLanes), divisor));
  }

  // The weight of the largest magnitude, with its sign.
  static float largest(const float* w, int64_t n) {
    Vec low = Isa::zero(), high = Isa::zero();
    for (int64_t k = 0; k < n; k += kLanes) {
      low = Isa::max(low, Isa::sub(Isa::zero(), Isa::load(w + k)));
      high = Isa::max(high, Isa::load(w + k));
    }
    const float below = Isa::reduce_max(low), above = Isa::reduce_max(high);
    return above >= below ? above : -below;
  }

  // |w - s q|^2 is least for s = <w, q> / <q, q>, and then less than |w|^2 by <w, q>^2 / <q, q>.
  template <bool weighted>
  void guess(const GroupFit& f, float target) {
    const Vec t = Isa::set1(target), low = Isa::set1(f.low), high = Isa::set1(f.high);
    Vec along = Isa::zero(), square = Isa::zero();
    for (int64_t k = 0; k < f.group; ++k) {
      const Vec w = Isa::load(relative + k * kLanes);
      const Vec q = Isa::max(low, Isa::min(high, Isa::round(Isa::mul(w, t))));
      const Vec counted = weighted ? Isa::mul(q, Isa::load(share + k * kLanes)) : q;
      along = Isa::fma(counted, w, along);
      square = Isa::fma(counted, q, square);
    }
    const Vec best = Isa::div(along, Isa::max(square, Isa::set1(1e-30f)));  // both are 0 where no column counts
    alignas(64) float found_gain[kLanes], found_ratio[kLanes];
    Isa::store(found_gain, Isa::mul(along, best));
    Isa::store(found_ratio, best);
    for (int lane = 0; lane < kLanes; ++lane) {
      const bool better = found_gain[lane] > gain[lane];
      gain[lane] = better ? found_gain[lane] : gain[lane];
      ratio[lane] = better ? found_ratio[lane] : ratio[lane];
    }
  }

  // Codes made anew with the rounded scale. A group of zeros takes any scale.
  void give(const GroupFit& f, int64_t group, int lane) {
    const uint16_t bits = bf16_of_float(extreme[lane] * ratio[lane]);
    const uint16_t rounded = bits & 0x7fff ? bits : 0x3f80;
    const float step = float_of_bf16(rounded);
    const float* w = f.weights + group * f.group;
    int8_t* codes = f.codes + group * f.group;
    f.scales[group] = rounded;
    const Vec s = Isa::set1(step), low = Isa::set1(f.low), high = Isa::set1(f.high);
    alignas(64) float q[kLanes];
    for (int64_t k = 0; k < f.group; k += kLanes) {
      Isa::store(q, Isa::max(low, Isa::min(high, Isa::round(Isa::div(Isa::load(w + k), s)))));
      for (int i = 0; i < kLanes; ++i) codes[k + i] = int8_t(q[i]);
    }
  }
};

}  // namespace
}  // namespace tandem
