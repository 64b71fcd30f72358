// What delta nets whose channels decay apart (Kimi, arXiv 2510.26692) and state spaces compute around their recurrence,
// of one head of one token, in float32.
#pragma once

#include "micro/row_runs.h"
#include "micro/vector_math.h"

namespace tandem {
namespace {

template <class Isa>
struct Channels : Rows<Isa> {
  using R = Rows<Isa>;
  using Vec = typename Isa::Vec;

  // log(1 + e^x), accurate where it is small: decays near 1 are multiplied over whole contexts. With z = e^-|x|,
  // log(1 + z) = 2 artanh(z / (2 + z)), and the series ends where w <= 1/3 leaves nothing.
  TANDEM_INLINE static Vec softplus(Vec x) {
    const Vec z = vector_exp<Isa>(Isa::min(x, Isa::sub(Isa::zero(), x)));
    const Vec w = Isa::div(z, Isa::add(Isa::set1(2.0f), z));
    const float odd[] = {1.0f / 15, 1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f};
    const Vec series = polynomial<Isa>(odd, Isa::mul(w, w));
    return Isa::fma(Isa::add(w, w), series, Isa::max(Isa::zero(), x));
  }

  static void to_unit(const float* x, float* out, int64_t n, float scale, float eps) {
    Vec squares = Isa::zero();
    R::for_runs(n, [&](int64_t i, int64_t m) {
      const Vec v = R::template load_n<DType::f32>(x, i, m);
      squares = Isa::fma(v, v, squares);
    });
    const Vec by = Isa::set1(scale / __builtin_sqrtf(Isa::reduce_add(squares) + eps));
    R::for_runs(n, [&](int64_t i, int64_t m) {
      R::template store_n<DType::f32>(out, i, m, Isa::mul(R::template load_n<DType::f32>(x, i, m), by));
    });
  }

  template <DType type>
  static void decay(const void* forget, const float* bias, float rate, float floor, float* out, int64_t n) {
    const Vec by = Isa::set1(floor < 0.0f ? -rate : rate);
    R::for_runs(n, [&](int64_t i, int64_t m) {
      const Vec x = Isa::add(R::template load_n<type>(forget, i, m), R::template load_n<DType::f32>(bias, i, m));
      const Vec logarithm =
          floor < 0.0f ? Isa::mul(vector_sigmoid<Isa>(Isa::mul(x, by)), Isa::set1(floor)) : Isa::mul(softplus(x), by);
      R::template store_n<DType::f32>(out, i, m, vector_exp<Isa>(logarithm));
    });
  }

  template <DType type>
  static void norm(const float* x, const void* gate, const float* weight, void* out, int64_t n, float eps) {
    Vec squares = Isa::zero();
    R::for_runs(n, [&](int64_t i, int64_t m) {
      const Vec v = R::template rounded<type>(R::template load_n<DType::f32>(x, i, m));
      squares = Isa::fma(v, v, squares);
    });
    const Vec by = Isa::set1(1.0f / __builtin_sqrtf(Isa::reduce_add(squares) / static_cast<float>(n) + eps));
    R::for_runs(n, [&](int64_t i, int64_t m) {
      const Vec v = R::template rounded<type>(R::template load_n<DType::f32>(x, i, m));
      const Vec y = Isa::mul(Isa::mul(v, by), R::template load_n<DType::f32>(weight, i, m));
      R::template store_n<type>(out, i, m, Isa::mul(y, vector_sigmoid<Isa>(R::template load_n<type>(gate, i, m))));
    });
  }

  template <DType type>
  static void through(const float* x, const float* value, float by, const void* gate, float* out, int64_t n) {
    R::for_runs(n, [&](int64_t i, int64_t m) {
      const Vec g = R::template load_n<type>(gate, i, m), v = R::template load_n<DType::f32>(value, i, m);
      const Vec y = Isa::fma(v, Isa::set1(by), R::template load_n<DType::f32>(x, i, m));
      R::template store_n<DType::f32>(out, i, m, Isa::mul(y, Isa::mul(g, vector_sigmoid<Isa>(g))));
    });
  }
};

template <class Isa>
void channel_decay(const void* forget, const float* bias, float rate, float floor, float* out, int64_t n, DType type) {
  type == DType::bf16 ? Channels<Isa>::template decay<DType::bf16>(forget, bias, rate, floor, out, n)
                      : Channels<Isa>::template decay<DType::f32>(forget, bias, rate, floor, out, n);
}

template <class Isa>
void sigmoid_norm(const float* x, const void* gate, const float* weight, void* out, int64_t n, float eps, DType type) {
  type == DType::bf16 ? Channels<Isa>::template norm<DType::bf16>(x, gate, weight, out, n, eps)
                      : Channels<Isa>::template norm<DType::f32>(x, gate, weight, out, n, eps);
}

template <class Isa>
void through_gate(const float* x, const float* value, float through, const void* gate, float* out, int64_t n,
                  DType type) {
  type == DType::bf16 ? Channels<Isa>::template through<DType::bf16>(x, value, through, gate, out, n)
                      : Channels<Isa>::template through<DType::f32>(x, value, through, gate, out, n);
}

}  // namespace
}  // namespace tandem
