// The gated delta rule (Yang et al., 2024, arXiv 2412.06464): one head's recurrence, token by token, and what is around
// it: a short causal convolution before, a gated norm after. All in float32; rounding points are Transformers'.
#pragma once

#include "micro/row_runs.h"
#include "micro/vector_math.h"

namespace tandem {
namespace {

template <class Isa>
struct DeltaRule : Rows<Isa> {
  using R = Rows<Isa>;
  using Vec = typename Isa::Vec;

  TANDEM_INLINE static Vec silu(Vec x) { return Isa::mul(x, vector_sigmoid<Isa>(x)); }

  // Channels [i, i + m) of `width` rows, m <= 16.
  template <DType type>
  TANDEM_INLINE static Vec convolved(const void* const* rows, const float* weights, int64_t stride, int64_t width,
                                     int64_t i, int64_t m) {
    Vec sum = Isa::zero();
    for (int64_t j = 0; j < width; ++j)
      sum = Isa::fma(R::template load_n<DType::f32>(weights + j * stride, i, m),
                     R::template load_n<type>(rows[j], i, m), sum);
    return R::template rounded<type>(sum);
  }

  template <DType type>
  static void conv_silu(const void* const* rows, const float* weights, int64_t stride, int64_t width, float* out,
                        int64_t n) {
    R::for_runs(n, [&](int64_t i, int64_t m) {
      const Vec x = convolved<type>(rows, weights, stride, width, i, m);
      R::template store_n<DType::f32>(out, i, m, R::template rounded<type>(silu(x)));
    });
  }

  template <DType type>
  static void conv_gated(const void* const* rows, const float* weights, int64_t stride, int64_t width, const void* gate,
                         void* out, int64_t n) {
    R::for_runs(n, [&](int64_t i, int64_t m) {
      const Vec x = convolved<type>(rows, weights, stride, width, i, m);
      R::template store_n<type>(out, i, m, Isa::mul(R::template load_n<type>(gate, i, m), x));
    });
  }

  template <DType type>
  static void multiply(const void* x, const void* y, void* out, int64_t n) {
    R::for_runs(n, [&](int64_t i, int64_t m) {
      const Vec product = Isa::mul(R::template load_n<type>(x, i, m), R::template load_n<type>(y, i, m));
      R::template store_n<type>(out, i, m, product);
    });
  }

  // kRuns runs of columns of the state, whose sums stay in registers while its rows pass twice.
  template <int kRuns>
  TANDEM_INLINE static void columns(float* state, const DeltaToken& t, int64_t k_dim, int64_t v_dim, int64_t first,
                                    int64_t last_run) {
    const Vec decay = Isa::set1(t.decay), beta = Isa::set1(t.beta);
    const auto run = [&](int r) { return r + 1 < kRuns ? int64_t{kRowLanes} : last_run; };
    Vec known[kRuns], seen[kRuns];
    for (int r = 0; r < kRuns; ++r) known[r] = seen[r] = Isa::zero();
    for (int64_t i = 0; i < k_dim; ++i) {
      float* row = state + i * v_dim + first;
      const Vec k = Isa::set1(t.k[i]);
      for (int r = 0; r < kRuns; ++r) {
        const Vec s = Isa::mul(R::template load_n<DType::f32>(row, r * kRowLanes, run(r)), decay);
        R::template store_n<DType::f32>(row, r * kRowLanes, run(r), s);
        known[r] = Isa::fma(s, k, known[r]);
      }
    }
    for (int r = 0; r < kRuns; ++r)
      known[r] = Isa::mul(Isa::sub(R::template load_n<DType::f32>(t.v + first, r * kRowLanes, run(r)), known[r]), beta);
    for (int64_t i = 0; i < k_dim; ++i) {
      float* row = state + i * v_dim + first;
      const Vec k = Isa::set1(t.k[i]), q = Isa::set1(t.q[i]);
      for (int r = 0; r < kRuns; ++r) {
        const Vec s = Isa::fma(k, known[r], R::template load_n<DType::f32>(row, r * kRowLanes, run(r)));
        R::template store_n<DType::f32>(row, r * kRowLanes, run(r), s);
        seen[r] = Isa::fma(s, q, seen[r]);
      }
    }
    for (int r = 0; r < kRuns; ++r) R::template store_n<DType::f32>(t.out + first, r * kRowLanes, run(r), seen[r]);
  }

  static void step(float* state, const DeltaToken* token, int64_t k_dim, int64_t v_dim) {
    constexpr int kRuns = 4;
    int64_t first = 0;
    for (; first + kRuns * kRowLanes <= v_dim; first += kRuns * kRowLanes)
      columns<kRuns>(state, *token, k_dim, v_dim, first, kRowLanes);
    for (; first < v_dim; first += kRowLanes) {
      const int64_t left = v_dim - first;
      columns<1>(state, *token, k_dim, v_dim, first, left < kRowLanes ? left : kRowLanes);
    }
  }

