#include "experts/expert_run.h"

#include <algorithm>
#include <cstring>

#include "experts/task_sizes.h"
#include "ops/int8_rows.h"

namespace tandem {
namespace {

constexpr int64_t kTaskBytes = 192 * 1024;  // weights per task of few rows and phase 3, unless there would be too few
constexpr int64_t kTasksPerWorker = 4;      // at least, so that dynamic pick-up can even things out
constexpr int64_t kPrepareRows = 8;         // per task; fewer are converted by the caller before the region
constexpr int64_t kMinTokensPerTask = 64;   // splitting tokens finer would read the weights too often
// What a task of many rows costs beside its multiplications, in columns and in rows that could be computed meanwhile:
// gathering its rows does not depend on the columns, and unpacking its weights not on the rows.
constexpr double kGatherColumns = 40, kUnpackRows = 40;

// Pairs per task: long streams, but enough tasks for everyone. With many rows the streams are short beside the work,
// and a wide task gathers its rows only once.
int64_t pairs_per_task(int64_t all_pairs, int64_t pair_bytes, int workers, bool many_rows, int64_t most) {
  const int64_t by_bytes = many_rows ? most : std::max<int64_t>(1, kTaskBytes / pair_bytes);
  const int64_t by_share = std::max<int64_t>(1, all_pairs / (kTasksPerWorker * workers));
  return std::min<int64_t>({by_bytes, by_share, most});
}

}  // namespace

ExpertRun::ExpertRun(ExpertLayer& layer, const ExpertCall& call)
    : layer_(layer),
      call_(call),
      plan_(layer.plan_),
      workspace_(*layer.workspace_),
      table_(workspace_.table()),
      hidden_type_(prepared_type(table_, layer.shape_.down.format)),
      rounds_any_(std::ranges::any_of(plan_.experts, [this](const auto& e) { return rounds(e); })),
      rounds_all_(std::ranges::all_of(plan_.experts, [this](const auto& e) { return rounds(e); })),
      converts_(!rounds_all_ && !is_prepared(table_, layer.gate_up_layout_, call.x)) {
  x_.stride = layer.gate_up_layout_.padded_depth * bytes_of(prepared_type(table_, layer.shape_.gate_up.format));
  x_.data = converts_ ? workspace_.shared(Workspace::kRows, call.x.rows * x_.stride)
                      : static_cast<const uint8_t*>(call.x.data);
  hidden_.stride = layer.down_layout_.padded_depth * bytes_of(hidden_type_);
  hidden_.data = workspace_.shared(Workspace::kHidden, int64_t(plan_.rows.size()) * hidden_.stride);
  if (rounds_any_) {
    x_codes_.stride = int8_row_bytes(layer.gate_up_layout_);
    x_codes_.data = workspace_.shared(Workspace::kRowCodes, call.x.rows * x_codes_.stride);
    codes_.stride = int8_row_bytes(layer.down_layout_);
    codes_.data = workspace_.shared(Workspace::kHiddenCodes, int64_t(plan_.rows.size()) * codes_.stride);
  }
  list_tasks(gate_up_, layer.gate_up_layout_, &NodeSlice::gate_up_pairs);
  by_expert_ = by_expert();
  by_expert_ ? list_down_by_expert() : list_down_by_columns();
}

void ExpertRun::list_down_by_columns() {
  grid_ = down_grid();
  for (const NodeSlice& slice : layer_.slices_) down_.by_node.add(grid_.token_blocks * column_blocks(slice));
}

void ExpertRun::list_tasks(Tasks& tasks, const WeightView& layout, int64_t NodeSlice::* pairs) const {
  for (const NodeSlice& slice : layer_.slices_) {
    const size_t before = tasks.all.size();
    list_tasks_of_node(tasks.all, slice.*pairs, 2 * layout.panel_bytes);
    tasks.by_node.add(int64_t(tasks.all.size() - before));
  }
}

void ExpertRun::list_tasks_of_node(std::vector<Task>& tasks, int64_t pairs, int64_t pair_bytes) const {
  const int64_t rows_each = table_.blocking.rows_per_call, most = table_.blocking.pairs_per_call;
  const int workers = workspace_.pool().size(), nodes = workspace_.pool().nodes();
  int64_t left = 0;
  for (const RoutingPlan::Expert& e : plan_.experts) left += pairs * ceil_div(e.count, rows_each);
  const int64_t each = has_many_rows() ? pairs_per_task(left * nodes, pair_bytes, workers, true, most) : 0;
  for (size_t e = 0; e < plan_.experts.size(); ++e) {
    const auto& [id, first, count] = plan_.experts[e];
    const int64_t blocks = ceil_div(count, rows_each);
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t begin = int32_t(count * b / blocks), rows = int32_t(count * (b + 1) / blocks) - begin;
      for (int64_t pair = 0, taken; pair < pairs; pair += taken, left -= taken) {
        taken = std::min(each ? each : guided_pairs(left, pair_bytes, ceil_div(workers, nodes), most), pairs - pair);
        tasks.push_back({int32_t(e), first + begin, rows, int32_t(pair), int32_t(taken)});
      }
    }
  }
}

