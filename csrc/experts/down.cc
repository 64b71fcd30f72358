// Phase 3: every row times its expert's down, and each token's results added up in the order of their experts' ids.
//
// Few rows an expert: a task reads one long stream, of one expert or of two that follow each other. Whoever does the
// last pair of a block of columns adds up there. Many rows: a round's results are added up by tokens.
//
// Sums over all experts in a worker's scratch, so that no result is kept, need tasks of whole blocks of columns for
// many tokens at once: 16 to 32 of them, which cores of unequal speed ended at very different times, and half of a
// layer's time went there, for a third of its multiplications (Xeon, 16 threads, 4096 tokens).
#include <algorithm>

#include "experts/expert_run.h"

namespace tandem {
namespace {

constexpr int64_t kPairsPerSum = 4;                    // that are added up at once
constexpr int64_t kResultBytes = int64_t{256} << 20;   // of a round, about
constexpr int64_t kStreamedBytes = int64_t{16} << 20;  // from here on they would not stay in caches until they are read
constexpr int64_t kResultsApart = kCacheLine / 4;      // floats between rows, which so lie in different sets of L1
static_assert(kMaxChunkTokens * kPairsPerSum * kPairColumns <= kMaxSumFloats);

}  // namespace

void ExpertRun::list_down() {
  const int64_t pairs = layer_.down_layout_.pairs, rows = int64_t(plan_.rows.size()), columns = pairs * kPairColumns;
  if (in_rounds_) {  // a token's sums fit a worker's, too
    const int64_t rounds = std::max(ceil_div(rows * columns * 4, kResultBytes), ceil_div(2 * columns, kMaxSumFloats));
    down_.rounds = std::min(pairs, rounds);
    layer_.plan_.list_by_token(call_.x.rows);
  }
  results_stride_ = result_pairs() * kPairColumns + (in_rounds_ ? kResultsApart : 0);
  const int64_t bytes = rows * results_stride_ * 4;
  streams_ = in_rounds_ && bytes >= kStreamedBytes;
  results_ = reinterpret_cast<float*>(workspace_.shared(Workspace::kResults, bytes));
  if (in_rounds_) return;
  divide(down_, layer_.down_layout_);
  count_columns();
}

void ExpertRun::run_rounds() {
  const auto scratch = [this](const Worker& w) -> WorkerScratch& { return workspace_.scratch(w.index); };
  for (down_.round = 0; down_.round < down_.rounds; ++down_.round) {
    divide(down_, layer_.down_layout_);
    workspace_.pool().run_phases({
        {down_.by_node.count(), [&](int64_t i, const Worker& w) { down_task(i, scratch(w)); }, down_.by_node.of_node()},
        {ceil_div(call_.x.rows, kTokensPerSum), [&](int64_t i, const Worker& w) { add_up_tokens(i, scratch(w)); }},
    });
  }
}

// Of a round, at most.
int64_t ExpertRun::result_pairs() const {
  int64_t pairs = 0;
  for (const NodeSlice& slice : layer_.slices_) pairs += ceil_div(slice.down_pairs, down_.rounds);
  return pairs;
}

// Where a node's pairs begin in this round's results.
int64_t ExpertRun::first_result_pair(size_t node) const {
  int64_t before = 0;
  for (size_t n = 0; n < node; ++n) before += pairs_of(down_, n).count;
  return before;
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
      add_up_columns(block, scratch);
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

// From pair `pair` of all nodes on; null if there is none.
const float* ExpertRun::down_bias(int expert, int64_t pair) const {
  if (layer_.down_bias_.empty()) return nullptr;
  return layer_.down_bias_.data() + (expert * int64_t{layer_.down_layout_.pairs} + pair) * kPairColumns;
}

void ExpertRun::down(const Piece& piece, WorkerScratch& scratch) {
  const Part& part = piece.part;
  const RoutingPlan::Expert& expert = plan_.experts[size_t(part.expert)];
  const int64_t x_stride = hidden_integers_.how().takes(expert.count) ? 0 : hidden_.stride;
  multiply(find_hidden(expert, part.first_row, part.rows, scratch), piece, x_stride, scratch);
  const int64_t first_pair = first_result_pair(piece.node) + piece.first_pair - pairs_of(down_, piece.node).first;
  const int64_t columns = int64_t{piece.pairs} * kPairColumns;
  const float* bias = down_bias(expert.id, layer_.slices_[piece.node].first_down + piece.first_pair);
  for (int r = 0; bias && r < part.rows; ++r) table_.add_row(scratch.tile + r * kTileStride, bias, columns);
  // Tiles write whole tiles, so not to where they belong.
  float* const to = results_ + part.first_row * results_stride_ + first_pair * kPairColumns;
  if (streams_)
    table_.stream_rows(scratch.tile, kTileStride, to, results_stride_, part.rows, columns);
  else
    for (int r = 0; r < part.rows; ++r) std::copy_n(scratch.tile + r * kTileStride, columns, to + r * results_stride_);
  if (!in_rounds_) finish_columns(first_pair, piece.pairs, scratch);
}

void ExpertRun::add_up_columns(int64_t block, WorkerScratch& scratch) {
  const int64_t pairs = std::min(kPairsPerSum, layer_.down_layout_.pairs - block * kPairsPerSum);
  const int64_t first_column = block * kPairsPerSum * kPairColumns, columns = pairs * kPairColumns;
  std::fill_n(scratch.sums, call_.x.rows * columns, 0.0f);
  for (size_t row = 0; row < plan_.rows.size(); ++row)
    table_.add_scaled_row(scratch.sums + plan_.rows[row].token * columns,
                          results_ + int64_t(row) * results_stride_ + first_column, plan_.rows[row].weight, columns);
  store_sums(scratch.sums, 0, call_.x.rows, first_column, columns);
}

// Of a round's columns.
void ExpertRun::add_up_tokens(int64_t task, WorkerScratch& scratch) {
  const int64_t columns = first_result_pair(layer_.slices_.size()) * kPairColumns;
  const int64_t last = std::min(call_.x.rows, (task + 1) * kTokensPerSum);
  for (int64_t token = task * kTokensPerSum; token < last; ++token) {
    std::fill_n(scratch.sums, columns, 0.0f);
    for (const int32_t row : plan_.rows_of(token))
      table_.add_scaled_row(scratch.sums, results_ + row * results_stride_, plan_.rows[size_t(row)].weight, columns);
    const float* sums = scratch.sums;
    for (size_t node = 0; node < layer_.slices_.size(); ++node) {
      const Pairs pairs = pairs_of(down_, node);
      const int64_t of_node = pairs.count * kPairColumns;
      store_sums(sums, token, 1, (layer_.slices_[node].first_down + pairs.first) * kPairColumns, of_node);
      sums += of_node;
    }
  }
}

// Of tokens and columns of which `sums` are in rows of `columns`.
void ExpertRun::store_sums(const float* sums, int64_t first_token, int64_t tokens, int64_t first_column,
                           int64_t columns) {
  const int64_t length = std::min<int64_t>(columns, layer_.shape_.hidden - first_column);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t offset = (first_token + t) * layer_.shape_.hidden + first_column;
    table_.store_row(sums + t * columns, static_cast<uint8_t*>(call_.out) + offset * bytes_of(call_.out_type),
                     call_.out_type, call_.add, length);
  }
}

}  // namespace tandem
