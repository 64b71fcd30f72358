// Rounds rows of activations to int8: see format/int8_row.h.
#pragma once

#include "format/int8_row.h"
#include "micro/rows.h"

namespace tandem {
namespace {

// Below, a group counts as zeros: 127 / max would overflow.
constexpr float kSmallestMax = 1e-30f;

template <class Ints>
struct Int8Rounding {
  using Isa = typename Ints::Isa;
  using Vec = typename Isa::Vec;

  static void round_row(const IntegerRowArgs* a) {
    const Int8RowLayout layout = int8_row_layout(a->weights);
    const int64_t depth = a->weights.padded_depth;
    for (int64_t b = 0; b < layout.blocks; ++b) {
      const int64_t first = b * layout.block, last = first + layout.block < depth ? first + layout.block : depth;
      const float scale = scale_of(*a, first, last);
      const float factor = scale * 127 > kSmallestMax && scale < __builtin_inff() ? 1 / scale : 0.0f;
      put(a->to + layout.scales + 4 * b, scale);
      for (int64_t g = first / layout.group; g * layout.group < last; ++g) round_group(*a, layout, g, factor);
    }
    if (shares(layout) && layout.groups % 2) put(a->to + layout.sums + 2 * layout.groups, int16_t{0});
  }

 private:
  static bool shares(const Int8RowLayout& layout) { return layout.block > layout.group; }
  static void round_group(const IntegerRowArgs& a, const Int8RowLayout& layout, int64_t g, float factor) {
    const int64_t depth = a.weights.padded_depth, first = g * layout.group;
    const float sum = put_codes(a, first, first + layout.group < depth ? first + layout.group : depth, factor);
    put(a.to + layout.starts + 4 * g, int32_t(-a.offset * int32_t(sum)));
    if (shares(layout))
      put(a.to + layout.sums + 2 * g, int16_t(sum));
    else
      put(a.to + layout.sums + 4 * g, sum);
  }
  template <class T>
  TANDEM_INLINE static void put(uint8_t* p, T value) {
    __builtin_memcpy(p, &value, sizeof value);
  }
  TANDEM_INLINE static Vec load(const IntegerRowArgs& a, int64_t k) {
    return load_padded<Isa>(a.source, a.from, k, a.weights.depth);
  }
  // The largest magnitude / 127; NaN where a number of the group is none, and with it every product of the row.
  static float scale_of(const IntegerRowArgs& a, int64_t first, int64_t last) {
    Vec most = Isa::zero(), nothing = Isa::zero();
    for (int64_t k = first; k < last; k += 16) {
      const Vec v = load(a, k);
      most = Isa::max(most, Isa::max(v, Isa::sub(Isa::zero(), v)));
      nothing = Isa::fma(v, Isa::zero(), nothing);  // infinity * 0 is NaN
    }
    return Isa::reduce_max(most) / 127 + Isa::reduce_add(nothing);
  }
  // Returns the sum of the codes, which is exact.
  static float put_codes(const IntegerRowArgs& a, int64_t first, int64_t last, float factor) {
    const Vec f = Isa::set1(factor), low = Isa::set1(-127), high = Isa::set1(127);
    Vec sum = Isa::zero();
    for (int64_t k = first; k < last; k += 16) {
      const Vec q = Isa::max(low, Isa::min(Isa::round(Isa::mul(load(a, k), f)), high));  // NaN becomes 127
      sum = Isa::add(sum, q);
      Ints::store_codes(a.to + k, q, a.split);
    }
    return Isa::reduce_add(sum);
  }
};

}  // namespace
}  // namespace tandem
