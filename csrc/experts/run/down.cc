// Phase 3: every row times its expert's down, and each token's results added up in the order of their experts' ids.
//
// Few rows an expert: a task reads one long stream, of one expert or of two that follow each other. Whoever does the
// last pair of a block of columns adds up there. Many rows: a round's results are added up by tokens while the next
// round is multiplied. Phases that alternate instead would wait for the slowest core each time.
//
// Sums in a worker's scratch would keep no result. They need few tasks, each of whole blocks of columns for many
// tokens. Cores of unequal speed end those at very different times. Figures: docs/lab/kernel-choices.md.
#include <algorithm>

#include "experts/run/expert_forward.h"

#ifndef TANDEM_RESULT_BYTES  // tests make it smaller
#define TANDEM_RESULT_BYTES (int64_t{384} << 20)
#endif

namespace tandem {
namespace {

constexpr int64_t kPairsPerSum = 4;                    // that are added up at once
constexpr int64_t kResultBytes = TANDEM_RESULT_BYTES;  // of all rounds that are kept, about
constexpr int64_t kRoundsKept = 3;                     // see is_ready
constexpr int64_t kLead = 4;                           // see task_of
constexpr int64_t kStreamedBytes = int64_t{16} << 20;  // from here on they would not stay in caches until they are read
constexpr int64_t kResultsApart = kCacheLine / 4;      // floats between rows, which so lie in different sets of L1
static_assert(kMaxChunkTokens * kPairsPerSum * kPairColumns <= kMaxSumFloats);

}  // namespace

// Of columns; a token's sums of one fit a worker's, too.
int64_t ExpertForward::rounds_of_down() const {
  if (!in_rounds_) return 1;
  const int64_t columns = int64_t{layer_.down_layout_.pairs} * kPairColumns;
  const int64_t bytes = int64_t(plan_.rows.size()) * columns * 4;
  int64_t most = 0;  // a pair of the widest node in each: more would save no memory, and the first might have no tasks
  for (const NodeSlice& slice : layer_.slices_) most = std::max(most, slice.down_pairs);
  return std::min(most, std::max(ceil_div(bytes, kResultBytes / kRoundsKept), ceil_div(2 * columns, kMaxSumFloats)));
}

void ExpertForward::list_down() {
  const int64_t rounds = rounds_of_down();
  for (int64_t round = 0; round < rounds; ++round) {
    down_.push_back({&ExpertStore::down, &NodeSlice::down_pairs, round, rounds, {}, {}});
    divide(down_.back(), layer_.down_layout_);
  }
  results_stride_ = result_pairs() * kPairColumns + (in_rounds_ ? kResultsApart : 0);
  const int64_t bytes = int64_t(plan_.rows.size()) * results_stride_ * 4;
  streams_ = in_rounds_ && bytes >= kStreamedBytes;
  results_ = reinterpret_cast<float*>(workspace_.shared(Workspace::kResults, std::min(rounds, kRoundsKept) * bytes));
  if (in_rounds_)
    layer_.plan_.list_by_token(call_.x.rows);
  else
    count_columns();
  list_steps();
}

void ExpertForward::list_steps() {
  const WorkerPool& pool = workspace_.pool();
  const int64_t rounds = int64_t(down_.size()), sums = ceil_div(call_.x.rows, kTokensPerSum);
  for (int64_t round = 0; round < rounds + in_rounds_; ++round) {
    DownStep step{this, round, {}};
    for (int node = 0; node < pool.nodes(); ++node) {
      const int64_t of_node = pool.first_of(node + 1, sums) - pool.first_of(node, sums);
      step.by_node.add(products_of(round, size_t(node)) + (round > 0 ? of_node : 0));
    }
    steps_.push_back(step);
  }
}

int64_t ExpertForward::products_of(int64_t round, size_t node) const {
  return round < int64_t(down_.size()) ? down_[size_t(round)].by_node.of_node()[node] : 0;
}

// Sums take memory's time and products the cores', so they are done side by side, once a quarter of the products is
// taken: whoever comes early finds products, which are ready.
ExpertForward::StepTask ExpertForward::task_of(const DownStep& step, int64_t index) const {
  const auto [node, i] = step.by_node.at(index);
  const int64_t all = step.by_node.of_node()[node], products = products_of(step.round, node);
  const int64_t lead = products / kLead, rest = all - lead;
  if (i < lead) return {node, false, i};
  const int64_t before = (i - lead) * (all - products) / rest, after = (i - lead + 1) * (all - products) / rest;
  if (after == before) return {node, false, i - before};
  return {node, true, workspace_.pool().first_of(int(node), ceil_div(call_.x.rows, kTokensPerSum)) + before};
}

void ExpertForward::do_step(const DownStep& step, int64_t index, const Worker& worker) {
  const StepTask task = task_of(step, index);
  WorkerScratch& scratch = workspace_.scratch(worker.index);
  if (task.adds_up)
    add_up_tokens(down_[size_t(step.round - 1)], task.index, scratch);
  else
    down_task(down_[size_t(step.round)], {task.node, task.index}, scratch);
}

bool ExpertForward::fetch_of_step(const DownStep& step, int64_t index, int64_t at) const {
  const StepTask task = task_of(step, index);
  return !task.adds_up && fetch(down_[size_t(step.round)], {task.node, task.index}, at);
}

// Whether what a task reads is there, and nobody reads what it overwrites. A round is taken early while the one before
// is computed and the one before that is added up: hence results of three are kept.
bool ExpertForward::is_ready(const DownStep& step, int64_t index) const {
  const StepTask task = task_of(step, index);
  if (step.round > 0) return !task.adds_up;
  if (unfinished_.empty()) return false;
  const auto [begin, end] = down_[0].of_node[task.node].at(task.index);
  const int64_t pairs = pairs_of(down_[0], task.node).count;
  for (int64_t part = begin / pairs; part * pairs < end; ++part)
    if (unfinished_[size_t(parts_[size_t(part)].expert)].left.load(std::memory_order_acquire) != kComplete)
      return false;
  return true;
}

// Of a round, at most.
int64_t ExpertForward::result_pairs() const {
  int64_t pairs = 0;
  for (const NodeSlice& slice : layer_.slices_) pairs += ceil_div(slice.down_pairs, int64_t(down_.size()));
  return pairs;
}

// Where a node's pairs begin in a round's results.
int64_t ExpertForward::first_result_pair(const Tasks& round, size_t node) const {
  int64_t before = 0;
  for (size_t n = 0; n < node; ++n) before += pairs_of(round, n).count;
  return before;
}

float* ExpertForward::results_of(const Tasks& round) const {
  return results_ + round.round % kRoundsKept * int64_t(plan_.rows.size()) * results_stride_;
}

void ExpertForward::count_columns() {
  const int64_t pairs = layer_.down_layout_.pairs;
  unfinished_columns_ = std::vector<Countdown>(size_t(ceil_div(pairs, kPairsPerSum)));
  for (int64_t block = 0; block < int64_t(unfinished_columns_.size()); ++block)
    unfinished_columns_[size_t(block)].left.store(
        int32_t(int64_t(parts_.size()) * std::min(kPairsPerSum, pairs - block * kPairsPerSum)),
        std::memory_order_relaxed);
}

// The others' writes to `results_` happened before their counting.
void ExpertForward::finish_columns(int64_t first_pair, int64_t pairs, WorkerScratch& scratch) {
  const int64_t last_pair = first_pair + pairs;
  for (int64_t block = first_pair / kPairsPerSum; block * kPairsPerSum < last_pair; ++block) {
    const int64_t begin = std::max(first_pair, block * kPairsPerSum);
    const int32_t done = int32_t(std::min(last_pair, (block + 1) * kPairsPerSum) - begin);
    if (unfinished_columns_[size_t(block)].left.fetch_sub(done, std::memory_order_acq_rel) == done)
      add_up_columns(block, scratch);
  }
}

// From pair `pair` of all nodes on; null if there is none.
const float* ExpertForward::down_bias(int expert, int64_t pair) const {
  if (layer_.down_bias_.empty()) return nullptr;
  return layer_.down_bias_.data() + (expert * int64_t{layer_.down_layout_.pairs} + pair) * kPairColumns;
}

void ExpertForward::down(const Tasks& round, const Piece& piece, WorkerScratch& scratch) {
  const Part& part = piece.part;
  const RoutingPlan::Expert& expert = plan_.experts[size_t(part.expert)];
  const int64_t x_stride = hidden_integers_.how().takes(expert.count) ? 0 : hidden_.stride;
  multiply(find_hidden(expert, part.first_row, part.rows, scratch), piece, x_stride, scratch);
  const int64_t first_pair =
      first_result_pair(round, piece.node) + piece.first_pair - pairs_of(round, piece.node).first;
  const int64_t columns = int64_t{piece.pairs} * kPairColumns, stride = tile_stride(piece.pairs);
  const float* bias = down_bias(expert.id, layer_.slices_[piece.node].first_down + piece.first_pair);
  for (int r = 0; bias && r < part.rows; ++r) table_.add_row(scratch.tile + r * stride, bias, columns);
  // Tiles write whole tiles, so not to where they belong.
  float* const to = results_of(round) + part.first_row * results_stride_ + first_pair * kPairColumns;
  if (streams_)
    table_.stream_rows(scratch.tile, stride, to, results_stride_, part.rows, columns);
  else
    for (int r = 0; r < part.rows; ++r) std::copy_n(scratch.tile + r * stride, columns, to + r * results_stride_);
  if (!in_rounds_) finish_columns(first_pair, piece.pairs, scratch);
}

void ExpertForward::add_up_columns(int64_t block, WorkerScratch& scratch) {
  const int64_t pairs = std::min(kPairsPerSum, layer_.down_layout_.pairs - block * kPairsPerSum);
  const int64_t first_column = block * kPairsPerSum * kPairColumns, columns = pairs * kPairColumns;
  std::fill_n(scratch.sums, call_.x.rows * columns, 0.0f);
  for (size_t row = 0; row < plan_.rows.size(); ++row)
    table_.add_scaled_row(scratch.sums + plan_.rows[row].token * columns,
                          results_ + int64_t(row) * results_stride_ + first_column, plan_.rows[row].weight, columns);
  store_sums(scratch.sums, 0, call_.x.rows, first_column, columns);
}

// Of a round's columns.
void ExpertForward::add_up_tokens(const Tasks& round, int64_t task, WorkerScratch& scratch) {
  const int64_t columns = first_result_pair(round, layer_.slices_.size()) * kPairColumns;
  const int64_t last = std::min(call_.x.rows, (task + 1) * kTokensPerSum);
  const float* const results = results_of(round);
  for (int64_t token = task * kTokensPerSum; token < last; ++token) {
    std::fill_n(scratch.sums, columns, 0.0f);
    for (const int32_t row : plan_.rows_of(token))
      table_.add_scaled_row(scratch.sums, results + row * results_stride_, plan_.rows[size_t(row)].weight, columns);
    const float* sums = scratch.sums;
    for (size_t node = 0; node < layer_.slices_.size(); ++node) {
      const Pairs pairs = pairs_of(round, node);
      const int64_t of_node = pairs.count * kPairColumns;
      store_sums(sums, token, 1, (layer_.slices_[node].first_down + pairs.first) * kPairColumns, of_node);
      sums += of_node;
    }
  }
}

// Of tokens and columns of which `sums` are in rows of `columns`.
void ExpertForward::store_sums(const float* sums, int64_t first_token, int64_t tokens, int64_t first_column,
                               int64_t columns) {
  const int64_t length = std::min<int64_t>(columns, layer_.shape_.hidden - first_column);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t offset = (first_token + t) * layer_.shape_.hidden + first_column;
    table_.store_row(sums + t * columns, static_cast<uint8_t*>(call_.out) + offset * bytes_of(call_.out_type),
                     call_.out_type, call_.add, length);
  }
}

}  // namespace tandem
