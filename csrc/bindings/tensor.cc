#include "bindings/tensor.h"

#include "bindings/recording.h"

namespace nb = nanobind;

namespace tandem {
namespace {

// The part of DLPack's C ABI (dmlc/dlpack, dlpack.h 1.3) that is read here.
struct DlDevice {
  int32_t type, id;
};
struct DlDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DlExchangeTable {
  uint32_t major, minor;
  void* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, DlTensor* out);
};

constexpr int kCpuDevice = 1;

// The exchange table of a type, or null. The types of a process are few and live for ever; the last one is remembered.
const DlExchangeTable* exchange_table(PyTypeObject* type) {
  static PyTypeObject* known_type = nullptr;
  static const DlExchangeTable* known_table = nullptr;
  if (type == known_type) return known_table;
  const nb::object capsule =
      nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* table = static_cast<const DlExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table->major != 1 || !table->tensor_from_object) return nullptr;
  known_type = type;
  known_table = table;
  return table;
}

const char* name_of(Element element) {
  const char* const names[] = {"float32", "bfloat16", "int32", "int64", "int8 or uint8", "float16"};
  return names[int(element)];
}

[[noreturn]] void refuse(const char* name, const std::string& why) { throw KernelError(std::string(name) + why); }

Element element_of(int code, int bits, const char* name) {
  const auto is = [=](nb::dlpack::dtype_code c, int b) { return code == int(c) && bits == b; };
  if (is(nb::dlpack::dtype_code::Float, 32)) return Element::f32;
  if (is(nb::dlpack::dtype_code::Float, 16)) return Element::f16;
  if (is(nb::dlpack::dtype_code::Bfloat, 16)) return Element::bf16;
  if (is(nb::dlpack::dtype_code::Int, 32)) return Element::i32;
  if (is(nb::dlpack::dtype_code::Int, 64)) return Element::i64;
  if (is(nb::dlpack::dtype_code::Int, 8) || is(nb::dlpack::dtype_code::UInt, 8)) return Element::byte;
  refuse(name, ": element type not supported; take float32, bfloat16, int32, int64, int8 or uint8");
}

template <class Shape, class Strides>
void copy_shape(TensorView& view, int dims, Shape shape, Strides stride, const char* name, bool apart) {
  if (dims > 4) refuse(name, " has " + std::to_string(dims) + " dimensions; at most 4 are taken");
  view.dims = dims;
  int64_t expected = 1;
  bool contiguous = true;
  for (int i = dims - 1; i >= 0; --i) {
    view.shape[i] = shape(i);
    contiguous &= view.shape[i] < 2 || stride(i) == expected || (apart && i == 0);
    expected *= view.shape[i];
  }
  view.row_stride = dims && view.shape[0] ? (view.shape[0] < 2 ? expected / view.shape[0] : stride(0)) : 0;
  // An array without elements (expected is 0) has no order; its strides may be anything.
  if (!contiguous && expected != 0) refuse(name, " is not contiguous; call .contiguous() first");
}

TensorView through_table(const DlExchangeTable& table, nb::handle array, const char* name, bool apart) {
  DlTensor t{};
  if (table.tensor_from_object(array.ptr(), &t) != 0) throw nb::python_error();
  if (t.device.type != kCpuDevice) refuse(name, " is not in CPU memory");
  TensorView view;
  view.data = static_cast<uint8_t*>(t.data) + t.byte_offset;
  view.element = element_of(t.dtype.code, t.dtype.bits, name);
  copy_shape(
      view, t.ndim, [&](int i) { return t.shape[i]; }, [&](int i) { return t.strides ? t.strides[i] : -1; }, name,
      apart);
  return view;
}

TensorView through_protocol(nb::handle array, const char* name, bool writable, bool apart) {
  TensorView view;
  if (writable) {
    if (!nb::try_cast(array, view.owner))
      throw nb::type_error((std::string(name) + " is not a writable array").c_str());
  } else {
    nb::ndarray<nb::ro> borrowed;
    if (!nb::try_cast(array, borrowed)) throw nb::type_error((std::string(name) + " is not an array").c_str());
    view.owner = nb::ndarray<>(borrowed);
  }
  if (view.owner.device_type() != nb::device::cpu::value) refuse(name, " is not in CPU memory");
  view.data = view.owner.data();
  view.element = element_of(view.owner.dtype().code, view.owner.dtype().bits, name);
  copy_shape(
      view, int(view.owner.ndim()), [&](int i) { return int64_t(view.owner.shape(size_t(i))); },
      [&](int i) { return view.owner.stride(size_t(i)); }, name, apart);
  return view;
}

std::string shape_text(const int64_t* shape, size_t dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims; ++i)
    text += (i ? ", " : "") + (shape[i] == kAnySize ? std::string("any") : std::to_string(shape[i]));
  return text + "]";
}

void check(const TensorView& view, const char* name, std::initializer_list<Element> elements,
           std::initializer_list<int64_t> shape) {
  bool same = view.dims == int(shape.size());
  for (size_t i = 0; same && i < shape.size(); ++i)
    same = shape.begin()[i] == kAnySize || shape.begin()[i] == view.shape[i];
  if (!same)
    refuse(name, " has shape " + shape_text(view.shape, size_t(view.dims)) + "; expected " +
                     shape_text(shape.begin(), shape.size()));
  std::string allowed;
  for (const Element element : elements) {
    if (element == view.element) return;
    allowed += (allowed.empty() ? "" : " or ") + std::string(name_of(element));
  }
  refuse(name, std::string(" is ") + name_of(view.element) + "; expected " + allowed);
}

}  // namespace

namespace {

TensorView viewed(nb::handle array, const char* name, std::initializer_list<Element> elements,
                  std::initializer_list<int64_t> shape, bool writable, bool apart) {
  const DlExchangeTable* table = exchange_table(Py_TYPE(array.ptr()));
  TensorView view = table ? through_table(*table, array, name, apart) : through_protocol(array, name, writable, apart);
  check(view, name, elements, shape);
  if (Recording* recording = Recording::current()) recording->keep(array);
  return view;
}

}  // namespace

TensorView view_of(nb::handle array, const char* name, std::initializer_list<Element> elements,
                   std::initializer_list<int64_t> shape, bool writable) {
  return viewed(array, name, elements, shape, writable, false);
}

TensorView slots_of(nb::handle array, const char* name, std::initializer_list<Element> elements,
                    std::initializer_list<int64_t> shape) {
  return viewed(array, name, elements, shape, true, true);
}

const float* optional_floats(nb::handle array, const char* name, int64_t length, TensorView* view) {
  if (array.is_none()) return nullptr;
  *view = view_of(array, name, {Element::f32}, {length});
  return static_cast<const float*>(view->data);
}

}  // namespace tandem
