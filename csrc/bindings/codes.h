// Weights in arrays, as a source to pack from: numbers, or codes and scales.
#pragma once

#include <string>

#include "bindings/tensor.h"
#include "format/pack.h"

namespace tandem {

// What Python calls `Codes`: a quantised matrix's own arrays, checked when it is packed.
struct CodeArrays {
  nanobind::object codes, scales, offsets;  // offsets: None where nothing is added
  nanobind::object halves, offset_halves;   // None but where groups share a half: see ScaleType
  nanobind::object zeros;                   // None, or in place of offsets: see ShiftType
  nanobind::object factors;                 // None but where scales are e4m3
  WeightFormat format;
  int64_t block_rows;
};

struct SourceViews {
  TensorView numbers, codes, scales, offsets, halves, offset_halves, factors;
};

// The source [rows, depth] in `codes`; `views` must outlive it. Throws KernelError that names the array whose type or
// shape is wrong, with `prefix` in front.
MatrixSource source_of_codes(const CodeArrays& codes, const std::string& prefix, int64_t rows, int64_t depth,
                             SourceViews* views);
// Likewise of `weight`, called `name` in errors, which is an array or `Codes`.
MatrixSource source_of(nanobind::handle weight, const std::string& name, int64_t rows, int64_t depth,
                       SourceViews* views);

}  // namespace tandem