  template <DType type>
  static void gated_norm(const float* x, const void* gate, const void* weight, void* out, int64_t n, float eps,
                         bool sigmoid) {
    Vec squares = Isa::zero();
    R::for_runs(n, [&](int64_t i, int64_t m) {
      const Vec v = R::template rounded<type>(R::template load_n<DType::f32>(x, i, m));
      squares = Isa::fma(v, v, squares);
    });
    const Vec inverse = Isa::set1(1.0f / __builtin_sqrtf(Isa::reduce_add(squares) / static_cast<float>(n) + eps));
    R::for_runs(n, [&](int64_t i, int64_t m) {
      const Vec v = R::template rounded<type>(R::template load_n<DType::f32>(x, i, m));
      const Vec normed = R::template rounded<type>(Isa::mul(v, inverse));
      const Vec weighted = R::template rounded<type>(Isa::mul(R::template load_n<type>(weight, i, m), normed));
      const Vec g = R::template load_n<type>(gate, i, m);
      R::template store_n<type>(out, i, m, Isa::mul(weighted, sigmoid ? vector_sigmoid<Isa>(g) : silu(g)));
    });
  }
};

// One head's recurrence over any memory of constant size: what decays, what is written, what is asked.
template <class Isa>
struct Fold : Rows<Isa> {
  using R = Rows<Isa>;
  using Vec = typename Isa::Vec;

  // kRuns runs of columns of the state, whose sums stay in registers while its rows pass. `written` is added at the
  // written key; what the memory answers there now is taken away first where kCorrects.
  template <int kRuns, bool kCorrects>
  TANDEM_INLINE static void columns(float* state, const FoldToken& t, int64_t k_dim, int64_t v_dim, int64_t first,
                                    int64_t last_run) {
    const auto run = [&](int r) { return r + 1 < kRuns ? int64_t{kRowLanes} : last_run; };
    Vec added[kRuns], seen[kRuns];
    for (int r = 0; r < kRuns; ++r) {
      added[r] = R::template load_n<DType::f32>(t.values + first, r * kRowLanes, run(r));
      seen[r] = Isa::zero();
    }
    if constexpr (kCorrects) {
      Vec known[kRuns];
      for (int r = 0; r < kRuns; ++r) known[r] = Isa::zero();
      for (int64_t i = 0; i < k_dim; ++i) {
        const float* row = state + i * v_dim + first;
        const Vec k = Isa::set1(t.written[i] * t.decay[i * t.decay_step]);
        for (int r = 0; r < kRuns; ++r)
          known[r] = Isa::fma(R::template load_n<DType::f32>(row, r * kRowLanes, run(r)), k, known[r]);
      }
      for (int r = 0; r < kRuns; ++r) added[r] = Isa::mul(Isa::sub(added[r], known[r]), Isa::set1(t.beta));
    }
    for (int64_t i = 0; i < k_dim; ++i) {
      float* row = state + i * v_dim + first;
      const Vec decay = Isa::set1(t.decay[i * t.decay_step]), k = Isa::set1(t.written[i]), q = Isa::set1(t.asked[i]);
      for (int r = 0; r < kRuns; ++r) {
        const Vec kept = Isa::mul(R::template load_n<DType::f32>(row, r * kRowLanes, run(r)), decay);
        const Vec s = Isa::fma(k, added[r], kept);
        R::template store_n<DType::f32>(row, r * kRowLanes, run(r), s);
        seen[r] = Isa::fma(s, q, seen[r]);
      }
    }
    for (int r = 0; r < kRuns; ++r) R::template store_n<DType::f32>(t.out + first, r * kRowLanes, run(r), seen[r]);
  }

  template <bool kCorrects>
  static void step(float* state, const FoldToken* token, int64_t k_dim, int64_t v_dim) {
    constexpr int kRuns = 4;
    int64_t first = 0;
    for (; first + kRuns * kRowLanes <= v_dim; first += kRuns * kRowLanes)
      columns<kRuns, kCorrects>(state, *token, k_dim, v_dim, first, kRowLanes);
    for (; first < v_dim; first += kRowLanes) {
      const int64_t left = v_dim - first;
      columns<1, kCorrects>(state, *token, k_dim, v_dim, first, left < kRowLanes ? left : kRowLanes);
    }
  }
};

template <class Isa>
void conv_silu(const void* const* rows, const float* weights, int64_t stride, int64_t width, float* out, int64_t n,
               DType type) {
  type == DType::bf16 ? DeltaRule<Isa>::template conv_silu<DType::bf16>(rows, weights, stride, width, out, n)
                      : DeltaRule<Isa>::template conv_silu<DType::f32>(rows, weights, stride, width, out, n);
}

template <class Isa>
void conv_gated(const void* const* rows, const float* weights, int64_t stride, int64_t width, const void* gate,
                void* out, int64_t n, DType type) {
  type == DType::bf16 ? DeltaRule<Isa>::template conv_gated<DType::bf16>(rows, weights, stride, width, gate, out, n)
                      : DeltaRule<Isa>::template conv_gated<DType::f32>(rows, weights, stride, width, gate, out, n);
}

template <class Isa>
void multiply(const void* x, const void* y, void* out, int64_t n, DType type) {
  type == DType::bf16 ? DeltaRule<Isa>::template multiply<DType::bf16>(x, y, out, n)
                      : DeltaRule<Isa>::template multiply<DType::f32>(x, y, out, n);
}

template <class Isa>
void gated_norm(const float* x, const void* gate, const void* weight, void* out, int64_t n, float eps, bool sigmoid,
                DType type) {
  type == DType::bf16 ? DeltaRule<Isa>::template gated_norm<DType::bf16>(x, gate, weight, out, n, eps, sigmoid)
                      : DeltaRule<Isa>::template gated_norm<DType::f32>(x, gate, weight, out, n, eps, sigmoid);
}

}  // namespace
}  // namespace tandem
