// Arrays of a step, as several topics check them.
#pragma once

#include "bindings/tensor.h"

namespace tandem {

inline void expect(bool ok, const char* what) {
  if (!ok) throw KernelError(what);
}

inline TensorView activations(nanobind::handle array, const char* name, std::initializer_list<int64_t> shape) {
  return view_of(array, name, {Element::bf16, Element::f32}, shape);
}

// An array of the same element type as `x`.
inline TensorView like(const TensorView& x, nanobind::handle array, const char* name,
                       std::initializer_list<int64_t> shape, bool writable = false) {
  return view_of(array, name, {x.element}, shape, writable);
}

}  // namespace tandem
