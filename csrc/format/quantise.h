// Numbers to int8 and int4 codes, as pack.h says it.
#pragma once

#include "format/pack.h"

namespace tandem {

// Codes and scales of the 16 rows of `source` from `first_row` to a panel, which is all zeros.
void quantise_rows(const WeightView& w, const MatrixSource& source, int64_t first_row, uint8_t* panel);

}  // namespace tandem
