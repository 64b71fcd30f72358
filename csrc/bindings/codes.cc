#include "bindings/codes.h"

#include <nanobind/stl/string.h>

#include "bindings/bindings.h"
#include "bindings/names.h"
#include "format/codes.h"

namespace nb = nanobind;

namespace tandem {
namespace {

void make_codes(CodeArrays* self, nb::object codes, nb::object scales, nb::object offsets, const std::string& format,
                int group, const std::string& scale_type, int64_t block_rows, nb::object halves,
                nb::object offset_halves, nb::object zeros, nb::object factors) {
  if (block_rows < 1) throw KernelError("block_rows is " + std::to_string(block_rows) + "; it must be at least 1");
  if (!offsets.is_none() && !zeros.is_none()) throw KernelError("weights have offsets or zero points, not both");
  const bool no_offsets = offsets.is_none() && offset_halves.is_none();
  ShiftType shift_type = no_offsets ? ShiftType::none : ShiftType::as_scales;
  if (!zeros.is_none()) shift_type = ShiftType::zeros;
  const WeightFormat weights{format_named(format), group, scale_type_named(scale_type), shift_type};
  new (self) CodeArrays{std::move(codes),
                        std::move(scales),
                        std::move(offsets),
                        std::move(halves),
                        std::move(offset_halves),
                        std::move(zeros),
                        std::move(factors),
                        weights,
                        block_rows};
}

Element element_of(ScaleType type) {
  if (type == ScaleType::f32) return Element::f32;
  if (type == ScaleType::bf16) return Element::bf16;
  return type == ScaleType::f16 ? Element::f16 : Element::byte;
}

const uint16_t* halves_of(nb::handle halves, const std::string& name, int64_t blocks, int64_t groups, ScaleType type,
                          TensorView* view) {
  const int shared = groups_per_half(type);
  *view = view_of(halves, (name + "' halves").c_str(), {Element::f16}, {blocks, (groups + shared - 1) / shared});
  return static_cast<const uint16_t*>(view->data);
}

// Scales or offsets, [blocks, groups], and the halves that groups share.
StoredScales scales_of(nb::handle values, nb::handle halves, const std::string& name, int64_t blocks, int64_t groups,
                       ScaleType type, TensorView* view, TensorView* half_view) {
  *view = view_of(values, name.c_str(), {element_of(type)}, {blocks, groups});
  if (!groups_per_half(type)) return {view->data, nullptr, nullptr};
  return {view->data, halves_of(halves, name, blocks, groups, type, half_view), nullptr};
}

}  // namespace

MatrixSource source_of_codes(const CodeArrays& w, const std::string& prefix, int64_t rows, int64_t depth,
                             SourceViews* views) {
  packed_layout(w.format, rows, depth);  // throws for sizes and groups that do not exist
  const int64_t width = row_bytes_of(w.format.format, depth);
  const int64_t blocks = (rows + w.block_rows - 1) / w.block_rows, groups = groups_along(depth, w.format.group);
  const std::string codes = prefix + "codes", scales = prefix + "scales", offsets = prefix + "offsets";
  views->codes = view_of(w.codes, codes.c_str(), {Element::byte}, {rows, width});
  const ScaleType type = w.format.scale_type;
  StoredCodes stored{static_cast<const uint8_t*>(views->codes.data), {}, {}, w.format, w.block_rows};
  stored.scales = scales_of(w.scales, w.halves, scales, blocks, groups, type, &views->scales, &views->halves);
  if (type == ScaleType::e4m3) {
    views->factors = view_of(w.factors, (prefix + "factors").c_str(), {Element::f32}, {blocks});
    stored.scales.factors = static_cast<const float*>(views->factors.data);
  }
  if (w.format.shift_type == ShiftType::zeros) {
    views->offsets = view_of(w.zeros, (prefix + "zeros").c_str(), {Element::byte}, {blocks, groups});
    stored.shifts.values = views->offsets.data;
  }
  if (type == ScaleType::nibbles16)
    stored.shifts.halves = halves_of(w.offset_halves, offsets, blocks, groups, type, &views->offset_halves);
  else if (w.format.shift_type == ShiftType::as_scales)
    stored.shifts =
        scales_of(w.offsets, w.offset_halves, offsets, blocks, groups, type, &views->offsets, &views->offset_halves);
  return {nullptr, DType::f32, rows, depth, stored};
}

MatrixSource source_of(nb::handle weight, const std::string& name, int64_t rows, int64_t depth, SourceViews* views) {
  if (nb::isinstance<CodeArrays>(weight))
    return source_of_codes(nb::cast<const CodeArrays&>(weight), name + " ", rows, depth, views);
  views->numbers = view_of(weight, name.c_str(), {Element::f32, Element::bf16}, {rows, depth});
  return {views->numbers.data, views->numbers.type(), rows, depth};
}

void bind_codes(nb::module_& m) {
  nb::class_<WeightFormat>(m, "WeightFormat", "How a matrix is packed: what a code is, weights per scale, scale type.")
      .def(
          "__init__",
          [](WeightFormat* self, const std::string& format, int group, const std::string& scales) {
            new (self) WeightFormat(weight_format_named(format, group, scales));
          },
          nb::arg("format"), nb::arg("group"), nb::arg("scales"),
          "scales: their type, with +offsets or +zeros behind it where something is added.")
      .def("__eq__",
           [](const WeightFormat& a, nb::handle b) {
             return nb::isinstance<WeightFormat>(b) && a == nb::cast<const WeightFormat&>(b);
           })
      .def("__str__", &described);
  nb::class_<CodeArrays>(m, "Codes", "A quantised matrix: codes and scales in arrays that this keeps alive.")
      .def("__init__", &make_codes, nb::arg("codes"), nb::arg("scales"), nb::arg("offsets").none(), nb::arg("format"),
           nb::arg("group"), nb::arg("scale_type"), nb::arg("block_rows") = 1, nb::arg("halves").none() = nb::none(),
           nb::arg("offset_halves").none() = nb::none(), nb::arg("zeros").none() = nb::none(),
           nb::arg("factors").none() = nb::none(), "codes: bytes [rows, depth], or for 4 bits [rows, ceil(depth / 2)].")
      .def_ro("format", &CodeArrays::format);
}

}  // namespace tandem