int64_t ExpertRun::mean_rows() const {
  return int64_t(plan_.rows.size()) / std::max<int64_t>(1, int64_t(plan_.experts.size()));
}

bool ExpertRun::has_many_rows() const { return mean_rows() >= table_.blocking.many_rows; }

ExpertRun::Grid ExpertRun::down_grid() const {
  Grid grid = has_many_rows() ? multiplying_grid() : streaming_grid();
  grid.tokens_each = ceil_div(call_.x.rows, grid.token_blocks);
  grid.token_blocks = ceil_div(call_.x.rows, grid.tokens_each);
  return grid;
}

int64_t ExpertRun::column_blocks(const NodeSlice& slice) const { return ceil_div(slice.down_pairs, grid_.pairs_each); }

// Few rows: long streams of weights, and tokens are only divided where their sums would not fit, or for more tasks.
ExpertRun::Grid ExpertRun::streaming_grid() const {
  const int64_t workers = workspace_.pool().size(), pairs = layer_.down_layout_.pairs, tokens = call_.x.rows;
  const int64_t bytes = 2 * layer_.down_layout_.panel_bytes * std::max<int64_t>(1, int64_t(plan_.experts.size()));
  const int64_t by_sums = std::max<int64_t>(1, table_.blocking.sum_floats / (kPairColumns * tokens));
  Grid grid{};
  grid.pairs_each = std::min(
      pairs_per_task(pairs, std::min(bytes, kTaskBytes / 2), int(workers), false, table_.blocking.pairs_per_call),
      by_sums);
  const int64_t wanted = ceil_div(kTasksPerWorker * workers, ceil_div(pairs, grid.pairs_each));
  const int64_t needed = ceil_div(tokens * kPairColumns, table_.blocking.sum_floats);
  grid.token_blocks = std::max(needed, std::clamp<int64_t>(tokens / kMinTokensPerTask, 1, wanted));
  return grid;
}

// Many rows: the division into equal tasks that should take the least time. Weights are read once per block of tokens,
// intermediate activations once per block of columns; what is left over at the end costs a quarter of a task.
ExpertRun::Grid ExpertRun::multiplying_grid() const {
  const int64_t nodes = workspace_.pool().nodes(), workers = std::max<int64_t>(1, workspace_.pool().size() / nodes);
  const int64_t pairs = ceil_div(layer_.down_layout_.pairs, nodes), tokens = call_.x.rows;  // a node's
  const int64_t sums = table_.blocking.sum_floats;
  Grid best{};
  double least = 0;
  for (int64_t blocks = 1; blocks <= std::max<int64_t>(1, tokens / kMinTokensPerTask); ++blocks)
    for (int64_t each = 1; each <= std::min<int64_t>(table_.blocking.pairs_per_call, pairs); ++each) {
      const int64_t tokens_each = ceil_div(tokens, blocks);
      if (tokens_each * each * kPairColumns > sums) continue;
      const double rows = std::max(1.0, double(mean_rows()) / double(blocks));
      const double task =
          double(tokens_each * each) * (1 + kGatherColumns / double(kPairColumns * each) + kUnpackRows / rows);
      const double time = task * (double(ceil_div(blocks * ceil_div(pairs, each), workers)) + 0.25);
      if (best.pairs_each && time >= least) continue;
      least = time;
      best.pairs_each = each;
      best.token_blocks = blocks;
    }
  return best;
}

