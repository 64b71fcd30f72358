#include "ops/columns.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ops/row_tasks.h"

namespace tandem {
namespace {

template <class T>
void copy_row(const std::vector<ColumnRun>& runs, const T* x, T* out) {
  for (const ColumnRun& run : runs) {
    const T* from = x + run.source;
    T* to = out + run.target;
    if (run.step == 1)
      std::memcpy(to, from, size_t(run.count) * sizeof(T));
    else
      for (int64_t i = 0; i < run.count; ++i) to[i] = from[i * run.step];
  }
}

template <class T>
void copy_rows(WorkerPool& pool, const std::vector<ColumnRun>& runs, const void* x, int64_t x_columns, void* out,
               int64_t out_columns, int64_t rows, int64_t elements) {
  for_rows(pool, rows, elements, [&](int64_t r) {
    copy_row(runs, static_cast<const T*>(x) + r * x_columns, static_cast<T*>(out) + r * out_columns);
  });
}

}  // namespace

Columns::Columns(std::vector<ColumnRun> runs) : runs_(std::move(runs)) {
  for (const ColumnRun& run : runs_) {
    if (run.source < 0 || run.target < 0 || run.step < 1 || run.count < 1)
      throw std::invalid_argument("columns: a run needs a source and target >= 0, a step and count >= 1");
    source_columns_ = std::max(source_columns_, run.source + (run.count - 1) * run.step + 1);
    target_columns_ = std::max(target_columns_, run.target + run.count);
    elements_ += run.count;
  }
}

void Columns::copy(WorkerPool& pool, const void* x, int64_t x_columns, void* out, int64_t out_columns, int64_t rows,
                   int64_t element_bytes) const {
  const auto copy = element_bytes == 2 ? copy_rows<uint16_t> : copy_rows<uint32_t>;
  copy(pool, runs_, x, x_columns, out, out_columns, rows, elements_);
}

}  // namespace tandem
