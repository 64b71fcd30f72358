// Functions of a Vec, written once in the primitives. Errors are relative to float's epsilon (2^-24).
#pragma once

#include "abi/kernel_table.h"
#include "isa/inline.h"

namespace tandem {
namespace {

// c[0] x^(N-1) + ... + c[N-1], by Horner's rule.
template <class Isa, int N>
TANDEM_INLINE typename Isa::Vec polynomial(const float (&c)[N], typename Isa::Vec x) {
  typename Isa::Vec p = Isa::set1(c[0]);
#pragma GCC unroll 8
  for (int i = 1; i < N; ++i) p = Isa::fma(p, x, Isa::set1(c[i]));
  return p;
}

// e^x for x in [-87, 88], clamped outside; NaN stays NaN (min and max return their second operand for NaN). Argument
// reduction with a two-part ln 2 (Cody and Waite), then the Taylor polynomial of degree 7 on [-ln2/2, ln2/2]: 2 ulp.
template <class Isa>
TANDEM_INLINE typename Isa::Vec vector_exp(typename Isa::Vec x) {
  using Vec = typename Isa::Vec;
  x = Isa::max(Isa::set1(-87.0f), Isa::min(Isa::set1(88.0f), x));
  const Vec n = Isa::round(Isa::mul(x, Isa::set1(1.44269504f)));
  Vec r = Isa::fma(n, Isa::set1(-0.693359375f), x);
  r = Isa::fma(n, Isa::set1(2.12194440e-4f), r);
  const float taylor[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  return Isa::mul(polynomial<Isa>(taylor, r), Isa::pow2(n));
}

template <class Isa>
TANDEM_INLINE typename Isa::Vec vector_sigmoid(typename Isa::Vec x) {
  const typename Isa::Vec one = Isa::set1(1.0f);
  return Isa::div(one, Isa::add(one, vector_exp<Isa>(Isa::sub(Isa::zero(), x))));
}

// Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
template <class Isa>
TANDEM_INLINE typename Isa::Vec vector_erf(typename Isa::Vec x) {
  using Vec = typename Isa::Vec;
  const Vec one = Isa::set1(1.0f), negative = Isa::sub(Isa::zero(), x), a = Isa::max(x, negative);
  const Vec t = Isa::div(one, Isa::fma(a, Isa::set1(0.3275911f), one));
  const float c[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
  const Vec tail = Isa::mul(Isa::mul(polynomial<Isa>(c, t), t), vector_exp<Isa>(Isa::mul(negative, x)));
  const Vec sign = Isa::max(Isa::set1(-1.0f), Isa::min(one, Isa::mul(x, Isa::set1(1e30f))));
  return Isa::mul(sign, Isa::sub(one, tail));
}

template <class Isa>
TANDEM_INLINE typename Isa::Vec gelu(typename Isa::Vec x) {
  using Vec = typename Isa::Vec;
  const Vec half = Isa::mul(x, Isa::set1(0.5f));
  return Isa::fma(half, vector_erf<Isa>(Isa::mul(x, Isa::set1(0.70710678f))), half);
}

// 0.5 x (1 + tanh(u)) = x sigmoid(2u)
template <class Isa>
TANDEM_INLINE typename Isa::Vec gelu_tanh(typename Isa::Vec x) {
  using Vec = typename Isa::Vec;
  const Vec cubic = Isa::fma(Isa::mul(x, x), Isa::set1(0.044715f), Isa::set1(1.0f));
  const Vec twice_u = Isa::mul(Isa::mul(x, cubic), Isa::set1(2 * 0.79788456f));
  return Isa::mul(x, vector_sigmoid<Isa>(twice_u));
}

// The gated activation of one expert: see ActivationKind.
template <class Isa>
TANDEM_INLINE typename Isa::Vec gated(const Activation& a, typename Isa::Vec gate, typename Isa::Vec up) {
  using Vec = typename Isa::Vec;
  if (a.kind == ActivationKind::gelu) return Isa::mul(gelu<Isa>(gate), up);
  if (a.kind == ActivationKind::gelu_tanh) return Isa::mul(gelu_tanh<Isa>(gate), up);
  const Vec limit = Isa::set1(a.limit);
  if (a.kind != ActivationKind::silu) up = Isa::max(Isa::set1(-a.limit), Isa::min(limit, up));
  if (a.kind == ActivationKind::silu_clamp)
    return Isa::mul(Isa::min(limit, Isa::mul(gate, vector_sigmoid<Isa>(gate))), up);
  if (a.kind != ActivationKind::silu) gate = Isa::min(limit, gate);
  const Vec alpha = Isa::set1(a.kind == ActivationKind::swiglu_oai ? a.alpha : 1.0f);
  if (a.kind == ActivationKind::swiglu_oai) up = Isa::add(up, Isa::set1(1.0f));
  return Isa::mul(Isa::mul(gate, vector_sigmoid<Isa>(Isa::mul(alpha, gate))), up);
}

template <class Isa>
TANDEM_INLINE typename Isa::Vec relu2(typename Isa::Vec x) {
  x = Isa::max(Isa::zero(), x);  // NaN stays NaN
  return Isa::mul(x, x);
}

}  // namespace
}  // namespace tandem
