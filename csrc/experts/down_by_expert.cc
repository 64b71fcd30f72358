// Phase 3 of few rows an expert: a task reads one long stream, of one expert or of two that follow each other. Whoever
// does the last pair of a block of columns adds up each token's experts there, in the order of their ids, as phase 3 of
// more rows does.
#include <algorithm>

#include "experts/expert_run.h"

namespace tandem {
namespace {

constexpr int64_t kPairsPerSum = 4;  // that are added up at once
static_assert(kMaxChunkTokens * kPairsPerSum * kPairColumns <= kMaxSumFloats);

}  // namespace

bool ExpertRun::by_expert() const {
  return !has_many_rows() && int64_t(plan_.rows.size()) <= table_.blocking.result_rows;
}

void ExpertRun::list_down_by_expert() {
  results_stride_ = int64_t{layer_.down_layout_.pairs} * kPairColumns;
  results_ = reinterpret_cast<float*>(
      workspace_.shared(Workspace::kResults, int64_t(plan_.rows.size()) * results_stride_ * 4));
  divide(down_, layer_.down_layout_);
  count_columns();
}

void ExpertRun::count_columns() {
  const int64_t pairs = layer_.down_layout_.pairs;
  unfinished_columns_ = std::vector<Countdown>(size_t(ceil_div(pairs, kPairsPerSum)));
  for (int64_t block = 0; block < int64_t(unfinished_columns_.size()); ++block)
    unfinished_columns_[size_t(block)].left.store(
        int32_t(int64_t(parts_.size()) * std::min(kPairsPerSum, pairs - block * kPairsPerSum)),
        std::memory_order_relaxed);
}

// The others' writes to `results_` happened before their counting.
void ExpertRun::finish_columns(int64_t first_pair, int64_t pairs, WorkerScratch& scratch) {
  const int64_t last_pair = first_pair + pairs;
  for (int64_t block = first_pair / kPairsPerSum; block * kPairsPerSum < last_pair; ++block) {
    const int64_t begin = std::max(first_pair, block * kPairsPerSum);
    const int32_t done = int32_t(std::min(last_pair, (block + 1) * kPairsPerSum) - begin);
    if (unfinished_columns_[size_t(block)].left.fetch_sub(done, std::memory_order_acq_rel) == done)
      add_up(block, scratch);
  }
}

// Whether intermediate activations of all experts of a task are there, while those of others may not be.
bool ExpertRun::is_ready(int64_t index) const {
  if (unfinished_.empty()) return false;
  const auto [node, of_node] = down_.by_node.at(index);
  const auto [begin, end] = down_.of_node[node].at(of_node);
  const int64_t pairs = layer_.slices_[node].down_pairs;
  for (int64_t part = begin / pairs; part * pairs < end; ++part)
    if (unfinished_[size_t(parts_[size_t(part)].expert)].left.load(std::memory_order_acquire) != kComplete)
      return false;
  return true;
}

void ExpertRun::down_piece(const Piece& piece, WorkerScratch& scratch) {
  const Part& part = piece.part;
  const RoutingPlan::Expert& expert = plan_.experts[size_t(part.expert)];
  const MatmulFn kernel = find_hidden(expert, part.first_row, part.rows, scratch);
  const MatmulArgs args{piece.weights, scratch.rows,     scratch.tile, kTileStride, scratch.matmul,
                        part.rows,     piece.first_pair, piece.pairs,  piece.next};
  kernel(&args);
  const int64_t first_pair = layer_.slices_[piece.node].first_down + piece.first_pair;
  const int64_t columns = int64_t{piece.pairs} * kPairColumns;
  const float* bias = down_bias(expert.id, first_pair);
  for (int r = 0; r < part.rows; ++r) {  // tiles write whole tiles, so not to where they belong
    float* y = scratch.tile + r * kTileStride;
    if (bias) table_.add_row(y, bias, columns);
    std::copy_n(y, columns, results_ + (part.first_row + r) * results_stride_ + first_pair * kPairColumns);
  }
  finish_columns(first_pair, piece.pairs, scratch);
}

void ExpertRun::add_up(int64_t block, WorkerScratch& scratch) {
  const int64_t pairs = std::min(kPairsPerSum, layer_.down_layout_.pairs - block * kPairsPerSum);
  const int64_t first_column = block * kPairsPerSum * kPairColumns, columns = pairs * kPairColumns;
  std::fill_n(scratch.sums, call_.x.rows * columns, 0.0f);
  for (size_t row = 0; row < plan_.rows.size(); ++row)
    table_.add_scaled_row(scratch.sums + plan_.rows[row].token * columns,
                          results_ + int64_t(row) * results_stride_ + first_column, plan_.rows[row].weight, columns);
  store_sums(scratch.sums, 0, call_.x.rows, first_column, columns);
}

}  // namespace tandem
