// Arrays of any library as plain views, checked, for the length of a call.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "abi/weight_view.h"

namespace tandem {

// Becomes tandem.errors.KernelError in Python.
struct KernelError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

constexpr int64_t kAnySize = -1;

enum class Element { f32, bf16, i32, i64, byte, f16 };

// A C-contiguous array in CPU memory. `owner` keeps borrowed memory alive where the array's library needs that.
struct TensorView {
  void* data = nullptr;
  Element element = Element::f32;
  int dims = 0;
  int64_t shape[4] = {};
  int64_t row_stride = 0;  // elements from one entry of the first dimension to the next
  nanobind::ndarray<> owner;

  DType type() const { return element == Element::bf16 ? DType::bf16 : DType::f32; }
};

// The view of `array`, which must have one of `elements` and the given shape (kAnySize: any). Throws KernelError that
// calls it `name`, or TypeError if it is no array. torch tensors come through the DLPack exchange table of their type
// (0.1 us; `__dlpack__` takes 3 us, and decoding makes hundreds of calls per token).
TensorView view_of(nanobind::handle array, const char* name, std::initializer_list<Element> elements,
                   std::initializer_list<int64_t> shape, bool writable = false);

// The same for an array of slots: entries of its first dimension may lie apart.
TensorView slots_of(nanobind::handle array, const char* name, std::initializer_list<Element> elements,
                    std::initializer_list<int64_t> shape);

// None, or [length] float.
const float* optional_floats(nanobind::handle array, const char* name, int64_t length, TensorView* view);

}  // namespace tandem
