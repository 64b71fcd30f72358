// The driver of state spaces (Mamba 2): sequences and heads on the pool, then rows.
#pragma once

#include "ops/dense.h"

namespace tandem {

struct SpaceShape {
  int64_t heads, groups, k_dim, v_dim;  // heads of a group share what is written and asked

  int64_t inner() const { return heads * v_dim; }
  int64_t channels() const { return inner() + 2 * groups * k_dim; }
};

struct SpaceCall {
  const float* mixed;                          // [rows, channels]: values, written and asked behind their convolution
  const void *gate, *steps;                    // of `type`: [rows, inner], [rows, heads]
  int64_t gate_stride, steps_stride;           // elements from a row to the next
  const float *decay, *bias, *through, *norm;  // [heads], three times; [inner]
  float* gated;                                // [rows, inner]: results before their norm
  void* out;                                   // [rows, inner], of `type`
  char* memory;                                // of each slot [heads, k_dim, v_dim] float
  int64_t memory_stride, slots;                // bytes from a slot to the next
  float eps;
  DType type;
};

// From the convolution's result to the last projection; memories go on as in `fold`, which throws the same.
void state_space(const DenseOps& dense, const BatchView& batch, const SpaceShape& shape, const SpaceCall& call);

}  // namespace tandem
