// Cuts rows of activations into digits: see format/digit_row.h.
#pragma once

#include "format/digit_row.h"
#include "micro/rows.h"

namespace tandem {
namespace {

template <class Ints>
struct DigitRows {
  using Isa = typename Ints::Isa;
  using Vec = typename Isa::Vec;

  static void cut_row(const IntegerRowArgs* a) {
    const DigitRowLayout layout = digit_row_layout(a->weights);
    const int64_t depth = a->weights.padded_depth;
    for (int64_t g = 0; g < layout.groups; ++g) {
      const int64_t first = g * layout.group, last = first + layout.group < depth ? first + layout.group : depth;
      const uint32_t exponent = largest_exponent(*a, first, last);
      int32_t sums[kDigits];
      put_digits(*a, first, last, float_of_bits((275 - exponent) << 23), sums);
      const DigitGroup group = group_of(exponent, a->offset, sums);
      __builtin_memcpy(a->to + layout.at_groups + g * int64_t{sizeof group}, &group, sizeof group);
    }
  }

 private:
  static constexpr uint32_t kNone = 255;  // the exponent of infinity and NaN
  // Below, 2^21 / max would overflow: digits are multiples of 2^-126, the smallest number that bf16 products keep.
  static constexpr uint32_t kLeast = 22;

  // What the usual kernels would multiply with: rounded to bf16.
  TANDEM_INLINE static Vec load(const IntegerRowArgs& a, int64_t k) {
    const Vec v = load_padded<Isa>(a.source, a.from, k, a.weights.depth);
    return a.from == DType::f32 ? rounded_to_bf16<Isa>(v) : v;
  }
  // Biased, from kLeast on: of the largest magnitude, as whose bits are ordered, too (NaN's are the largest).
  static uint32_t largest_exponent(const IntegerRowArgs& a, int64_t first, int64_t last) {
    auto most = Ints::no_magnitude();
    for (int64_t k = first; k < last; k += 16) most = Ints::larger(most, load(a, k));
    const uint32_t exponent = Ints::largest_bits(most) >> 23;
    return exponent < kLeast ? kLeast : exponent;
  }
  static void put_digits(const IntegerRowArgs& a, int64_t first, int64_t last, float factor, int32_t* sums) {
    const Vec f = Isa::set1(factor);
    auto all = Ints::no_digits();
    for (int64_t k = first; k < last; k += 16)
      all = Ints::store_digits(a.to + kDigits * k, Isa::mul(load(a, k), f), a.split, all);
    Ints::reduce_digits(all, sums);
  }
  static DigitGroup group_of(uint32_t exponent, int32_t offset, const int32_t* sums) {
    const float unit = float_of_bits(exponent == kNone ? 0x7fc00000u : (exponent - 21) << 23);
    const int64_t sum = sums[0] + 256 * int64_t{sums[1]} + 65536 * int64_t{sums[2]};
    return {{-offset * sums[0], -offset * sums[1], -offset * sums[2]}, unit, 65536 * unit, float(sum) * unit, {}};
  }
};

}  // namespace
}  // namespace tandem