void ExpertRun::run() {
  int64_t unprepared = converts_ || rounds_any_ ? call_.x.rows : 0;
  if (unprepared <= rows_each(call_.x.rows)) {
    prepare_some(0, unprepared);
    unprepared = 0;
  }
  const auto scratch = [this](const Worker& w) -> WorkerScratch& { return workspace_.scratch(w.index); };
  const int64_t rows = int64_t(plan_.rows.size());
  workspace_.pool().run_phases({
      {ceil_div(unprepared, rows_each(call_.x.rows)), [this](int64_t i, const Worker&) { prepare(i); }},
      {gate_up_.by_node.count(), [&](int64_t i, const Worker& w) { gate_up(i, scratch(w)); },
       gate_up_.by_node.of_node()},
      {rounds_any_ ? ceil_div(rows, rows_each(rows)) : 0, [this](int64_t i, const Worker&) { round(i); }},
      {down_.by_node.count(),
       [&](int64_t i, const Worker& w) { by_expert_ ? down_part(i, scratch(w)) : down(i, scratch(w)); },
       down_.by_node.of_node()},
      {by_expert_ ? sum_tasks() : 0, [&](int64_t i, const Worker& w) { add_up(i, scratch(w)); }},
  });
}

// Rounding takes longer than converting.
int64_t ExpertRun::rows_each(int64_t rows) const {
  if (!rounds_any_) return kPrepareRows;
  return std::clamp<int64_t>(rows / (kTasksPerWorker * workspace_.pool().size()), 1, kPrepareRows);
}

void ExpertRun::prepare(int64_t task) {
  const int64_t each = rows_each(call_.x.rows), first = task * each;
  prepare_some(first, std::min(call_.x.rows, first + each));
}

void ExpertRun::prepare_some(int64_t first, int64_t last) {
  const WeightView& layout = layer_.gate_up_layout_;
  if (converts_) prepare_rows(table_, layout, call_.x, first, last, const_cast<uint8_t*>(x_.data));
  if (!rounds_any_) return;
  const PreparedRows from{static_cast<const uint8_t*>(call_.x.data), call_.x.length * bytes_of(call_.x.type)};
  round_rows(table_, layout, from, call_.x.type, first, last, const_cast<uint8_t*>(x_codes_.data));
}

void ExpertRun::round(int64_t task) {
  const int64_t rows = int64_t(plan_.rows.size()), each = rows_each(rows), first = task * each;
  round_rows(table_, layer_.down_layout_, hidden_, hidden_type_, first, std::min(rows, first + each),
             const_cast<uint8_t*>(codes_.data));
}

bool ExpertRun::rounds(const RoutingPlan::Expert& expert) const {
  return layer_.shape_.int8_activations && takes_int8(table_, layer_.shape_.gate_up.format, expert.count);
}

MatmulFn ExpertRun::kernel_for(const RoutingPlan::Expert& expert, const WeightView& weights, int64_t rows) const {
  return rounds(expert) ? table_.int8[int(weights.format)].rows : matmul_of(table_, weights.format, rows);
}

// Where the task begins that a worker probably takes after this one; null past its node's last.
const uint8_t* ExpertRun::next_panels(const Tasks& tasks, int64_t index, WeightsOf weights) const {
  const auto [node, of_node] = tasks.by_node.at(index);
  const int ahead = workspace_.pool().workers_of(int(node));
  if (of_node + ahead >= tasks.by_node.of_node()[node]) return nullptr;
  const Task& next = tasks.all[size_t(index + ahead)];
  const WeightView view = (layer_.*weights)(plan_.experts[size_t(next.expert)].id, node);
  return view.panels + 2 * next.first_pair * view.panel_bytes;
}

void ExpertRun::gate_up(int64_t index, WorkerScratch& scratch) {
  const size_t node = gate_up_.by_node.at(index).node;
  const NodeSlice& slice = layer_.slices_[node];
  const Task& task = gate_up_.all[size_t(index)];
  const RoutingPlan::Expert& expert = plan_.experts[size_t(task.expert)];
  const int id = expert.id;
  const WeightView weights = layer_.gate_up(id, node);
  const PreparedRows& x = rounds(expert) ? x_codes_ : x_;
  for (int r = 0; r < task.rows; ++r) scratch.rows[r] = x.row(plan_.rows[size_t(task.first_row + r)].token);
  const MatmulArgs args{weights,         scratch.rows,   scratch.tile,
                        kTileStride,     scratch.matmul, task.rows,
                        task.first_pair, task.pairs,     next_panels(gate_up_, index, &ExpertLayer::gate_up)};
  kernel_for(expert, weights, task.rows)(&args);
  const int64_t length = int64_t{layer_.gate_up_layout_.pairs} * kPairColumns;
  const int64_t pair = slice.first_gate_up + task.first_pair, column = pair * kPairColumns;
  const float* bias = layer_.gate_up_bias_.empty() ? nullptr : layer_.gate_up_bias_.data() + id * length + column;
  for (int r = 0; r < task.rows; ++r) {
    float* y = scratch.tile + r * kTileStride;
    if (bias) table_.add_row(y, bias, int64_t{task.pairs} * kPairColumns);
    uint8_t* to = const_cast<uint8_t*>(hidden_.data) + (task.first_row + r) * hidden_.stride +
                  column / 2 * bytes_of(hidden_type_);
    table_.activate_row(&layer_.shape_.activation, y, to, hidden_type_, layer_.shape_.down.format != Format::f32,
                        task.pairs);
    if (pair + task.pairs == layer_.gate_up_layout_.pairs) clear_padding(task.first_row + r);
  }
}

