// Drivers of the operations between a vision tower's products. Pointers are to contiguous rows.
#pragma once

#include <cstdint>

#include "abi/dense_kernels.h"
#include "runtime/worker_pool.h"

namespace tandem {

struct PatchOps {
  WorkerPool& pool;
  const DenseKernels& kernels;

  struct Split {
    const void* qkv;         // [rows, 3, heads, 2 * half]
    const float *cos, *sin;  // [patches, half]
    int64_t rows, heads, half;
    int64_t first, patches;  // rows are the patches first, first + 1 …
    void *q, *k, *v;         // [heads, rows or patches, 2 * half]
    DType type;
  };
  // Queries and keys are turned; every head has its rows side by side.
  void split(const Split& call) const;

  // x, out: [rows, n], which may be the same.
  void layer_norm(const void* x, const void* weight, const void* bias, void* out, int64_t rows, int64_t n, float eps,
                  DType type) const;
  void gelu(const void* x, void* out, int64_t rows, int64_t n, DType type) const;
};

}  // namespace tandem
