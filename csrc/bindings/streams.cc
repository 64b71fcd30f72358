// Streams that stand for one residual: arrays in, checked, and nothing else.
#include "ops/streams.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor.h"
#include "runtime/tiers.h"

namespace nb = nanobind;

namespace tandem {
namespace {

struct Streams {
  Streams(std::shared_ptr<WorkerPool> workers, const std::string& tier, int64_t streams, int64_t hidden,
          int64_t iterations, float eps, float norm_eps)
      : pool(std::move(workers)), dense{*pool, dense_kernels(tier)}, shape{streams, hidden, iterations, eps, norm_eps} {
    if (streams < 1 || hidden < 1 || iterations < 1)
      throw KernelError("streams: their number, their channels and the iterations must be positive");
  }

  void widen(nb::handle x, nb::handle wide, nb::handle norms) const {
    const TensorView in = rows_of(x, "x");
    const int64_t rows = in.shape[0];
    const TensorView w = view_of(wide, "wide", {Element::f32}, {rows, shape.row()}, true);
    const TensorView s = view_of(norms, "norms", {Element::f32}, {rows}, true);
    perform(*this, [this, x = in.data, rows, wide = floats(w), norms = floats(s), type = in.type()] {
      widen_streams(dense, shape, x, rows, wide, norms, type);
    });
  }

  // share and mixing None: nothing follows.
  void enter(nb::handle x, nb::handle sums, nb::handle norms, nb::handle scale, nb::handle base, nb::handle out,
             nb::handle share, nb::handle mixing) const {
    const TensorView in = rows_of(x, "x");
    const int64_t rows = in.shape[0], n = shape.streams, least = share.is_none() ? n : shape.weights();
    const TensorView made = view_of(sums, "sums", {Element::f32}, {rows, kAnySize});
    if (made.shape[1] < least) throw KernelError("streams: the sums have fewer columns than weights are made of");
    const TensorView norm = view_of(norms, "norms", {Element::f32}, {rows});
    const TensorView factor = view_of(scale, "scale", {Element::f32}, {made.shape[1]});
    const TensorView addend = view_of(base, "base", {Element::f32}, {made.shape[1]});
    const TensorView y = view_of(out, "out", {in.element}, {rows, shape.hidden}, true);
    TensorView s, m;
    if (!share.is_none()) {
      s = view_of(share, "share", {Element::f32}, {rows, n}, true);
      m = view_of(mixing, "mixing", {Element::f32}, {rows, n, n}, true);
    }
    const StreamsMade call{floats(made), floats(norm), floats(factor), floats(addend), made.shape[1]};
    perform(*this, [this, x = in.data, rows, call, y = y.data, s = floats(s), m = floats(m), type = in.type()] {
      enter_streams(dense, shape, x, rows, call, y, s, m, type);
    });
  }

  void leave(nb::handle x, nb::handle y, nb::handle share, nb::handle mixing, nb::handle out) const {
    const TensorView in = rows_of(x, "x");
    const int64_t rows = in.shape[0], n = shape.streams;
    const TensorView result = view_of(y, "y", {in.element}, {rows, shape.hidden});
    const TensorView s = view_of(share, "share", {Element::f32}, {rows, n});
    const TensorView m = view_of(mixing, "mixing", {Element::f32}, {rows, n, n});
    const TensorView to = view_of(out, "out", {in.element}, {rows, n, shape.hidden}, true);
    perform(*this, [this, x = in.data, y = result.data, rows, s = floats(s), m = floats(m), to = to.data,
                    type = in.type()] { leave_streams(dense, shape, x, y, rows, s, m, to, type); });
  }

  std::shared_ptr<WorkerPool> pool;
  DenseOps dense;
  StreamsShape shape;

 private:
  TensorView rows_of(nb::handle x, const char* name) const {
    return view_of(x, name, {Element::bf16, Element::f32}, {kAnySize, shape.streams, shape.hidden});
  }
  static float* floats(const TensorView& view) { return static_cast<float*>(view.data); }
};

}  // namespace

void bind_streams(nb::module_& m) {
  nb::class_<Streams>(m, "Streams", "Several streams in place of one residual: summed up for a block, and mixed.")
      .def(nb::init<std::shared_ptr<WorkerPool>, const std::string&, int64_t, int64_t, int64_t, float, float>(),
           nb::arg("pool"), nb::arg("tier"), nb::arg("streams"), nb::arg("hidden"), nb::arg("iterations"),
           nb::arg("eps"), nb::arg("norm_eps"))
      .def("widen", &Streams::widen, nb::arg("x"), nb::arg("wide"), nb::arg("norms"),
           "x [T, n, hidden] to float32 [T, n * hidden]; norms [T]: 1 over the root of each row's mean square.")
      .def("enter", &Streams::enter, nb::arg("x"), nb::arg("sums"), nb::arg("norms"), nb::arg("scale"), nb::arg("base"),
           nb::arg("out"), nb::arg("share").none(), nb::arg("mixing").none(),
           "Weights sums * norms * scale + base: out [T, hidden], and how a block's result returns; None: it does not.")
      .def("leave", &Streams::leave, nb::arg("x"), nb::arg("y"), nb::arg("share"), nb::arg("mixing"), nb::arg("out"),
           "out [T, n, hidden]: x mixed, and y [T, hidden] shared out.");
}

}  // namespace tandem