// Padded weights are 0, but 0 times what an earlier call left here could be NaN.
void ExpertRun::clear_padding(int64_t row) {
  const int64_t used = int64_t{layer_.gate_up_layout_.pairs} * kPanelRows * bytes_of(hidden_type_);
  std::memset(const_cast<uint8_t*>(hidden_.data) + row * hidden_.stride + used, 0, size_t(hidden_.stride - used));
}

void ExpertRun::down(int64_t index, WorkerScratch& scratch) {
  const auto [node, task] = down_.by_node.at(index);
  const NodeSlice& slice = layer_.slices_[node];
  const int64_t across = column_blocks(slice), first_token = task / across * grid_.tokens_each;
  const int64_t first_pair = task % across * grid_.pairs_each;
  const DownBlock block{node, first_token, std::min(grid_.tokens_each, call_.x.rows - first_token), first_pair,
                        std::min(grid_.pairs_each, slice.down_pairs - first_pair)};
  const int64_t columns = block.pairs * kPairColumns, first_column = (slice.first_down + first_pair) * kPairColumns;
  std::fill_n(scratch.sums, block.tokens * columns, 0.0f);
  const auto before = [](const RoutedRow& row, int64_t token) { return row.token < token; };
  for (size_t e = 0; e < plan_.experts.size(); ++e) {
    const RoutingPlan::Expert& expert = plan_.experts[e];
    const auto begin = plan_.rows.begin() + expert.first, end = begin + expert.count;
    const auto from = std::lower_bound(begin, end, first_token, before);
    const auto to = std::lower_bound(from, end, first_token + block.tokens, before);
    const uint8_t* next = nullptr;
    if (e + 1 < plan_.experts.size())
      next = layer_.down(plan_.experts[e + 1].id, node).panels + 2 * first_pair * layer_.down_layout_.panel_bytes;
    down_expert(expert, block, next, from - plan_.rows.begin(), to - plan_.rows.begin(), scratch);
  }
  store_sums(scratch.sums, first_token, block.tokens, first_column, columns);
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

// From pair `pair` of all nodes on; null if there is none.
const float* ExpertRun::down_bias(int expert, int64_t pair) const {
  if (layer_.down_bias_.empty()) return nullptr;
  return layer_.down_bias_.data() + (expert * int64_t{layer_.down_layout_.pairs} + pair) * kPairColumns;
}

void ExpertRun::down_expert(const RoutingPlan::Expert& expert, const DownBlock& block, const uint8_t* next_panel,
                            int64_t first_row, int64_t last_row, WorkerScratch& scratch) {
  const WeightView weights = layer_.down(expert.id, block.node);
  const PreparedRows& hidden = rounds(expert) ? codes_ : hidden_;
  const int64_t columns = block.pairs * kPairColumns;
  const float* bias = down_bias(expert.id, layer_.slices_[block.node].first_down + block.first_pair);
  for (int64_t row = first_row; row < last_row; row += table_.blocking.rows_per_call) {
    const int64_t rows = std::min<int64_t>(table_.blocking.rows_per_call, last_row - row);
    for (int64_t r = 0; r < rows; ++r) scratch.rows[r] = hidden.row(row + r);
    const MatmulArgs args{weights,   scratch.rows,          scratch.tile,     kTileStride, scratch.matmul,
                          int(rows), int(block.first_pair), int(block.pairs), next_panel};
    kernel_for(expert, weights, rows)(&args);
    for (int64_t r = 0; r < rows; ++r) {
      const RoutedRow& routed = plan_.rows[size_t(row + r)];
      float* y = scratch.tile + r * kTileStride;
      if (bias) table_.add_row(y, bias, columns);
      table_.add_scaled_row(scratch.sums + (routed.token - block.first_token) * columns, y, routed.weight, columns);
    }
  }
}

}  // namespace tandem
