#include "ops/int8_rows.h"

#include <stdexcept>
#include <string>

#include "format/int8_row.h"
#include "format/pack.h"

namespace tandem {

void check_int8(const KernelTable& table, const WeightView& layout) {
  if (table.int8[int(layout.format)].rows) return;
  std::string known;
  for (int f = 0; f < kFormatCount; ++f)
    if (table.int8[f].rows) known += (known.empty() ? "" : ", ") + std::string(kFormatNames[f]);
  throw std::invalid_argument("int8 activations do not exist for experts of " + described(format_of(layout)) +
                              ", only for " + known + ": leave the mode off, or convert the experts");
}

int64_t int8_row_bytes(const WeightView& layout) { return int8_row_layout(layout).bytes; }

void round_rows(const KernelTable& table, const WeightView& layout, const PreparedRows& rows, DType type, int64_t first,
                int64_t last, uint8_t* to) {
  const Int8Kernels& kernels = table.int8[int(layout.format)];
  const int64_t bytes = int8_row_bytes(layout);
  for (int64_t r = first; r < last; ++r) {
    const Int8RowArgs args{layout, rows.row(r), type, to + r * bytes, kernels.offset, kernels.split};
    table.round_row(&args);
  }
}

bool takes_int8(const KernelTable& table, Format format, int64_t rows) {
  return rows < table.int8[int(format)].below_rows;
}

}  // namespace tandem
