#include "ops/integer_rows.h"

#include <stdexcept>
#include <string>

#include "format/digit_row.h"
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

IntegerRows::IntegerRows(const KernelTable& table, const WeightView& layout, bool int8_activations)
    : kernels_((int8_activations ? table.int8 : table.digits)[int(layout.format)]),
      layout_(layout),
      below_rows_(layout.group >= 16 && layout.group <= 128 ? kernels_.below_rows_of_groups : kernels_.below_rows),
      convert_(int8_activations ? table.round_row : table.cut_row),
      row_bytes_(int8_activations ? int8_row_layout(layout).bytes : digit_row_layout(layout).bytes) {}

void IntegerRows::convert(const void* row, DType type, uint8_t* to) const {
  const IntegerRowArgs args{layout_, row, type, to, kernels_.offset, kernels_.split};
  convert_(&args);
}

}  // namespace tandem
