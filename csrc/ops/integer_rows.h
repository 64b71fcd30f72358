// Rows of activations as products of integers take them: rounded to int8, an explicit choice that costs accuracy, or
// cut into digits, which costs none to speak of (format/digit_row.h). What of it is blind to the instruction set.
#pragma once

#include "ops/workspace.h"

namespace tandem {

// Throws std::invalid_argument unless such weights can be multiplied with int8 activations.
void check_int8(const KernelTable& table, const WeightView& layout);

// How rows are converted for weights of one layout, and how many rows it pays for.
class IntegerRows {
 public:
  // Refers to the table.
  IntegerRows(const KernelTable& table, const WeightView& layout, bool int8_activations);

  // Whether that many rows are converted; else the usual kernels take them as they are.
  bool takes(int64_t rows) const { return kernels_.rows && rows < below_rows_; }
  int64_t row_bytes() const { return row_bytes_; }  // from one converted row to the next
  void convert(const void* row, DType type, uint8_t* to) const;
  MatmulFn kernel() const { return kernels_.rows; }

 private:
  const IntegerKernels& kernels_;
  WeightView layout_;
  int32_t below_rows_;
  void (*convert_)(const IntegerRowArgs* args);
  int64_t row_bytes_;
};

}  // namespace tandem
