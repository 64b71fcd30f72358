// The driver of delta nets whose channels decay apart (Kimi): sequences and heads on the pool.
#pragma once

#include "ops/dense.h"

namespace tandem {

struct ChannelCall {
  const float* mixed;                  // [rows, 3, heads, dim]: queries, keys and values behind their convolution
  const void *forget, *beta, *behind;  // of `type`: [rows, heads, dim], [rows, heads], [rows, heads, dim]
  const float *decay, *bias, *norm;    // [heads], negative; [heads, dim]; [dim]
  void* out;                           // [rows, heads, dim], of `type`
  char* memory;                        // of each slot [heads, dim, dim] float
  int64_t memory_stride, slots;        // bytes from a slot to the next
  int64_t heads, dim, beta_stride;     // elements from a row of beta to the next
  float eps, floor;                    // of the norm; of decays' logarithms, 0: they have none
  DType type;
};

// From the convolution's result to the last projection; memories go on as in `fold`, which throws the same.
void channel_delta(const DenseOps& dense, const BatchView& batch, const ChannelCall& call);

}  // namespace tandem
