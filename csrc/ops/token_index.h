// Which tokens each row attends to, and attention over those alone; blind to the instruction set.
#pragma once

#include "ops/dense.h"

namespace tandem {

struct IndexShape {
  int64_t heads, dim;  // of queries; keys are of one head
  int64_t half;        // pairs of channels that turn, at the front of a head
  int64_t budget;      // tokens whose keys are chosen, at most
  bool neighbours;     // pairs are channels 2i and 2i + 1, not i and i + half
  int64_t pool;        // tokens that a key stands for, once the last of them is there; divides budget and pages

  // Tokens that a row attends to, at most: those of chosen keys, and those behind the last whole pool.
  int64_t width() const { return budget + pool - 1; }
};

struct IndexCall {
  const void *q, *k;         // [rows, heads * dim] and [rows, dim], before norm and rotation; no k: keys are stored
  const float* gates;        // [rows, heads]
  const float *norm, *bias;  // [dim], of the keys' norm, which takes away their mean
  float eps;
  const float *cos, *sin;  // [table_rows, half]
  int64_t table_rows;
  void* pages;      // [num_pages, page_size / pool, dim]: keys of all tokens, or of whole pools
  int32_t* chosen;  // [rows, width]: rows of the cache, in the order of their positions; 0 after the last
  int32_t* counts;  // [rows]: how many of them count
  DType type;
};

// Stores the batch's keys, then chooses: all tokens up to a row's own, or those of the keys with the highest scores, of
// equal ones the earliest. A key counts once its last token is there; tokens behind the last whole pool are chosen
// always. Throws std::invalid_argument for a position beyond the tables.
void choose_tokens(const DenseOps& dense, const BatchView& batch, const IndexShape& shape, const IndexCall& call);

// `DenseOps::attention` where row t sees the first counts[t] of chosen[t], of `width`. Rows of a sequence each of which
// sees all up to itself share the work of reading keys.
void attend_chosen(const DenseOps& dense, const BatchView& batch, const DenseOps::Heads& heads,
                   const DenseOps::Attention& args, const int32_t* chosen, const int32_t* counts, int64_t width);

}  // namespace tandem
