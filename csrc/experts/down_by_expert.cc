// Phase 3 of few rows: a task is one expert's block of columns, so that it reads one long stream; a fourth phase adds
// up each token's experts, in the order of their ids, as phase 3 of more rows does.
#include <algorithm>

#include "experts/expert_run.h"
#include "experts/task_sizes.h"

namespace tandem {
namespace {

constexpr int64_t kMostRows = 256;   // their results, float32, stay in the caches
constexpr int64_t kPairsPerSum = 4;  // of a task of phase 4
static_assert(kMaxChunkTokens * kPairsPerSum * kPairColumns <= kMaxSumFloats);

}  // namespace

bool ExpertRun::by_expert() const { return !has_many_rows() && int64_t(plan_.rows.size()) <= kMostRows; }

void ExpertRun::list_down_by_expert() {
  const WeightView& w = layer_.down_layout_;
  results_stride_ = int64_t{w.pairs} * kPairColumns;
  results_ = reinterpret_cast<float*>(
      workspace_.shared(Workspace::kResults, int64_t(plan_.rows.size()) * results_stride_ * 4));
  const int64_t workers = ceil_div(workspace_.pool().size(), workspace_.pool().nodes());
  for (const NodeSlice& slice : layer_.slices_) {
    const size_t before = down_parts_.size();
    int64_t left = slice.down_pairs * int64_t(plan_.experts.size());
    for (size_t e = 0; e < plan_.experts.size(); ++e)
      for (int64_t pair = 0; pair < slice.down_pairs;) {
        const int64_t most = table_.blocking.pairs_per_call;
        const int64_t pairs = std::min(guided_pairs(left, 2 * w.panel_bytes, workers, most), slice.down_pairs - pair);
        down_parts_.push_back({int32_t(e), int32_t(pair), int32_t(pairs)});
        pair += pairs;
        left -= pairs;
      }
    down_tasks_.add(int64_t(down_parts_.size() - before));
  }
}

// Where a node's task begins to read; null past its last.
const uint8_t* ExpertRun::down_panels_of(size_t node, int64_t task) const {
  if (task >= down_tasks_.of_node()[node]) return nullptr;
  const DownPart& part = down_parts_[size_t(down_tasks_.first_of(node) + task)];
  const WeightView weights = layer_.down(plan_.experts[size_t(part.expert)].id, node);
  return weights.panels + 2 * part.first_pair * weights.panel_bytes;
}

void ExpertRun::down_part(int64_t index, WorkerScratch& scratch) {
  const auto [node, task] = down_tasks_.at(index);
  const DownPart& part = down_parts_[size_t(index)];
  const RoutingPlan::Expert& expert = plan_.experts[size_t(part.expert)];
  const WeightView weights = layer_.down(expert.id, node);
  const PreparedRows& hidden = rounds(expert) ? codes_ : hidden_;
  const int64_t first_pair = layer_.slices_[node].first_down + part.first_pair;
  const int64_t last = expert.first + expert.count, columns = part.pairs * kPairColumns;
  const float* bias = down_bias(expert.id, first_pair);
  for (int64_t row = expert.first; row < last; row += table_.blocking.rows_per_call) {
    const int64_t rows = std::min<int64_t>(table_.blocking.rows_per_call, last - row);
    for (int64_t r = 0; r < rows; ++r) scratch.rows[r] = hidden.row(row + r);
    const uint8_t* next = down_panels_of(node, task + workspace_.pool().workers_of(int(node)));
    const MatmulArgs args{weights,   scratch.rows,    scratch.tile, kTileStride, scratch.matmul,
                          int(rows), part.first_pair, part.pairs,   next};
    kernel_for(expert, weights, rows)(&args);
    for (int64_t r = 0; r < rows; ++r) {  // tiles write whole tiles, so not to where they belong
      float* y = scratch.tile + r * kTileStride;
      if (bias) table_.add_row(y, bias, columns);
      std::copy_n(y, columns, results_ + (row + r) * results_stride_ + first_pair * kPairColumns);
    }
  }
}

int64_t ExpertRun::sum_tasks() const { return ceil_div(layer_.down_layout_.pairs, kPairsPerSum); }

void ExpertRun::add_up(int64_t task, WorkerScratch& scratch) {
  const int64_t pairs = std::min(kPairsPerSum, layer_.down_layout_.pairs - task * kPairsPerSum);
  const int64_t first_column = task * kPairsPerSum * kPairColumns, columns = pairs * kPairColumns;
  std::fill_n(scratch.sums, call_.x.rows * columns, 0.0f);
  for (size_t row = 0; row < plan_.rows.size(); ++row)
    table_.add_scaled_row(scratch.sums + plan_.rows[row].token * columns,
                          results_ + int64_t(row) * results_stride_ + first_column, plan_.rows[row].weight, columns);
  store_sums(scratch.sums, 0, call_.x.rows, first_column, columns);
}

}  // namespace tandem
