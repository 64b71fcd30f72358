#include "bindings/codes.h"

#include <nanobind/stl/string.h>

#include "bindings/bindings.h"
#include "bindings/names.h"
#include "format/codes.h"

namespace nb = nanobind;

namespace tandem {
namespace {

void make_codes(CodeArrays* self, nb::object codes, nb::object scales, nb::object offsets, const std::string& format,
                int group, const std::string& scale_type, int64_t block_rows) {
  if (block_rows < 1) throw KernelError("block_rows is " + std::to_string(block_rows) + "; it must be at least 1");
  const WeightFormat weights{format_named(format), group, scale_type_named(scale_type)};
  new (self) CodeArrays{std::move(codes), std::move(scales), std::move(offsets), weights, block_rows};
}

}  // namespace

MatrixSource source_of_codes(const CodeArrays& w, const std::string& prefix, int64_t rows, int64_t depth,
                             SourceViews* views) {
  packed_layout(w.format, rows, depth);  // throws for sizes and groups that do not exist
  const int64_t width = is_nibble(w.format.format) ? (depth + 1) / 2 : depth;
  const int64_t blocks = (rows + w.block_rows - 1) / w.block_rows, groups = groups_along(depth, w.format.group);
  const Element scale = w.format.scale_type == DType::f32 ? Element::f32 : Element::bf16;
  const std::string codes = prefix + "codes", scales = prefix + "scales", offsets = prefix + "offsets";
  views->codes = view_of(w.codes, codes.c_str(), {Element::byte}, {rows, width});
  views->scales = view_of(w.scales, scales.c_str(), {scale}, {blocks, groups});
  if (w.offsets.is_none() == (w.format.format == Format::uint4))
    throw KernelError(offsets +
                      (w.offsets.is_none() ? " are missing: uint4 weights need them" : " are only for uint4 weights"));
  if (!w.offsets.is_none()) views->offsets = view_of(w.offsets, offsets.c_str(), {Element::f32}, {blocks, groups});
  const StoredCodes stored{static_cast<const uint8_t*>(views->codes.data), views->scales.data, w.format, w.block_rows,
                           static_cast<const float*>(views->offsets.data)};
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
          [](WeightFormat* self, const std::string& format, int group, const std::string& scale_type) {
            new (self) WeightFormat{format_named(format), group, scale_type_named(scale_type)};
          },
          nb::arg("format"), nb::arg("group"), nb::arg("scale_type"))
      .def("__eq__",
           [](const WeightFormat& a, nb::handle b) {
             return nb::isinstance<WeightFormat>(b) && a == nb::cast<const WeightFormat&>(b);
           })
      .def("__str__", &described);
  nb::class_<CodeArrays>(m, "Codes", "A quantised matrix: codes and scales in arrays that this keeps alive.")
      .def("__init__", &make_codes, nb::arg("codes"), nb::arg("scales"), nb::arg("offsets").none(), nb::arg("format"),
           nb::arg("group"), nb::arg("scale_type"), nb::arg("block_rows") = 1,
           "codes: bytes [rows, depth], or for 4 bits [rows, ceil(depth / 2)].")
      .def_ro("format", &CodeArrays::format);
}

}  // namespace tandem
