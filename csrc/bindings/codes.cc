#include "bindings/codes.h"

#include "format/codes.h"

namespace nb = nanobind;

namespace tandem {

MatrixSource codes_of(nb::handle codes, nb::handle scales, const CodeNames& names, int64_t rows, int64_t depth,
                      const WeightFormat& format, int64_t block_rows, CodeViews* views) {
  packed_layout(format, rows, depth);  // throws for sizes and groups that do not exist
  if (block_rows < 1) throw KernelError("block_rows is " + std::to_string(block_rows) + "; it must be at least 1");
  const int64_t width = is_nibble(format.format) ? (depth + 1) / 2 : depth;
  const int64_t blocks = (rows + block_rows - 1) / block_rows;
  views->codes = view_of(codes, names.codes, {Element::byte}, {rows, width});
  views->scales =
      view_of(scales, names.scales, {Element::f32, Element::bf16}, {blocks, groups_along(depth, format.group)});
  const StoredCodes stored{static_cast<const uint8_t*>(views->codes.data), views->scales.data, views->scales.type(),
                           block_rows};
  return {nullptr, DType::f32, rows, depth, stored};
}

}  // namespace tandem
