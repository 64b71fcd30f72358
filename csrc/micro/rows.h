// Row kernels around the matrix products: conversion, activation, sums, output.
#pragma once

#include "micro/vector_math.h"

namespace tandem {
namespace {

template <class Isa>
TANDEM_INLINE typename Isa::Vec load_as(const void* p, DType type, int64_t i) {
  if (type == DType::bf16) return Isa::load_bf16(static_cast<const uint16_t*>(p) + i);
  return Isa::load(static_cast<const float*>(p) + i);
}

template <class Isa>
TANDEM_INLINE void store_as(void* p, DType type, int64_t i, typename Isa::Vec v) {
  if (type == DType::bf16)
    Isa::store_bf16(static_cast<uint16_t*>(p) + i, v);
  else
    Isa::store(static_cast<float*>(p) + i, v);
}

// The first `count` of 16 values, the others 0.
template <class Isa>
TANDEM_INLINE typename Isa::Vec load_some(const void* p, DType type, int64_t i, int64_t count) {
  alignas(64) uint32_t buffer[16] = {};
  const int64_t bytes = type == DType::bf16 ? 2 : 4;
  __builtin_memcpy(buffer, static_cast<const uint8_t*>(p) + i * bytes, count * bytes);
  return load_as<Isa>(buffer, type, 0);
}

// Values [i, i + 16) of a row of `length`, zeros past its end.
template <class Isa>
TANDEM_INLINE typename Isa::Vec load_padded(const void* p, DType type, int64_t i, int64_t length) {
  if (i + 16 <= length) return load_as<Isa>(p, type, i);
  return i < length ? load_some<Isa>(p, type, i, length - i) : Isa::zero();
}

template <class Isa>
TANDEM_INLINE void store_some(void* p, DType type, int64_t i, int64_t count, typename Isa::Vec v) {
  alignas(64) uint32_t buffer[16];
  const int64_t bytes = type == DType::bf16 ? 2 : 4;
  store_as<Isa>(buffer, type, 0, v);
  __builtin_memcpy(static_cast<uint8_t*>(p) + i * bytes, buffer, count * bytes);
}

template <class Isa>
TANDEM_INLINE typename Isa::Vec rounded_to_bf16(typename Isa::Vec v) {
  alignas(64) uint16_t buffer[16];
  Isa::store_bf16(buffer, v);
  return Isa::load_bf16(buffer);
}

template <class Isa>
void prepare_row(const void* source, DType from, void* destination, DType to, bool round_to_bf16, int64_t length,
                 int64_t padded_length) {
  const bool round = round_to_bf16 && from == DType::f32 && to == DType::f32;
  for (int64_t i = 0; i < padded_length; i += 16) {
    const typename Isa::Vec v = load_padded<Isa>(source, from, i, length);
    store_as<Isa>(destination, to, i, round ? rounded_to_bf16<Isa>(v) : v);
  }
}

template <class Isa>
void activate_row(const Activation* activation, const float* gate_up, void* destination, void* second, DType to,
                  bool round_to_bf16, int64_t pairs) {
  using Vec = typename Isa::Vec;
  const bool round = round_to_bf16 && to == DType::f32;
  for (int64_t p = 0; p < pairs; ++p) {
    const Vec gate = Isa::load(gate_up + 32 * p), up = Isa::load(gate_up + 32 * p + 16);
    const bool has_gate = is_gated(activation->kind);
    const Vec v = has_gate ? gated<Isa>(*activation, gate, up) : relu2<Isa>(gate);
    store_as<Isa>(destination, to, 16 * p, round ? rounded_to_bf16<Isa>(v) : v);
    if (has_gate) continue;
    const Vec other = relu2<Isa>(up);
    store_as<Isa>(second, to, 16 * p, round ? rounded_to_bf16<Isa>(other) : other);
  }
}

// Lengths are multiples of 16 here: sums and products live in padded scratch.
template <class Isa>
void add_scaled_row(float* sum, const float* y, float weight, int64_t length) {
  const typename Isa::Vec w = Isa::set1(weight);
  for (int64_t i = 0; i < length; i += 16) Isa::store(sum + i, Isa::fma(w, Isa::load(y + i), Isa::load(sum + i)));
}

template <class Isa>
void stream_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t length) {
  for (int64_t r = 0; r < rows; ++r, from += from_stride, to += to_stride)
    for (int64_t i = 0; i < length; i += 16) Isa::stream(to + i, Isa::load(from + i));
  Isa::streamed();
}

template <class Isa>
void add_row(float* sum, const float* y, int64_t length) {
  for (int64_t i = 0; i < length; i += 16) Isa::store(sum + i, Isa::add(Isa::load(sum + i), Isa::load(y + i)));
}

template <class Isa>
void store_row(const float* y, void* destination, DType to, bool add, int64_t length) {
  int64_t i = 0;
  for (; i + 16 <= length; i += 16) {
    const typename Isa::Vec v = Isa::load(y + i);
    store_as<Isa>(destination, to, i, add ? Isa::add(load_as<Isa>(destination, to, i), v) : v);
  }
  if (i == length) return;
  typename Isa::Vec v = load_some<Isa>(y, DType::f32, i, length - i);
  if (add) v = Isa::add(load_some<Isa>(destination, to, i, length - i), v);
  store_some<Isa>(destination, to, i, length - i, v);
}

}  // namespace
}  // namespace tandem
