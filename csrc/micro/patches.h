// Rows of an image's patches: rotation, norm and GELU, computed in float and rounded once.
#pragma once

#include "micro/row_runs.h"
#include "micro/vector_math.h"

namespace tandem {
namespace {

template <class Isa, DType type>
struct Patches : Rows<Isa> {
  using R = Rows<Isa>;
  using Vec = typename Isa::Vec;

  // Element i < half turns with element i + half.
  static void turn(const void* x, const float* cos, const float* sin, int64_t half, void* out) {
    R::for_runs(half, [&](int64_t i, int64_t m) {
      const Vec c = R::template load_n<DType::f32>(cos, i, m), s = R::template load_n<DType::f32>(sin, i, m);
      const Vec a = R::template load_n<type>(x, i, m), b = R::template load_n<type>(x, half + i, m);
      R::template store_n<type>(out, i, m, Isa::sub(Isa::mul(a, c), Isa::mul(b, s)));
      R::template store_n<type>(out, half + i, m, Isa::add(Isa::mul(b, c), Isa::mul(a, s)));
    });
  }

  static float sum_over(const void* x, int64_t n) {
    Vec sum = Isa::zero();
    R::for_runs(n, [&](int64_t i, int64_t m) { sum = Isa::add(sum, R::template load_n<type>(x, i, m)); });
    return Isa::reduce_add(sum);
  }

  // Two passes, so that a large mean costs no digits of the deviation.
  static void norm(const void* x, const void* weight, const void* bias, void* out, int64_t n, float eps) {
    const Vec mean = Isa::set1(sum_over(x, n) / static_cast<float>(n));
    Vec squares = Isa::zero();
    R::for_runs(n, [&](int64_t i, int64_t m) {
      if (m == kRowLanes) {
        const Vec from_mean = Isa::sub(R::template load_n<type>(x, i, m), mean);
        squares = Isa::fma(from_mean, from_mean, squares);
      }
    });
    float total = Isa::reduce_add(squares);
    alignas(64) float tail[kRowLanes];
    const int64_t whole = n / kRowLanes * kRowLanes;
    if (whole < n) {
      Isa::store(tail, Isa::sub(R::template load_n<type>(x, whole, n - whole), mean));
      for (int64_t i = 0; i < n - whole; ++i) total += tail[i] * tail[i];
    }
    const Vec scale = Isa::set1(1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps));
    R::for_runs(n, [&](int64_t i, int64_t m) {
      const Vec unit = Isa::mul(Isa::sub(R::template load_n<type>(x, i, m), mean), scale);
      R::template store_n<type>(
          out, i, m, Isa::fma(unit, R::template load_n<type>(weight, i, m), R::template load_n<type>(bias, i, m)));
    });
  }

  static void gelu(const void* x, void* out, int64_t n) {
    R::for_runs(n, [&](int64_t i, int64_t m) {
      R::template store_n<type>(out, i, m, gelu_tanh<Isa>(R::template load_n<type>(x, i, m)));
    });
  }
};

template <class Isa>
void turn_head(const void* x, const float* cos, const float* sin, int64_t half, void* out, DType type) {
  type == DType::bf16 ? Patches<Isa, DType::bf16>::turn(x, cos, sin, half, out)
                      : Patches<Isa, DType::f32>::turn(x, cos, sin, half, out);
}

template <class Isa>
void layer_norm(const void* x, const void* weight, const void* bias, void* out, int64_t n, float eps, DType type) {
  type == DType::bf16 ? Patches<Isa, DType::bf16>::norm(x, weight, bias, out, n, eps)
                      : Patches<Isa, DType::f32>::norm(x, weight, bias, out, n, eps);
}

template <class Isa>
void gelu_row(const void* x, void* out, int64_t n, DType type) {
  type == DType::bf16 ? Patches<Isa, DType::bf16>::gelu(x, out, n) : Patches<Isa, DType::f32>::gelu(x, out, n);
}

}  // namespace
}  // namespace tandem
