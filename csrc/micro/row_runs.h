// Rows of bf16 or f32 elements as runs of 16 lanes, whatever their length: what norm, rotation and attention share.
#pragma once

#include "abi/dense_kernels.h"
#include "isa/inline.h"

namespace tandem {
namespace {

constexpr int element_bytes(DType type) { return type == DType::bf16 ? 2 : 4; }

template <class Isa>
struct Rows {
  using Vec = typename Isa::Vec;

  template <DType type>
  TANDEM_INLINE static Vec load(const void* p, int64_t i) {
    if constexpr (type == DType::bf16)
      return Isa::load_bf16(static_cast<const uint16_t*>(p) + i);
    else
      return Isa::load(static_cast<const float*>(p) + i);
  }

  template <DType type>
  TANDEM_INLINE static void store(void* p, int64_t i, Vec x) {
    if constexpr (type == DType::bf16)
      Isa::store_bf16(static_cast<uint16_t*>(p) + i, x);
    else
      Isa::store(static_cast<float*>(p) + i, x);
  }

  // Elements [i, i + n), n <= 16; zeros beyond n.
  template <DType type>
  TANDEM_INLINE static Vec load_n(const void* p, int64_t i, int64_t n) {
    if (n == kRowLanes) return load<type>(p, i);
    alignas(64) unsigned char run[4 * kRowLanes] = {};
    __builtin_memcpy(run, static_cast<const char*>(p) + i * element_bytes(type), n * element_bytes(type));
    return load<type>(run, 0);
  }

  template <DType type>
  TANDEM_INLINE static void store_n(void* p, int64_t i, int64_t n, Vec x) {
    if (n == kRowLanes) return store<type>(p, i, x);
    alignas(64) unsigned char run[4 * kRowLanes];
    store<type>(run, 0, x);
    __builtin_memcpy(static_cast<char*>(p) + i * element_bytes(type), run, n * element_bytes(type));
  }

  // What x becomes when it is stored and loaded again.
  template <DType type>
  TANDEM_INLINE static Vec rounded(Vec x) {
    if constexpr (type == DType::f32) return x;
    alignas(64) uint16_t run[kRowLanes];
    Isa::store_bf16(run, x);
    return Isa::load_bf16(run);
  }

  // body(i, n) for each run of n <= 16 elements.
  template <class Body>
  TANDEM_INLINE static void for_runs(int64_t count, Body body) {
    int64_t i = 0;
    for (; i + kRowLanes <= count; i += kRowLanes) body(i, int64_t{kRowLanes});
    if (i < count) body(i, count - i);
  }
};

}  // namespace
}  // namespace tandem
