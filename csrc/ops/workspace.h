// What every operation on packed weights runs on: a worker pool, a tier's kernels, and scratch of a fixed size.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/worker_pool.h"

namespace tandem {

// One worker's own scratch.
struct WorkerScratch {
  uint8_t* matmul = nullptr;  // kMatmulScratchBytes
  float* tile;                // results of a call, tile_stride apart
  float* sums;                // kMaxSumFloats: weighted sums of the MoE driver
  const void* rows[kMaxRowsPerCall];
  HugeBuffer memory;
};
// Floats between rows of a call's results: a line more than they take, so that rows lie in different sets of L1.
constexpr int64_t tile_stride(int64_t pairs) { return kPairColumns * pairs + 16; }

class Workspace {
 public:
  static constexpr int64_t kTileBytes = kMaxRowsPerCall * tile_stride(kMaxPairsPerCall) * 4;
  static constexpr int64_t kSumBytes = int64_t{kMaxSumFloats} * 4;
  static constexpr int64_t kWorkerBytes = kMatmulScratchBytes + kTileBytes + kSumBytes;

  // tile_from_rows >= 0 replaces the tier's own choice of algorithm for every format (0: always tile_mm), and
  // digits_below_rows >= 0 up to where rows are cut into digits. one_way: no choice depends on the number of rows.
  Workspace(std::shared_ptr<WorkerPool> pool, const KernelTable& table, int tile_from_rows = -1,
            int digits_below_rows = -1, bool one_way = false);

  bool one_way() const { return one_way_; }  // see MatmulArgs

  // Pairs of panels that a call may have for so many of an expert's rows: see Blocking::most_pairs.
  int64_t most_pairs(int64_t rows) const;

  WorkerPool& pool() const { return *pool_; }
  const KernelTable& table() const { return table_; }
  WorkerScratch& scratch(int worker) {
    if (!scratch_[worker].matmul) make(scratch_[worker]);
    return scratch_[worker];
  }

  // Scratch that all workers share, by what is in it; it grows to what the largest call needed and is kept.
  enum Shared { kRows, kHidden, kRowCodes, kHiddenCodes, kResults, kSharedCount };
  uint8_t* shared(Shared what, int64_t bytes);

  // A ceiling of this tier: multiply-adds on every worker at once, in the compute type of `format`, or of integers.
  // Returns the operations done.
  int64_t multiply_add(int64_t rounds, Format format, bool int8_activations = false);

  // A call owns all of this; calls of several threads queue up.
  std::unique_lock<std::mutex> lock() { return std::unique_lock<std::mutex>(mutex_); }

 private:
  static void make(WorkerScratch& scratch);

  std::shared_ptr<WorkerPool> pool_;
  KernelTable table_;
  bool one_way_;
  std::vector<WorkerScratch> scratch_;
  HugeBuffer shared_[kSharedCount];
  std::mutex mutex_;
};

// The type that activations have in the kernels of `format`.
inline DType prepared_type(const KernelTable& table, Format format) {
  return format == Format::f32 ? DType::f32 : table.lane_type;
}
inline int64_t bytes_of(DType type) { return type == DType::f32 ? 4 : 2; }

// Rows of activations, row-major and contiguous, that somebody else owns.
struct RowsView {
  const void* data;
  DType type;
  int64_t rows;
  int64_t length;
};

// Where the kernels find row r: data + r * stride bytes.
struct PreparedRows {
  const uint8_t* data;
  int64_t stride;
  const void* row(int64_t r) const { return data + r * stride; }
};

// True if the kernels of `layout` can read `x` as it is.
bool is_prepared(const KernelTable& table, const WeightView& layout, const RowsView& x);
// True if they could, but so many rows lie so that those multiplied together share a few sets of L1.
bool crowds_cache(const KernelTable& table, const RowsView& x);
// Bytes from a prepared row to the next one: an odd number of cache lines, so that rows do not share sets of L1. On a
// Xeon, avx512_bf16, many rows of 2048 k reach 0.90 of the peak instead of 0.82 (int4 0.87 instead of 0.78, fp8 0.83
// instead of 0.78). On Zen 5 it makes no difference.
int64_t prepared_stride(const KernelTable& table, const WeightView& layout);
// Rows [first, last) of `x` to `to`, padded_depth long and prepared_stride apart.
void prepare_rows(const KernelTable& table, const WeightView& layout, const RowsView& x, int64_t first, int64_t last,
                  uint8_t* to);

// Of an expert's rows, how many are multiplied at once, at most: see FormatKernels::part_rows.
int64_t rows_per_part(const KernelTable& table, const WeightView& gate_up, const WeightView& down, int64_t rows);

// The algorithm for this number of rows: see FormatKernels::tile_from_rows.
inline MatmulFn matmul_of(const KernelTable& table, Format format, int64_t rows) {
  const FormatKernels& kernels = table.formats[int(format)];
  return rows >= kernels.tile_from_rows ? kernels.tile_mm : kernels.dot_rows;
}

}  // namespace tandem
