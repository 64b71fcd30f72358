// A packed weight matrix and its product with any number of rows.
#pragma once

#include <memory>

#include "format/pack.h"
#include "ops/integer_rows.h"
#include "runtime/files/mapped_file.h"

namespace tandem {

class PackedMatrix {
 public:
  // Packs `blocks` [.., K] on the pool, whose rows follow each other and make N; `bias` [N] float or null. Neither is
  // kept. All blocks but the last have whole panels of rows. Throws std::invalid_argument.
  PackedMatrix(std::shared_ptr<Workspace> workspace, const std::vector<MatrixSource>& blocks, const float* bias,
               const WeightFormat& format);
  // A matrix [rows, depth] that was packed before: its panels are read where they lie in `file`. Throws
  // std::invalid_argument if they do not fit there.
  PackedMatrix(std::shared_ptr<Workspace> workspace, const WeightFormat& format, int64_t rows, int64_t depth,
               std::shared_ptr<const MappedFile> file, int64_t offset, const float* bias);

  const WeightView& layout() const { return view_; }
  const Workspace& workspace() const { return *workspace_; }
  const float* bias() const { return bias_.get(); }  // [N], or null
  ByteRange bytes() const { return {view_.panels, packed_bytes(view_)}; }

  // Weights that will be read after this matrix: idle workers fetch them once it is multiplied.
  void read_next(std::vector<ByteRange> upcoming) { upcoming_ = std::move(upcoming); }

  // out [rows, N] = x [rows, K] times the transposed matrix, + bias. With int8_activations x is rounded to int8 before;
  // throws std::invalid_argument if such kernels do not exist for the format.
  void multiply(const RowsView& x, void* out, DType out_type, bool int8_activations = false) const;

  // The matrices of `heads` heads, which lie one after the other along N. Each is multiplied with its own row of x:
  // out [T, heads, N / heads] = x [T, heads, K]; x counts T * heads rows. A head's rows must be whole pairs of panels.
  void multiply_heads(const RowsView& x, int64_t heads, void* out, DType out_type) const;

  // The weights that the packed codes stand for, [N, K].
  void dequantise(float* out) const;

 private:
  void keep_bias(const float* bias);
  void prefer_nodes();
  uint8_t* panels_of_node(int node);  // where they begin, in memory of its own
  // As the kernels take them; as integers unless that is null.
  // neighbours: rows that are multiplied together lie side by side in `x`.
  PreparedRows prepared(const RowsView& x, const IntegerRows* integers, bool neighbours) const;
  MatmulFn kernel_for(int64_t rows, const IntegerRows* integers) const;
  // Which rows of x a stretch of columns is multiplied with: row r is row first + r * step of x and of the result. The
  // stretch begins at `first_column` of the matrix; the result's rows have `columns` columns.
  struct Stretch {
    int64_t first, step, first_column, columns;
  };
  void multiply_tile(MatmulFn kernel, const PreparedRows& x, const Stretch& of, int64_t first_row, int64_t rows,
                     int64_t first_pair, int64_t pairs, void* out, DType out_type, WorkerScratch& scratch) const;

  std::shared_ptr<Workspace> workspace_;
  HugeBuffer memory_;                       // the panels, or
  std::shared_ptr<const MappedFile> file_;  // what they lie in
  std::unique_ptr<float[]> bias_;           // padded to whole pairs; null: none
  WeightView view_;
  std::vector<ByteRange> upcoming_;
};

}  // namespace tandem
