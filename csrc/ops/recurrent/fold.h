// The drivers of layers whose memory of a sequence has a constant size: sequences and heads on the pool; blind to the
// instruction set.
#pragma once

#include "ops/dense.h"

namespace tandem {

struct FoldShape {
  int64_t heads, groups, k_dim, v_dim;  // heads of a group share what is written and asked
  int64_t decays;                       // of a head and token: 1, or one for each of k_dim
  bool corrects;                        // what the memory answers at the written key is taken away first
};

struct FoldCall {
  const float *asked, *written;  // [rows, groups, k_dim]
  const float* values;           // [rows, heads, v_dim]
  const float* decay;            // [rows, heads, decays]: what the memory is multiplied with
  const float* beta;             // [rows, heads]: how far a correction goes; null where nothing is corrected
  float* out;                    // [rows, heads, v_dim]
  char* memory;                  // of each slot [heads, k_dim, v_dim] float
  int64_t memory_stride, slots;  // bytes from a slot to the next
};

// Memories go on; those of sequences without tokens start from zeros. Throws std::invalid_argument when the batch has
// no slots, or one that is not there, or draft tokens, which a memory cannot take back.
void fold(const DenseOps& dense, const BatchView& batch, const FoldShape& shape, const FoldCall& call);

struct ConvolutionCall {
  const void* rows;      // [rows, channels]; gated: [rows, 3, channels], a gate before, a gate behind, and values
  const float* weights;  // [taps, channels], oldest token first; with `bias` one row more, which is added
  void* ring;            // of each slot [places, channels]: the row of position p in place p % places
  void* out;             // [rows, channels], of what is convolved and rounded to `type`: its silu, rounded, in float
  int64_t channels, taps, places, slots, ring_stride;
  int64_t row_stride;  // elements from a row to the next
  bool bias;
  bool gated;  // values are multiplied before, of which the ring has the products; the result, of `type`, behind
  DType type;
};

// A causal convolution of each channel over the last tokens; zeros stand for those before a sequence began. Throws when
// the ring is too short, or when a slot is not there. Draft tokens may be among the rows.
void convolve(const DenseOps& dense, const BatchView& batch, const ConvolutionCall& call);

}  // namespace tandem
