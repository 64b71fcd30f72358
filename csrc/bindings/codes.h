// Codes and scales in arrays, as a source to pack from.
#pragma once

#include "bindings/tensor.h"
#include "format/pack.h"

namespace tandem {

struct CodeViews {
  TensorView codes, scales;
};
struct CodeNames {
  const char *codes, *scales;
};

// A source [rows, depth] of codes with the code type and group of `format`; `views` must outlive it. Throws KernelError
// that names the array whose type or shape is wrong.
MatrixSource codes_of(nanobind::handle codes, nanobind::handle scales, const CodeNames& names, int64_t rows,
                      int64_t depth, const WeightFormat& format, int64_t block_rows, CodeViews* views);

}  // namespace tandem
