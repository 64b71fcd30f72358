// Numbers to int8 and int4 codes, as pack.h says it. Compiled at baseline.
#pragma once

#include <vector>

#include "format/pack.h"

namespace tandem {

// Codes and scales of 16 rows of padded_depth floats to a panel.
void quantise_rows(const WeightView& w, const std::vector<float>& rows, uint8_t* panel);

}  // namespace tandem
