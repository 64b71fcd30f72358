// Rounding for checkpoints: arrays in, checked, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "ops/dense.h"
#include "runtime/tiers.h"

namespace nb = nanobind;

namespace tandem {
namespace {

void fit_groups(const std::string& tier, nb::handle weights, nb::handle importance, nb::handle codes, nb::handle scales,
                float low, float high, const std::vector<float>& targets) {
  const DenseKernels& kernels = dense_kernels(tier);
  const TensorView w = view_of(weights, "weights", {Element::f32}, {kAnySize, kAnySize});
  const int64_t rows = w.shape[0], columns = w.shape[1];
  const TensorView q = view_of(codes, "codes", {Element::byte}, {rows, columns}, true);
  const TensorView s = view_of(scales, "scales", {Element::bf16}, {rows, kAnySize}, true);
  const int64_t per_row = s.shape[1], group = per_row ? columns / per_row : 0;
  if (group < 16 || group > 256 || group % 16 || group * per_row != columns)
    throw KernelError("scales must be [rows, columns / group], with a group of 16 to 256 in steps of 16");
  TensorView h;
  const float* share = optional_floats(importance, "importance", columns, &h);
  const GroupFit fit{static_cast<const float*>(w.data),
                     share,
                     rows * per_row,
                     per_row,
                     group,
                     {low, high, targets.data(), int32_t(targets.size())},
                     static_cast<int8_t*>(q.data),
                     static_cast<uint16_t*>(s.data)};
  const nb::gil_scoped_release unlocked;
  kernels.fit_groups(&fit);
}

}  // namespace

void bind_fit(nb::module_& m) {
  m.def(
      "fit_groups", &fit_groups, nb::arg("tier"), nb::arg("weights"), nb::arg("importance").none(), nb::arg("codes"),
      nb::arg("scales"), nb::arg("low"), nb::arg("high"), nb::arg("targets"),
      "Fills codes int8 [n, K] and scales bfloat16 [n, K / group] for weights float32 [n, K], on the calling thread.");
}

}  // namespace tandem
