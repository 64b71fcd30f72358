// RMS norm and rotary embedding of one row or head, with the rounding points of Transformers' modules.
#pragma once

#include "micro/row_runs.h"

namespace tandem {
namespace {

// wide: weights are f32 beside activations of bf16, and there is no rounding before they multiply (Gemma, Qwen3-Next).
template <class Isa, DType type, bool wide = false>
struct NormRope : Rows<Isa> {
  using R = Rows<Isa>;
  using Vec = typename Isa::Vec;

  static float inverse_rms(const void* x, int64_t n, float eps) {
    Vec squares = Isa::zero();
    R::for_runs(n, [&](int64_t i, int64_t m) {
      const Vec v = R::template load_n<type>(x, i, m);
      squares = Isa::fma(v, v, squares);
    });
    return 1.0f / __builtin_sqrtf(Isa::reduce_add(squares) / static_cast<float>(n) + eps);
  }

  // LlamaRMSNorm: normalise in f32, round to the activation type, then multiply by the weight in that type.
  TANDEM_INLINE static Vec normed(Vec x, Vec inv_rms, const void* weight, int64_t i, int64_t m) {
    if constexpr (wide) return Isa::mul(R::template load_n<DType::f32>(weight, i, m), Isa::mul(x, inv_rms));
    return Isa::mul(R::template load_n<type>(weight, i, m), R::template rounded<type>(Isa::mul(x, inv_rms)));
  }

  static void rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t n, float eps) {
    if (residual) {
      R::for_runs(n, [&](int64_t i, int64_t m) {
        R::template store_n<type>(
            residual, i, m, Isa::add(R::template load_n<type>(residual, i, m), R::template load_n<type>(x, i, m)));
      });
      x = residual;
    }
    const Vec inv_rms = Isa::set1(inverse_rms(x, n, eps));
    R::for_runs(n, [&](int64_t i, int64_t m) {
      R::template store_n<type>(out, i, m, normed(R::template load_n<type>(x, i, m), inv_rms, weight, i, m));
    });
  }

  // Element i < half turns with element i + half; both products and the sum are rounded (apply_rotary_pos_emb).
  static void rotate_head(const void* x, const void* norm_weight, float inv_rms, const float* cos, const float* sin,
                          int64_t half, void* out, int64_t d) {
    const Vec inv = Isa::set1(inv_rms);
    const auto element = [&](int64_t i, int64_t m) {
      const Vec v = R::template load_n<type>(x, i, m);
      return norm_weight ? R::template rounded<type>(normed(v, inv, norm_weight, i, m)) : v;
    };
    const auto product = [](Vec a, Vec b) { return R::template rounded<type>(Isa::mul(a, b)); };
    R::for_runs(half, [&](int64_t i, int64_t m) {
      const Vec c = R::template rounded<type>(R::template load_n<DType::f32>(cos, i, m));
      const Vec s = R::template rounded<type>(R::template load_n<DType::f32>(sin, i, m));
      const Vec a = element(i, m), b = element(half + i, m);
      R::template store_n<type>(out, i, m, Isa::sub(product(a, c), product(b, s)));
      R::template store_n<type>(out, half + i, m, Isa::add(product(b, c), product(a, s)));
    });
    R::for_runs(d - 2 * half, [&](int64_t i, int64_t m) {
      R::template store_n<type>(out, 2 * half + i, m, element(2 * half + i, m));
    });
  }
};

template <class Isa>
void rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t n, float eps, DType type,
              DType weight_type) {
  if (type == DType::f32) return NormRope<Isa, DType::f32>::rms_norm(x, residual, weight, out, n, eps);
  weight_type == DType::bf16 ? NormRope<Isa, DType::bf16>::rms_norm(x, residual, weight, out, n, eps)
                             : NormRope<Isa, DType::bf16, true>::rms_norm(x, residual, weight, out, n, eps);
}

template <class Isa>
void rotate_head(const void* x, const void* norm_weight, float inv_rms, const float* cos, const float* sin,
                 int64_t half, void* out, int64_t d, DType type, DType weight_type) {
  if (type == DType::f32)
    return NormRope<Isa, DType::f32>::rotate_head(x, norm_weight, inv_rms, cos, sin, half, out, d);
  weight_type == DType::bf16
      ? NormRope<Isa, DType::bf16>::rotate_head(x, norm_weight, inv_rms, cos, sin, half, out, d)
      : NormRope<Isa, DType::bf16, true>::rotate_head(x, norm_weight, inv_rms, cos, sin, half, out, d);
}

template <class Isa>
float inverse_rms(const void* x, int64_t n, float eps, DType type) {
  return type == DType::bf16 ? NormRope<Isa, DType::bf16>::inverse_rms(x, n, eps)
                             : NormRope<Isa, DType::f32>::inverse_rms(x, n, eps);
}

}  // namespace
}  // namespace tandem
