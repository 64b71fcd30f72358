// Columns from one array to another: what lies between the matrices of latent attention.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/worker_pool.h"

namespace tandem {

// out[r][target + i] = x[r][source + i * step] for i in [0, count).
struct ColumnRun {
  int64_t source, step, target, count;
};

class Columns {
 public:
  // Throws std::invalid_argument for a run that begins before column 0.
  explicit Columns(std::vector<ColumnRun> runs);

  int64_t source_columns() const { return source_columns_; }  // an array must have at least so many
  int64_t target_columns() const { return target_columns_; }

  // Rows of `x_columns` and `out_columns` elements of 2 or 4 bytes. What no run names stays as it is.
  void copy(WorkerPool& pool, const void* x, int64_t x_columns, void* out, int64_t out_columns, int64_t rows,
            int64_t element_bytes) const;

 private:
  std::vector<ColumnRun> runs_;
  int64_t source_columns_ = 0, target_columns_ = 0, elements_ = 0;
};

}  // namespace tandem
