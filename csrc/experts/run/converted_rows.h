// Rows of activations that are converted to integers: those of experts which have so few that it pays.
#pragma once

#include <vector>

#include "ops/integer_rows.h"

namespace tandem {

class ConvertedRows {
 public:
  // `rows`: how many there are to choose from.
  ConvertedRows(const IntegerRows& how, int64_t rows) : how_(how), place_(size_t(rows), -1) {}

  const IntegerRows& how() const { return how_; }
  int64_t count() const { return int64_t(rows_.size()); }
  bool has(int64_t row) const { return place_[size_t(row)] >= 0; }
  int64_t place(int64_t row) const { return place_[size_t(row)]; }  // in the order of adding
  void add(int64_t row) {
    if (has(row)) return;
    place_[size_t(row)] = int32_t(count());
    rows_.push_back(int32_t(row));
  }
  void allocate(Workspace& workspace, Workspace::Shared where) {
    to_ = workspace.shared(where, count() * how_.row_bytes());
  }

  // Those from the `first`th to before the `last`th that was added.
  void convert(const PreparedRows& from, DType type, int64_t first, int64_t last) const {
    for (int64_t i = first; i < last; ++i) how_.convert(from.row(rows_[size_t(i)]), type, to_ + i * how_.row_bytes());
  }
  const void* row(int64_t row) const { return to_ + place(row) * how_.row_bytes(); }

 private:
  IntegerRows how_;
  std::vector<int32_t> rows_;   // that are converted
  std::vector<int32_t> place_;  // among them; -1: it is not
  uint8_t* to_ = nullptr;
};

}  // namespace tandem
