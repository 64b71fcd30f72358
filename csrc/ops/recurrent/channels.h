// The driver of delta nets whose channels decay apart (Kimi): sequences and heads on the pool.
#pragma once

#include "ops/dense.h"

namespace tandem {

// Rows of draft tokens as they were given, which memories may have to take in again. The row of the token at position p
// is in place p % places of its sequence's slot.
struct ChannelInputs {
  char *mixed, *forget, *beta;                       // [places, 3, heads, dim] float; of `type`, as in a call
  int64_t mixed_stride, forget_stride, beta_stride;  // bytes from a slot to the next
  int64_t places;
};

struct ChannelCall {
  const float* mixed;                  // [rows, 3, heads, dim]: queries, keys and values behind their convolution
  const void *forget, *beta, *behind;  // of `type`: [rows, heads, dim], [rows, heads], [rows, heads, dim]
  const float *decay, *bias, *norm;    // [heads], negative; [heads, dim]; [dim]
  void* out;                           // [rows, heads, dim], of `type`
  char* memory;                        // of each slot [heads, dim, dim] float
  int64_t memory_stride, slots;        // bytes from a slot to the next
  ChannelInputs inputs;
  int64_t heads, dim, beta_stride;  // elements from a row of beta to the next
  float eps, floor;                 // of the norm; of decays' logarithms, 0: they have none
  DType type;
};

// From the convolution's result to the last projection. A memory is what its verified rows made of it, as in
// `delta_rule`; one of a sequence without tokens starts from zeros. Throws std::invalid_argument when the batch has no
// slots, or one that is not there, or too few places for draft tokens.
void channel_delta(const DenseOps& dense, const BatchView& batch, const ChannelCall& call);

}  // namespace tandem
