// Hyper-connections: several streams in place of one residual, which are summed up for a block and mixed with its
// result. Everything between is float32, and a row depends on nothing but itself.
#pragma once

#include <cstdint>

#include "ops/dense.h"

namespace tandem {

struct StreamsShape {
  int64_t streams, hidden;
  int64_t iterations;  // of norms by rows and columns in turn
  float eps;           // of those, and of what streams are summed up with
  float norm_eps;      // of the norm of all streams together

  int64_t weights() const { return streams * (2 + streams); }  // that a row makes for a block
  int64_t row() const { return streams * hidden; }
};

// What a row's weights are made of: sums [rows, columns] of its streams, one norm for each row, and a factor and an
// addend for each column; columns beyond those that count may be anything.
struct StreamsMade {
  const float *sums, *norms, *scale, *base;
  int64_t columns;
};

// x [rows, streams, hidden] to float32, and norms[r] = 1 / sqrt(mean(x_r^2) + norm_eps).
void widen_streams(const DenseOps& dense, const StreamsShape& shape, const void* x, int64_t rows, float* wide,
                   float* norms, DType type);

// Of a block: out [rows, hidden], the streams weighed and summed; share [rows, streams] of its result for each stream;
// mixing [rows, streams, streams], from the second dimension to the third. share null: nothing follows, only `out`.
void enter_streams(const DenseOps& dense, const StreamsShape& shape, const void* x, int64_t rows,
                   const StreamsMade& made, void* out, float* share, float* mixing, DType type);

// out [rows, streams, hidden]: x mixed, and y [rows, hidden] shared out. out may be x.
void leave_streams(const DenseOps& dense, const StreamsShape& shape, const void* x, const void* y, int64_t rows,
                   const float* share, const float* mixing, void* out, DType type);

}  // namespace tandem
