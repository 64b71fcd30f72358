#include "ops/matrix.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "format/staged.h"
#include "runtime/fill.h"

namespace tandem {
namespace {

// Below this, waking the pool costs more than it saves: bytes of weights times passes over them.
constexpr int64_t kSerialBytes = 64 * 1024;
constexpr int64_t kTaskBytes = 128 * 1024;  // weights per task: long streams, yet enough tasks to share out evenly;
                                            // two pairs of panels at least, which one row takes at once

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Pairs of panels per task. With many rows the streams are short beside the work, and a wide task gathers its rows
// once.
int64_t pairs_per_task(const WeightView& w, const Blocking& blocking, int64_t rows, int workers) {
  const bool many_rows = rows >= blocking.many_rows;
  const int64_t row_blocks = ceil_div(rows, blocking.rows_per_call);
  const int64_t by_bytes = many_rows ? blocking.pairs_per_call : std::max<int64_t>(2, kTaskBytes / (2 * w.panel_bytes));
  const int64_t by_share = std::max<int64_t>(1, w.pairs * row_blocks / (4 * workers));
  return std::min<int64_t>({by_bytes, by_share, blocking.pairs_per_call});
}

// `tasks` in order, in proportion to the nodes' workers.
NodeTasks shared_out(const WorkerPool& pool, int64_t tasks) {
  NodeTasks shares;
  for (int node = 0; node < pool.nodes(); ++node)
    shares.add(pool.first_of(node + 1, tasks) - pool.first_of(node, tasks));
  return shares;
}

int64_t rows_of(const std::vector<MatrixSource>& blocks) {
  int64_t rows = 0;
  for (size_t i = 0; i < blocks.size(); rows += blocks[i++].rows) {
    if (blocks[i].depth != blocks.front().depth) throw std::invalid_argument("blocks of rows differ in length");
    if (i + 1 < blocks.size() && blocks[i].rows % kPanelRows)
      throw std::invalid_argument("all blocks of rows but the last must be whole panels of " +
                                  std::to_string(kPanelRows));
  }
  return rows;
}

// The block that has `row` of the whole matrix, or the last one for rows beyond its end; and where the block begins.
std::pair<const MatrixSource*, int64_t> block_of(const std::vector<MatrixSource>& blocks, int64_t row) {
  int64_t first = 0;
  size_t i = 0;
  for (; i + 1 < blocks.size() && row >= first + blocks[i].rows; ++i) first += blocks[i].rows;
  return {&blocks[i], first};
}

}  // namespace

PackedMatrix::PackedMatrix(std::shared_ptr<Workspace> workspace, const std::vector<MatrixSource>& blocks,
                           const float* bias, const WeightFormat& format)
    : workspace_(std::move(workspace)), view_(packed_layout(format, rows_of(blocks), blocks.front().depth)) {
  if (format.format == Format::bf16_rows)
    throw std::invalid_argument("a matrix is packed; only experts are read in whole rows");
  for (const MatrixSource& block : blocks) check_source(view_, block);
  memory_ = HugeBuffer(size_t(packed_bytes(view_)));
  view_.panels = memory_.data();
  keep_bias(bias);
  prefer_nodes();
  const WorkerPool& pool = workspace_->pool();
  std::vector<NewMemory> memory;
  for (int node = 0; node < pool.nodes(); ++node) memory.push_back({panels_of_node(node), panels_of_node(node + 1)});
  fill_new(
      workspace_->pool(), memory, [&](size_t, int64_t offset) { return ceil_div(offset, view_.panel_bytes); },
      [&](size_t node, int64_t panel) {
        uint8_t* const to = memory[node].begin + panel * view_.panel_bytes;
        const int64_t row = (to - memory_.data()) / view_.panel_bytes * kPanelRows;
        const auto [block, first] = block_of(blocks, row);
        pack_panel(view_, staged(*block, row - first), row - first, to);
      });
}

// A node's panels lie in its own memory, and its workers compute their columns.
void PackedMatrix::prefer_nodes() {
  const WorkerPool& pool = workspace_->pool();
  for (int node = 0; pool.nodes() > 1 && node < pool.nodes(); ++node)
    HugeBuffer::prefer_node(panels_of_node(node), panels_of_node(node + 1), pool.memory_node(node));
}

uint8_t* PackedMatrix::panels_of_node(int node) {
  return memory_.data() + 2 * workspace_->pool().first_of(node, view_.pairs) * int64_t{view_.panel_bytes};
}

PackedMatrix::PackedMatrix(std::shared_ptr<Workspace> workspace, const WeightFormat& format, int64_t rows,
                           int64_t depth, std::shared_ptr<const MappedFile> file, int64_t offset, const float* bias)
    : workspace_(std::move(workspace)), file_(std::move(file)), view_(packed_layout(format, rows, depth)) {
  view_.panels = file_->at(offset, packed_bytes(view_));
  keep_bias(bias);
}

void PackedMatrix::keep_bias(const float* bias) {
  if (!bias) return;
  bias_ = std::make_unique<float[]>(size_t(view_.pairs) * kPairColumns);
  std::memcpy(bias_.get(), bias, size_t(view_.columns) * sizeof(float));
}

void PackedMatrix::dequantise(float* out) const {
  workspace_->pool().for_each(ceil_div(view_.columns, kPanelRows), [&](int64_t panel, const Worker&) {
    std::vector<float> rows(size_t(kPanelRows) * view_.depth);
    unpack_panel_rows(view_, view_.panels + panel * view_.panel_bytes, rows.data());
    const int64_t first = panel * kPanelRows, count = std::min<int64_t>(kPanelRows, view_.columns - first);
    std::memcpy(out + first * view_.depth, rows.data(), size_t(count) * view_.depth * sizeof(float));
  });
}

PreparedRows PackedMatrix::prepared(const RowsView& x, const IntegerRows* integers, bool neighbours) const {
  const KernelTable& table = workspace_->table();
  const PreparedRows given{static_cast<const uint8_t*>(x.data), x.length * bytes_of(x.type)};
  if (!integers && is_prepared(table, view_, x) && !(neighbours && crowds_cache(table, x))) return given;
  const int64_t stride = integers ? integers->row_bytes() : prepared_stride(table, view_);
  uint8_t* to = workspace_->shared(Workspace::kRows, x.rows * stride);
  const auto some = [&](int64_t first, int64_t last) {
    if (!integers) return prepare_rows(table, view_, x, first, last, to);
    for (int64_t r = first; r < last; ++r) integers->convert(given.row(r), x.type, to + r * stride);
  };
  if (x.rows <= 8)
    some(0, x.rows);
  else
    workspace_->pool().for_each(ceil_div(x.rows, 8),
                                [&](int64_t task, const Worker&) { some(8 * task, std::min(x.rows, 8 * task + 8)); });
  return {to, stride};
}

MatmulFn PackedMatrix::kernel_for(int64_t rows, const IntegerRows* integers) const {
  return integers ? integers->kernel() : matmul_of(workspace_->table(), view_.format, rows);
}

void PackedMatrix::multiply_tile(MatmulFn kernel, const PreparedRows& x, const Stretch& of, int64_t first_row,
                                 int64_t rows, int64_t first_pair, int64_t pairs, void* out, DType out_type,
                                 WorkerScratch& scratch) const {
  const KernelTable& table = workspace_->table();
  const auto row_of = [&](int64_t r) { return of.first + (first_row + r) * of.step; };
  for (int64_t r = 0; r < rows; ++r) scratch.rows[r] = x.row(row_of(r));
  const MatmulArgs args{view_,
                        scratch.rows,
                        scratch.tile,
                        tile_stride(pairs),
                        scratch.matmul,
                        int(rows),
                        int(first_pair),
                        int(pairs),
                        nullptr,
                        0,
                        workspace_->one_way()};
  kernel(&args);
  const int64_t column = first_pair * kPairColumns;
  const int64_t into_row = column - of.first_column;
  const int64_t length = std::min<int64_t>(pairs * kPairColumns, of.columns - into_row);
  for (int64_t r = 0; r < rows; ++r) {
    float* y = scratch.tile + r * tile_stride(pairs);
    if (bias_) table.add_row(y, bias_.get() + column, pairs * kPairColumns);
    const int64_t offset = (row_of(r) * of.columns + into_row) * bytes_of(out_type);
    table.store_row(y, static_cast<uint8_t*>(out) + offset, out_type, false, length);
  }
}

void PackedMatrix::multiply(const RowsView& x, void* out, DType out_type, bool int8_activations) const {
  if (int8_activations) check_int8(workspace_->table(), view_);
  if (x.rows == 0) return;
  const auto lock = workspace_->lock();
  const IntegerRows how(workspace_->table(), view_, int8_activations);
  const IntegerRows* const integers = how.takes(x.rows) ? &how : nullptr;
  const PreparedRows rows_of_x = prepared(x, integers, true);
  workspace_->pool().announce(upcoming_);
  const Blocking& blocking = workspace_->table().blocking;
  const int64_t rows_per_task = ceil_div(x.rows, ceil_div(x.rows, blocking.rows_per_call));
  const int64_t row_blocks = ceil_div(x.rows, rows_per_task);
  const int64_t pairs_each = pairs_per_task(view_, blocking, x.rows, workspace_->pool().size());
  WorkerPool& pool = workspace_->pool();
  const auto first_pair = [&](size_t node) { return pool.first_of(int(node), view_.pairs); };
  const auto column_blocks = [&](size_t node) { return ceil_div(first_pair(node + 1) - first_pair(node), pairs_each); };
  NodeTasks tasks;
  for (int node = 0; node < pool.nodes(); ++node) tasks.add(row_blocks * column_blocks(size_t(node)));
  const auto task = [&](int64_t index, int worker) {
    const auto [node, i] = tasks.at(index);
    const int64_t across = column_blocks(node), row = i / across * rows_per_task;
    const int64_t pair = first_pair(node) + i % across * pairs_each;
    const int64_t rows = std::min(rows_per_task, x.rows - row);
    multiply_tile(kernel_for(rows, integers), rows_of_x, {0, 1, 0, view_.columns}, row, rows, pair,
                  std::min<int64_t>(pairs_each, first_pair(node + 1) - pair), out, out_type,
                  workspace_->scratch(worker));
  };
  if (packed_bytes(view_) * x.rows <= kSerialBytes) {
    for (int64_t i = 0; i < tasks.count(); ++i) task(i, 0);
  } else {
    const auto body = [&](int64_t i, const Worker& worker) { task(i, worker.index); };
    pool.run_phases({{tasks.count(), body, tasks.of_node()}});
  }
}

void PackedMatrix::multiply_heads(const RowsView& x, int64_t heads, void* out, DType out_type) const {
  if (x.rows == 0) return;
  const auto lock = workspace_->lock();
  const PreparedRows rows_of_x = prepared(x, nullptr, false);
  const int64_t tokens = x.rows / heads, columns = view_.columns / heads, head_pairs = columns / kPairColumns;
  const Blocking& blocking = workspace_->table().blocking;
  const int64_t rows_per_task = ceil_div(tokens, ceil_div(tokens, blocking.rows_per_call));
  const int64_t row_blocks = ceil_div(tokens, rows_per_task);
  const int64_t pairs_each = std::min(head_pairs, pairs_per_task(view_, blocking, tokens, workspace_->pool().size()));
  const int64_t column_blocks = ceil_div(head_pairs, pairs_each);
  const auto body = [&](int64_t index, const Worker& worker) {
    const int64_t head = index / (row_blocks * column_blocks), rest = index % (row_blocks * column_blocks);
    const int64_t row = rest / column_blocks * rows_per_task, pair = rest % column_blocks * pairs_each;
    const int64_t rows = std::min(rows_per_task, tokens - row);
    multiply_tile(kernel_for(rows, nullptr), rows_of_x, {head, heads, head * columns, columns}, row, rows,
                  head * head_pairs + pair, std::min(pairs_each, head_pairs - pair), out, out_type,
                  workspace_->scratch(worker.index));
  };
  const int64_t tasks = heads * row_blocks * column_blocks;  // head after head, as their weights lie
  workspace_->pool().run_phases({{tasks, body, shared_out(workspace_->pool(), tasks).of_node()}});
}

}  // namespace tandem
