// The driver of gated delta nets: sequences and heads on the pool; blind to the instruction set.
#pragma once

#include "ops/dense.h"

namespace tandem {

// Sizes, and where a row of projections has what of key head h: elements at `first + h * step`.
struct DeltaShape {
  struct Columns {
    int64_t first, step;
  };
  int64_t k_heads, v_heads, k_dim, v_dim, conv_width;
  Columns q, k, v, z;        // of the projected row; v and z: of all value heads of the key head, one after the other
  Columns beta, decay;       // of the row of gates, likewise
  int64_t projected, gates;  // elements of the two rows
  bool sigmoid = false;      // of z, which results are multiplied with; else its silu

  int64_t group() const { return v_heads / k_heads; }
  // Channels of the convolution: q of all heads, k of all heads, v of all heads.
  int64_t channels() const { return 2 * k_heads * k_dim + v_heads * v_dim; }
};

// What a sequence keeps. Rows of inputs and gates are as activations, of the token at position p in place p % places.
struct DeltaState {
  char* inputs;                                        // [places, channels]
  char* gates;                                         // [places, gates]
  char* memory;                                        // [v_heads, k_dim, v_dim] float
  int64_t inputs_stride, gates_stride, memory_stride;  // bytes from a sequence to the next
  int64_t slots, places;
};

struct DeltaCall {
  const void *projected, *gates;  // [rows, …]
  const float* conv;              // [conv_width, channels]
  const float *decay, *dt_bias;   // [v_heads]: exp(A_log) negated, and what is added to the gate
  const void* norm;               // [v_dim]
  void* out;                      // [rows, v_heads * v_dim]
  DeltaState state;
  float eps;
  DType type;
};

// A sequence's memory is what its verified rows made of it. Rows of draft tokens go on from a copy that is thrown away.
// What they took in stays in its place, so that a later call can do again those that have come
// (`BatchView::state_lens`).
//
// Throws std::invalid_argument when the batch has no slots, or one that is not there, or too few places.
void delta_rule(const DenseOps& dense, const BatchView& batch, const DeltaShape& shape, const DeltaCall& call);

}  // namespace tandem
