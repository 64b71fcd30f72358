// What a vision tower has between its products: arrays in, checked, and nothing else.
#include "ops/patches.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "runtime/tiers.h"

namespace nb = nanobind;

namespace tandem {
namespace {

struct PooledPatches {
  PooledPatches(std::shared_ptr<WorkerPool> workers, const std::string& tier)
      : pool(std::move(workers)), ops{*pool, dense_kernels(tier)} {}

  void split(nb::handle qkv, nb::handle cos, nb::handle sin, int64_t first, nb::handle q, nb::handle k,
             nb::handle v) const {
    const TensorView in = activations(qkv, "qkv", {kAnySize, 3, kAnySize, kAnySize});
    const int64_t rows = in.shape[0], heads = in.shape[2], width = in.shape[3];
    const TensorView c = view_of(cos, "cos", {Element::f32}, {kAnySize, width / 2});
    const TensorView s = view_of(sin, "sin", {Element::f32}, {c.shape[0], width / 2});
    const TensorView keys = like(in, k, "k", {heads, c.shape[0], width}, true);
    const TensorView values = like(in, v, "v", {heads, c.shape[0], width}, true);
    const TensorView asked = like(in, q, "q", {heads, rows, width}, true);
    expect(width % 2 == 0, "patches: heads of an odd width do not turn");
    expect(first >= 0 && first + rows <= c.shape[0], "patches: rows lie beyond the image");
    const PatchOps::Split call{in.data,
                               static_cast<float*>(c.data),
                               static_cast<float*>(s.data),
                               rows,
                               heads,
                               width / 2,
                               first,
                               c.shape[0],
                               asked.data,
                               keys.data,
                               values.data,
                               in.type()};
    nb::gil_scoped_release unlocked;
    ops.split(call);
  }

  void layer_norm(nb::handle x, nb::handle weight, nb::handle bias, nb::handle out, float eps) const {
    const TensorView in = activations(x, "x", {kAnySize, kAnySize});
    const int64_t rows = in.shape[0], n = in.shape[1];
    const TensorView w = like(in, weight, "weight", {n}), b = like(in, bias, "bias", {n});
    const TensorView y = like(in, out, "out", {rows, n}, true);
    nb::gil_scoped_release unlocked;
    ops.layer_norm(in.data, w.data, b.data, y.data, rows, n, eps, in.type());
  }

  void gelu(nb::handle x, nb::handle out) const {
    const TensorView in = activations(x, "x", {kAnySize, kAnySize});
    const TensorView y = like(in, out, "out", {in.shape[0], in.shape[1]}, true);
    nb::gil_scoped_release unlocked;
    ops.gelu(in.data, y.data, in.shape[0], in.shape[1], in.type());
  }

  std::shared_ptr<WorkerPool> pool;
  PatchOps ops;
};

}  // namespace

void bind_patches(nb::module_& m) {
  nb::class_<PooledPatches>(m, "PatchOps",
                            "Operations between a vision tower's products, on a pool: arrays of bfloat16 or float32.")
      .def(nb::init<std::shared_ptr<WorkerPool>, const std::string&>(), nb::arg("pool"), nb::arg("tier"))
      .def("split", &PooledPatches::split, nb::arg("qkv"), nb::arg("cos"), nb::arg("sin"), nb::arg("first"),
           nb::arg("q"), nb::arg("k"), nb::arg("v"),
           "qkv [n, 3, heads, d] of patches first, first + 1 …; cos, sin float32 [patches, d / 2]. Writes q [heads, n, "
           "d],\nand rows first … of k and v [heads, patches, d]. q and k are turned.")
      .def("layer_norm", &PooledPatches::layer_norm, nb::arg("x"), nb::arg("weight"), nb::arg("bias"), nb::arg("out"),
           nb::arg("eps"), "x, out [n, width], which may be the same.")
      .def("gelu", &PooledPatches::gelu, nb::arg("x"), nb::arg("out"),
           "By tanh; x, out [n, width], which may be the same.");
}

}  // namespace tandem
