// Drivers of the dense operations on the pool; blind to the instruction set. Pointers are to contiguous rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "abi/dense_kernels.h"
#include "runtime/worker_pool.h"

namespace tandem {

// The part of a step that every layer shares: a checked copy of the batch's index tensors.
struct BatchView {
  // query_starts has sequences + 1 entries, block_tables [sequences, table_width]. Throws std::invalid_argument
  // when an index points outside the cache of num_pages * page_size rows, so that kernels need not look again.
  BatchView(std::vector<int64_t> positions, std::vector<int64_t> cache_slots, std::vector<int32_t> query_starts,
            std::vector<int32_t> seq_lens, std::vector<int32_t> block_tables, std::vector<int32_t> slots,
            int64_t page_size, int64_t num_pages);

  // Of each sequence: tokens that its slot's folds hold, and its rows that are surely tokens; the others are draft
  // tokens. Without it folds hold all tokens before, and all rows are verified. Throws as the constructor does.
  void set_drafts(std::vector<int32_t> state_lens, std::vector<int32_t> num_verified);

  int64_t rows() const { return static_cast<int64_t>(positions.size()); }
  int64_t sequences() const { return static_cast<int64_t>(seq_lens.size()); }
  int64_t table_width() const { return sequences() ? static_cast<int64_t>(block_tables.size()) / sequences() : 0; }

  std::vector<int64_t> positions, cache_slots;
  std::vector<int32_t> query_starts, seq_lens, block_tables;
  std::vector<int32_t> slots;  // of what models keep of each sequence beside pages; empty: of nothing
  std::vector<int32_t> state_lens, num_verified;  // see `set_drafts`; empty: there are no draft tokens
  int64_t page_size, num_pages;
};

struct DenseOps {
  WorkerPool& pool;
  const DenseKernels& kernels;

  // x, residual, out: [rows, n]; residual may be null.
  void rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t n, float eps,
                DType type, DType weight_type) const;

  struct Heads {
    int64_t heads, kv_heads, head_dim;
    int64_t q_norm_size, k_norm_size;  // 0: none; head_dim: per head; otherwise over all heads together
    int64_t value_dim;                 // of a head: at most head_dim
  };
  struct RopeStore {
    const void* qkv;         // [rows, (heads + kv_heads) * head_dim + kv_heads * value_dim]; without v_pages no v
    const float *cos, *sin;  // [table_rows, half]
    int64_t table_rows, half;
    const void *q_norm, *k_norm;
    void *k_pages, *v_pages;  // [num_pages, page_size, kv_heads, head_dim or value_dim]; v_pages null: keys are values
    void* q;                  // [rows, heads * head_dim]
    float eps;
    DType type, norm_type;  // norm_type: of both norms' weights
  };
  void rope_store(const BatchView& batch, const Heads& heads, const RopeStore& args) const;

  struct Attention {
    const void *q, *k_pages, *v_pages;  // v_pages null: keys are values, too
    void* out;                          // [rows, heads * value_dim]
    float scale;
    int64_t window;  // 0: all keys
    DType type;
    const float* sinks = nullptr;  // [heads]: a score of each that counts in its softmax and has no value; null: none
  };
  void attention(const BatchView& batch, const Heads& heads, const Attention& args) const;

  struct Route {
    const float *logits, *bias;  // [rows, experts], [experts] or null
    int32_t* ids;                // [rows, top_k + shared]
    float* weights;
    int64_t experts, top_k, groups, top_groups;
    int64_t shared;  // experts after the routed ones that every row chooses, with weight 1
    bool sigmoid, normalize, group_by_top2;
    float scale, epsilon;
    float least_sum = 0.0f;  // what chosen weights are divided by is at least this
    // What is counted beside, any of them null. Experts that every row chooses are not in it.
    int64_t* tokens = nullptr;  // [experts] += rows that chose the expert
    int64_t* seen = nullptr;    // [experts] = 1 where a row did
    int32_t* chosen = nullptr;  // [rows, top_k]: a copy of their ids
  };
  void route(int64_t rows, const Route& args) const;

  // A ceiling of this machine: all workers read each node's ranges once (each rounded down to 1 KiB); returns the sum
  // of the bytes as floats so that the reads happen.
  float read_ranges(const std::vector<std::vector<ByteRange>>& of_node) const;
  float read_memory(const void* data, int64_t bytes) const;  // of what fill_memory wrote
  // Each worker writes a share: so memory that was never touched comes from the worker's own node.
  void fill_memory(float* data, int64_t bytes, float value) const;
};

}  // namespace tandem
