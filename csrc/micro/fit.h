// Codes and scales of a group of weights with the least squared error (formats/rounding.py is the reference).
#pragma once

#include "abi/dense_kernels.h"
#include "isa/inline.h"

namespace tandem {
namespace {

// 16 groups at a time, one per lane, so that nothing is ever added across lanes. All weights of a group are divided by
// the one of the largest magnitude first: `target` is the code that this one would get.
template <class Isa>
class LaneFit {
 public:
  using Vec = typename Isa::Vec;
  static constexpr int kLanes = 16;
  static constexpr int kMaxGroup = 256;

  // What is fitted, [k][lane], and how much a weight's squared error counts.
  alignas(64) float weights[kMaxGroup * kLanes];
  alignas(64) float share[kMaxGroup * kLanes];

  // bf16 scales of all lanes; `store_codes` then gives the codes.
  template <bool weighted>
  void search(const FitGrid& grid, int64_t group, uint16_t* scales) {
    Best best = divide_by_largest(group);
    int t = 0;
    for (; t + 1 < grid.target_count; t += 2) try_targets<weighted, 2>(grid, group, grid.targets + t, &best);
    if (t < grid.target_count) try_targets<weighted, 1>(grid, group, grid.targets + t, &best);
    alignas(64) float found[kLanes];
    Isa::store(found, Isa::mul(best.extreme, best.ratio));
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint16_t bits = bf16_of_float(found[lane]);
      scales[lane] = bits & 0x7fff ? bits : 0x3f80;  // a group of zeros takes any scale
    }
    inverse_ = Isa::div(Isa::set1(1.0f), Isa::load_bf16(scales));
  }

  // The codes of weight k of all groups with the scales as they are stored.
  TANDEM_INLINE void store_codes(const FitGrid& grid, int64_t k, int8_t* codes) const {
    const Vec q = Isa::round(Isa::mul(Isa::load(weights + k * kLanes), inverse_));
    Isa::store_int8(reinterpret_cast<uint8_t*>(codes),
                    Isa::max(Isa::min(q, Isa::set1(grid.high)), Isa::set1(grid.low)));
  }

 private:
  static constexpr float kNothing = 0x1p-120f;  // below, one over it is infinite soon, and a weight is as good as 0

  // Of each lane: its weight of the largest magnitude, with its sign; the best scale so far over that weight, and what
  // is gained by it.
  struct Best {
    Vec extreme, ratio, gain;
  };

  Best divide_by_largest(int64_t group) {
    Vec below = Isa::zero(), above = Isa::zero();
    for (int64_t k = 0; k < group; ++k) {
      const Vec w = Isa::load(weights + k * kLanes);
      below = Isa::max(below, Isa::sub(Isa::zero(), w));
      above = Isa::max(above, w);
    }
    const Vec extreme = Isa::where_greater(below, above, Isa::sub(Isa::zero(), below), above);
    const Vec inverse = Isa::where_greater(Isa::set1(kNothing), Isa::max(below, above), Isa::zero(),
                                           Isa::div(Isa::set1(1.0f), extreme));
    for (int64_t k = 0; k < group; ++k)
      Isa::store(relative_ + k * kLanes, Isa::mul(Isa::load(weights + k * kLanes), inverse));
    return {extreme, Isa::zero(), Isa::zero()};
  }

  // |w - s q|^2 is least for s = <w, q> / <q, q>, and then less than |w|^2 by <w, q>^2 / <q, q>. Two tries at once:
  // the sums of one are a chain of additions that leaves half of the processor idle.
  template <bool weighted, int count>
  void try_targets(const FitGrid& grid, int64_t group, const float* targets, Best* best) {
    const Vec low = Isa::set1(grid.low), high = Isa::set1(grid.high);
    Vec target[count], along[count], square[count];
    for (int i = 0; i < count; ++i) {
      target[i] = Isa::set1(targets[i]);
      along[i] = square[i] = Isa::zero();
    }
    for (int64_t k = 0; k < group; ++k) {
      const Vec w = Isa::load(relative_ + k * kLanes);
      for (int i = 0; i < count; ++i) {
        const Vec q = Isa::max(Isa::min(Isa::round(Isa::mul(w, target[i])), high), low);
        const Vec counted = weighted ? Isa::mul(q, Isa::load(share + k * kLanes)) : q;
        along[i] = Isa::fma(counted, w, along[i]);
        square[i] = Isa::fma(counted, q, square[i]);
      }
    }
    for (int i = 0; i < count; ++i) {
      const Vec ratio = Isa::div(along[i], Isa::max(square[i], Isa::set1(1e-30f)));  // both 0 where no column counts
      const Vec gain = Isa::mul(along[i], ratio);
      best->ratio = Isa::where_greater(gain, best->gain, ratio, best->ratio);
      best->gain = Isa::where_greater(gain, best->gain, gain, best->gain);
    }
  }

  alignas(64) float relative_[kMaxGroup * kLanes];
  Vec inverse_;  // one over the scales
};

// Groups that lie one after the other.
template <class Isa>
void fit_groups(const GroupFit* f) {
  constexpr int kLanes = LaneFit<Isa>::kLanes;
  LaneFit<Isa> fit;
  alignas(64) int8_t codes[kLanes];
  alignas(64) uint16_t scales[kLanes];
  for (int64_t first = 0; first < f->groups; first += kLanes) {
    const int lanes = f->groups - first < kLanes ? int(f->groups - first) : kLanes;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t group = first + (lane < lanes ? lane : 0);
      const float* h = f->importance + (f->importance ? group % f->groups_per_row * f->group : 0);
      for (int64_t k = 0; k < f->group; ++k) fit.weights[k * kLanes + lane] = f->weights[group * f->group + k];
      for (int64_t k = 0; f->importance && k < f->group; ++k) fit.share[k * kLanes + lane] = h[k];
    }
    f->importance ? fit.template search<true>(f->grid, f->group, scales)
                  : fit.template search<false>(f->grid, f->group, scales);
    for (int lane = 0; lane < lanes; ++lane) f->scales[first + lane] = scales[lane];
    for (int64_t k = 0; k < f->group; ++k) {
      fit.store_codes(f->grid, k, codes);
      for (int lane = 0; lane < lanes; ++lane) f->codes[(first + lane) * f->group + k] = codes[lane];
    }
  }
}

// Groups of 16 rows side by side, as packing has them.
template <class Isa>
void fit_panel(const PanelFit* f) {
  constexpr int kLanes = LaneFit<Isa>::kLanes;
  LaneFit<Isa> fit;
  for (int64_t g = 0; g < f->groups; ++g) {
    const int64_t first = g * f->group;
    for (int64_t k = 0; k < f->group; ++k) {
      const int64_t at = (first + k) * kLanes;
      Isa::store(fit.weights + k * kLanes, f->type == DType::f32
                                               ? Isa::load(static_cast<const float*>(f->weights) + at)
                                               : Isa::load_bf16(static_cast<const uint16_t*>(f->weights) + at));
    }
    fit.template search<false>(f->grid, f->group, f->scales + g * kLanes);
    for (int64_t k = 0; k < f->group; ++k) fit.store_codes(f->grid, k, f->codes + (first + k) * kLanes);
  }
}

}  // namespace
}  // namespace tandem
