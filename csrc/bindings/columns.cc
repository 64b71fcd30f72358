#include "ops/columns.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>

#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor.h"

namespace nb = nanobind;

namespace tandem {
namespace {

struct PooledColumns {
  std::shared_ptr<WorkerPool> pool;
  Columns columns;
};

void make_columns(PooledColumns* self, std::shared_ptr<WorkerPool> pool,
                  const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>& runs) {
  std::vector<ColumnRun> made;
  for (const auto& [source, step, target, count] : runs) made.push_back({source, step, target, count});
  new (self) PooledColumns{std::move(pool), Columns(std::move(made))};
}

void copy(const PooledColumns& self, nb::handle x, nb::handle out) {
  const TensorView in = view_of(x, "x", {Element::bf16, Element::f32}, {kAnySize, kAnySize});
  const TensorView y = view_of(out, "out", {in.element}, {in.shape[0], kAnySize}, true);
  if (in.shape[1] < self.columns.source_columns() || y.shape[1] < self.columns.target_columns())
    throw KernelError("columns: the arrays have fewer columns than are copied");
  const int64_t bytes = in.element == Element::bf16 ? 2 : 4;
  perform(self, [&self, in = in.data, from = in.shape[1], y = y.data, to = y.shape[1], rows = in.shape[0], bytes] {
    self.columns.copy(*self.pool, in, from, y, to, rows, bytes);
  });
}

}  // namespace

void bind_columns(nb::module_& m) {
  nb::class_<PooledColumns>(m, "Columns", "Runs (source, step, target, count) of columns, from one array to another.")
      .def("__init__", &make_columns, nb::arg("pool"), nb::arg("runs"))
      .def("copy", &copy, nb::arg("x"), nb::arg("out"),
           "out[:, target + i] = x[:, source + i * step], i < count; other columns of out stay as they are.");
}

}  // namespace tandem
