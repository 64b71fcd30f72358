// A panel's rows out of the file that they are mapped from, see runtime/files/readable_file.h.
#pragma once

#include "format/pack.h"

namespace tandem {

// `source`, of which only the 16 rows from `first_row` may be read: they are in this thread's buffer, valid until its
// next call, if a file is known that has them. Scales and offsets are left where they are.
MatrixSource staged(const MatrixSource& source, int64_t first_row);

}  // namespace tandem
