// A panel's table of scales (or of shifts): where each lies, and what it is. Compiled at baseline.
#pragma once

#include "format/pack.h"

namespace tandem {

inline int64_t groups_of(const WeightView& w) { return w.group ? w.padded_depth / w.group : 1; }

int64_t table_bytes(const WeightView& w);        // of a panel's scales
int64_t shift_table_bytes(const WeightView& w);  // of a panel's shifts, beyond those
// Where shifts begin, from a table of `scales` bytes on.
int64_t shift_at(const WeightView& w, int64_t scales);

void put_scale(const WeightView& w, uint8_t* panel, int64_t group, int64_t r, float scale);
float get_scale(const WeightView& w, const uint8_t* panel, int64_t group, int64_t r);
float get_shift(const WeightView& w, const uint8_t* panel, int64_t group, int64_t r);  // 0 where there are none

// One row's scales and shifts, as they are, from row `block` of what is stored.
void copy_row_scales(const WeightView& w, const StoredCodes& stored, int64_t block, int64_t groups, int64_t r,
                     uint8_t* panel);

}  // namespace tandem
