// Activations rounded to int8, an explicit choice that costs accuracy: what of it is blind to the instruction set.
#pragma once

#include "ops/workspace.h"

namespace tandem {

// Throws std::invalid_argument unless such weights can be multiplied with int8 activations.
void check_int8(const KernelTable& table, const WeightView& layout);

// Bytes of a rounded row, and from one to the next.
int64_t int8_row_bytes(const WeightView& layout);

// Rows [first, last) of `rows`, `layout.depth` numbers each, to `to`, where row 0 goes.
void round_rows(const KernelTable& table, const WeightView& layout, const PreparedRows& rows, DType type, int64_t first,
                int64_t last, uint8_t* to);

// Whether that many rows are rounded and multiplied as integers; else the usual kernels take them as they are.
bool takes_int8(const KernelTable& table, Format format, int64_t rows);

}  // namespace tandem
