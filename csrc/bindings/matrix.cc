#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/codes.h"
#include "bindings/names.h"
#include "bindings/recording.h"
#include "bindings/tensor.h"
#include "ops/matrix.h"
#include "runtime/tiers.h"

namespace nb = nanobind;

namespace tandem {
namespace {

void make_matrix(PackedMatrix* self, std::shared_ptr<Workspace> workspace, const nb::list& weights, nb::handle bias,
                 const WeightFormat& format) {
  if (weights.size() == 0) throw KernelError("a matrix has at least one block of rows");
  std::vector<TensorView> views;
  std::vector<MatrixSource> blocks;
  int64_t rows = 0;
  for (nb::handle weight : weights) {
    const TensorView& w =
        views.emplace_back(view_of(weight, "weight", {Element::f32, Element::bf16}, {kAnySize, kAnySize}));
    blocks.push_back({w.data, w.type(), w.shape[0], w.shape[1]});
    rows += w.shape[0];
  }
  TensorView b;
  const float* bias_data = optional_floats(bias, "bias", rows, &b);
  const nb::gil_scoped_release unlocked;
  new (self) PackedMatrix(std::move(workspace), blocks, bias_data, format);
}

std::unique_ptr<PackedMatrix> matrix_from_codes(std::shared_ptr<Workspace> workspace, const CodeArrays& codes,
                                                int64_t rows, int64_t depth, nb::handle bias) {
  SourceViews views;
  const MatrixSource source = source_of_codes(codes, "", rows, depth, &views);
  TensorView b;
  const float* bias_data = optional_floats(bias, "bias", rows, &b);
  const nb::gil_scoped_release unlocked;
  return std::make_unique<PackedMatrix>(std::move(workspace), std::vector{source}, bias_data, codes.format);
}

void multiply(const PackedMatrix& self, nb::handle x, nb::handle out, bool int8_activations) {
  const TensorView in = view_of(x, "x", {Element::bf16, Element::f32}, {kAnySize, self.layout().depth});
  const TensorView y = view_of(out, "out", {Element::bf16, Element::f32}, {in.shape[0], self.layout().columns}, true);
  const RowsView rows{in.data, in.type(), in.shape[0], in.shape[1]};
  perform(self, [&self, rows, to = y.data, type = y.type(), int8_activations] {
    self.multiply(rows, to, type, int8_activations);
  });
}

void multiply_heads(const PackedMatrix& self, nb::handle x, nb::handle out) {
  const TensorView in = view_of(x, "x", {Element::bf16, Element::f32}, {kAnySize, kAnySize, self.layout().depth});
  const int64_t heads = in.shape[1], columns = heads ? self.layout().columns / heads : 0;
  if (heads == 0 || columns * heads != self.layout().columns || columns % kPairColumns != 0)
    throw std::invalid_argument("multiply_heads: every head needs as many rows, a multiple of 32");
  const TensorView y = view_of(out, "out", {Element::bf16, Element::f32}, {in.shape[0], heads, columns}, true);
  const RowsView rows{in.data, in.type(), in.shape[0] * heads, in.shape[2]};
  perform(self, [&self, rows, heads, to = y.data, type = y.type()] { self.multiply_heads(rows, heads, to, type); });
}

void dequantise(const PackedMatrix& self, nb::handle out) {
  const TensorView y = view_of(out, "out", {Element::f32}, {self.layout().columns, self.layout().depth}, true);
  const nb::gil_scoped_release unlocked;
  self.dequantise(static_cast<float*>(y.data));
}

}  // namespace

void bind_matrix(nb::module_& m) {
  nb::class_<Workspace>(m, "Workspace", "A worker pool, the kernels of a tier, and scratch for one call at a time.")
      .def(
          "__init__",
          [](Workspace* self, std::shared_ptr<WorkerPool> pool, const std::string& tier, int tile_from_rows,
             int digits_below_rows, bool one_way) {
            new (self) Workspace(std::move(pool), table_of_tier(tier), tile_from_rows, digits_below_rows, one_way);
          },
          nb::arg("pool"), nb::arg("tier"), nb::arg("tile_from_rows") = -1, nb::arg("digits_below_rows") = -1,
          nb::arg("one_way") = false,
          "Numbers >= 0 replace the tier's own choice of algorithm; one_way: none depends on the number of rows.")
      .def_prop_ro("tier", [](const Workspace& self) { return name_of(self.table().tier); })
      .def(
          "tile_from_rows",
          [](const Workspace& self, const std::string& format) {
            return self.table().formats[int(format_named(format))].tile_from_rows;
          },
          nb::arg("format"), "From this many rows on, tile_mm is used.")
      .def(
          "multiply_add",
          [](Workspace& self, int64_t rounds, const std::string& format, bool int8_activations) {
            const Format known = format_named(format);
            const nb::gil_scoped_release unlocked;
            return self.multiply_add(rounds, known, int8_activations);
          },
          nb::arg("rounds"), nb::arg("format"), nb::arg("int8_activations") = false,
          "Multiply-adds in registers on all workers, in the format's compute type or of integers: how many.");
  nb::class_<PackedMatrix>(m, "PackedMatrix", "A packed weight matrix [N, K].")
      .def("__init__", &make_matrix, nb::arg("workspace"), nb::arg("weights"), nb::arg("bias").none(),
           nb::arg("format"), "Of blocks of rows that follow each other; all but the last of a multiple of 16 rows.")
      .def_static("from_codes", &matrix_from_codes, nb::arg("workspace"), nb::arg("codes"), nb::arg("rows"),
                  nb::arg("depth"), nb::arg("bias").none(), "Of codes and scales, as they are.")
      .def("multiply", &multiply, nb::arg("x"), nb::arg("out"), nb::arg("int8_activations") = false,
           "out[T, N] = x[T, K] @ weight.T + bias")
      .def_prop_ro("bytes", &PackedMatrix::bytes)
      .def("read_next", &PackedMatrix::read_next, nb::arg("upcoming"),
           "Weights that are read after this matrix: idle workers fetch them.")
      .def("multiply_heads", &multiply_heads, nb::arg("x"), nb::arg("out"),
           "out[T, H, N / H] = x[T, H, K], each head times its own N / H rows of the matrix")
      .def("dequantise", &dequantise, nb::arg("out"), "The weights that the codes stand for, float32 [N, K].")
      .def_prop_ro("tier", [](const PackedMatrix& self) { return name_of(self.workspace().table().tier); })
      .def(
          "layout", [](const PackedMatrix& self) { return layout_of(self.layout()); }, "See csrc/bindings/names.h.")
      .def_prop_ro("packed_bytes", [](const PackedMatrix& self) { return packed_bytes(self.layout()); })
      .def_prop_ro("shape",
                   [](const PackedMatrix& self) { return nb::make_tuple(self.layout().columns, self.layout().depth); });
}

}  // namespace tandem
