#include "ops/workspace.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace tandem {
namespace {

constexpr int64_t kTileRows = 16;

void set_below_rows(IntegerKernels& kernels, int rows) { kernels.below_rows = kernels.below_rows_of_groups = rows; }

// Integers end where tiles begin, in tiers that have both.
void force_tiles(KernelTable& table, int from_rows) {
  for (FormatKernels& kernels : table.formats) kernels.tile_from_rows = from_rows;
  for (IntegerKernels& kernels : table.int8)
    if (kernels.below_rows != INT32_MAX) set_below_rows(kernels, from_rows);
  for (IntegerKernels& kernels : table.digits)
    if (kernels.below_rows) set_below_rows(kernels, from_rows);
}

// 0: rows of this format, or as long as these, are not cut.
int64_t rows_of_part(const KernelTable& table, const WeightView& layout) {
  constexpr int64_t kFewest = 64;  // longer rows were not measured
  const FormatKernels& kernels = table.formats[int(layout.format)];
  const int64_t fit = kernels.part_bytes / (2 * layout.padded_depth) / kTileRows * kTileRows;
  return fit < kFewest ? 0 : std::min<int64_t>(kernels.part_rows, fit);
}

}  // namespace

Workspace::Workspace(std::shared_ptr<WorkerPool> pool, const KernelTable& table, int tile_from_rows,
                     int digits_below_rows, bool one_way)
    : pool_(std::move(pool)), table_(table), one_way_(one_way), scratch_(size_t(pool_->size())) {
  if (one_way) tile_from_rows = digits_below_rows = 0;
  if (tile_from_rows >= 0) force_tiles(table_, tile_from_rows);
  for (IntegerKernels& kernels : table_.digits)
    if (digits_below_rows >= 0) set_below_rows(kernels, digits_below_rows);
}

// When its worker has its first task, by that worker, so on its memory node. All of it, so that what a model takes is
// known; where no worker has any, as beside a GPU that has all experts, nothing.
void Workspace::make(WorkerScratch& scratch) {
  constexpr int64_t kPage = 4096;
  scratch.memory = HugeBuffer(size_t(kWorkerBytes));
  uint8_t* const memory = scratch.memory.data();
  for (int64_t at = 0; at < kWorkerBytes; at += kPage) __atomic_store_n(memory + at, 0, __ATOMIC_RELAXED);
  scratch.tile = reinterpret_cast<float*>(memory + kMatmulScratchBytes);
  scratch.sums = reinterpret_cast<float*>(memory + kMatmulScratchBytes + kTileBytes);
  scratch.matmul = memory;
}

uint8_t* Workspace::shared(Shared what, int64_t bytes) {
  if (int64_t(shared_[what].bytes()) < bytes) shared_[what] = HugeBuffer(size_t(bytes));
  return shared_[what].data();
}

int64_t Workspace::multiply_add(int64_t rounds, Format format, bool int8_activations) {
  const auto held = lock();
  constexpr int64_t kPiecesPerWorker = 16;
  std::vector<int64_t> operations(scratch_.size());
  const auto usual = format == Format::f32 ? table_.peak_f32 : table_.peak;
  const auto peak = int8_activations ? table_.peak_int8 : usual;
  const int64_t each = (rounds + kPiecesPerWorker - 1) / kPiecesPerWorker;
  pool_->for_each(kPiecesPerWorker * pool_->size(), [&](int64_t, const Worker& w) {
    operations[size_t(w.index)] += peak(each, scratch(w.index).matmul);
  });
  return std::accumulate(operations.begin(), operations.end(), int64_t{0});
}

int64_t Workspace::most_pairs(int64_t rows) const {
  const int64_t whole_tiles = (rows + kTileRows - 1) / kTileRows * kTileRows;  // see MatmulArgs::y
  int64_t pairs = table_.blocking.pairs_per_call;
  while (pairs < table_.blocking.most_pairs && whole_tiles * tile_stride(pairs + 1) * 4 <= kTileBytes) ++pairs;
  return pairs;
}

int64_t rows_per_part(const KernelTable& table, const WeightView& gate_up, const WeightView& down, int64_t rows) {
  const int64_t most = std::min(rows_of_part(table, gate_up), rows_of_part(table, down));
  return rows <= 2 * most ? most : table.blocking.rows_per_call;
}

bool is_prepared(const KernelTable& table, const WeightView& layout, const RowsView& x) {
  return x.type == prepared_type(table, layout.format) && layout.padded_depth == layout.depth &&
         (x.type == DType::bf16 || layout.format == Format::f32);
}

bool crowds_cache(const KernelTable& table, const RowsView& x) {
  constexpr int64_t kCrowdedBytes = 2048;  // two of 64 sets
  const bool read_in_place = x.rows >= table.blocking.many_rows && !table.blocking.gathers_rows;
  return read_in_place && x.length * bytes_of(x.type) % kCrowdedBytes == 0;
}

int64_t prepared_stride(const KernelTable& table, const WeightView& layout) {
  const int64_t bytes = layout.padded_depth * bytes_of(prepared_type(table, layout.format));
  return ((bytes + kCacheLine - 1) / kCacheLine | 1) * kCacheLine;
}

void prepare_rows(const KernelTable& table, const WeightView& layout, const RowsView& x, int64_t first, int64_t last,
                  uint8_t* to) {
  const DType type = prepared_type(table, layout.format);
  const int64_t from_stride = x.length * bytes_of(x.type), to_stride = prepared_stride(table, layout);
  for (int64_t r = first; r < last; ++r)
    table.prepare_row(static_cast<const uint8_t*>(x.data) + r * from_stride, x.type, to + r * to_stride, type,
                      layout.format != Format::f32, x.length, layout.padded_depth);
}

}  // namespace tandem
