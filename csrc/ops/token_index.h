// Which tokens each row attends to, and attention over those alone; blind to the instruction set.
#pragma once

#include "ops/dense.h"

namespace tandem {

struct IndexShape {
  int64_t heads, dim;  // of queries; keys are of one head
  int64_t half;        // pairs of channels that turn, at the front of a head
  int64_t budget;      // tokens that a row attends to, at most
  bool neighbours;     // pairs are channels 2i and 2i + 1, not i and i + half
};

struct IndexCall {
  const void *q, *k;         // [rows, heads * dim] and [rows, dim], before norm and rotation
  const float* gates;        // [rows, heads]
  const float *norm, *bias;  // [dim], of the keys' norm, which takes away their mean
  float eps;
  const float *cos, *sin;  // [table_rows, half]
  int64_t table_rows;
  void* pages;      // [num_pages, page_size, dim]: keys of all tokens
  int32_t* chosen;  // [rows, budget]: rows of the cache, in the order of their positions; 0 after the last
  int32_t* counts;  // [rows]: how many of them count
  DType type;
};

// Stores the batch's keys, then chooses: all tokens up to a row's own, or the `budget` with the highest scores, of
// equal ones the earliest. Throws std::invalid_argument for a position beyond the tables.
void choose_tokens(const DenseOps& dense, const BatchView& batch, const IndexShape& shape, const IndexCall& call);

// `DenseOps::attention` where row t sees the first min(position + 1, budget) of chosen[t]. Rows of a sequence that is
// no longer than `budget` see all, and share the work of reading keys.
void attend_chosen(const DenseOps& dense, const BatchView& batch, const DenseOps::Heads& heads,
                   const DenseOps::Attention& args, const int32_t* chosen, int64_t budget);

}  // namespace tandem
