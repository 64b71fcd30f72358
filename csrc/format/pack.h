// From a matrix as a checkpoint has it to the packed panels of abi/weight_view.h, and back. Compiled at baseline.
#pragma once

#include <cstdint>

#include "abi/weight_view.h"

namespace tandem {

// A matrix [rows, depth], row-major and contiguous, that somebody else owns.
struct MatrixSource {
  const void* data;
  DType type;
  int64_t rows;
  int64_t depth;
};

// A view without memory: sizes of the packed form of [columns, depth]. `group`: k per scale of int8 and int4, a
// multiple of 32 up to 256, or 0 for one scale per output row (int8 only). Throws std::invalid_argument.
WeightView packed_layout(Format format, int64_t columns, int64_t depth, int group);
int64_t packed_bytes(const WeightView& layout);

// Writes one panel (`layout.panel_bytes`): the 16 rows of `source` from `first_row`, zeros past its end.
// int8: code = round(w / scale), scale = max|w| / 127. int4: scale = extreme / -8, so that the weight of the largest
// magnitude is met by code -8. Group scales are stored as bf16 (0.5 bit per weight at group 32; the codes are made
// with the rounded scale, so its rounding costs no accuracy), scales per row as float.
void pack_panel(const WeightView& layout, const MatrixSource& source, int64_t first_row, uint8_t* panel);

// The 16 x depth weights that a panel stands for, row-major in `rows`.
void unpack_panel_rows(const WeightView& layout, const uint8_t* panel, float* rows);

}  // namespace tandem
