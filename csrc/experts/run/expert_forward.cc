#include "experts/run/expert_forward.h"

#include <algorithm>
#include <cstring>

namespace tandem {
namespace {

constexpr int64_t kTasksPerWorker = 4;       // at least, so that dynamic pick-up can even things out
constexpr int64_t kPrepareRows = 8;          // per task
constexpr int64_t kAheadBytes = 128 * 1024;  // of a task's weights, fetched before its phase begins: fit any L2
constexpr int64_t kAheadStepBytes = 1024;    // a fraction of a microsecond: the phase may begin

}  // namespace

ExpertForward::ExpertForward(ExpertStore& layer, const ExpertCall& call)
    : layer_(layer),
      call_(call),
      plan_(layer.plan_),
      workspace_(*layer.workspace_),
      table_(workspace_.table()),
      hidden_type_(prepared_type(table_, layer.shape_.down.format)),
      x_integers_({table_, layer.gate_up_layout_, layer.shape_.int8_activations}, call.x.rows),
      hidden_integers_({table_, layer.down_layout_, layer.shape_.int8_activations}, int64_t(plan_.rows.size())),
      prepares_(!is_prepared(table_, layer.gate_up_layout_, call.x) ||
                (has_many_rows() && crowds_cache(table_, call.x))) {
  choose_integers();
  x_.stride = prepares_ ? prepared_stride(table_, layer.gate_up_layout_) : call.x.length * bytes_of(call.x.type);
  x_.data = prepares_ ? workspace_.shared(Workspace::kRows, call.x.rows * x_.stride)
                      : static_cast<const uint8_t*>(call.x.data);
  hidden_.stride = prepared_stride(table_, layer.down_layout_);
  hidden_.data = workspace_.shared(Workspace::kHidden, int64_t(plan_.rows.size()) * hidden_.stride);
  list_parts();
  was_foreseen() ? list_own() : divide(gate_up_, layer.gate_up_layout_);
  in_rounds_ = has_many_rows() || int64_t(plan_.rows.size()) > table_.blocking.result_rows;
  count_pairs();
  list_down();
}

// Decided by all rows of an expert, for both of its products.
void ExpertForward::choose_integers() {
  bool all = true;
  for (const auto& [id, first, count] : plan_.experts) {
    const bool x = takes_x(count), hidden = hidden_integers_.how().takes(count);
    for (int32_t row = first; row < first + count; ++row) {
      if (x) x_integers_.add(plan_.rows[size_t(row)].token);
      if (hidden) hidden_integers_.add(row);
    }
    converts_at_end_ = converts_at_end_ && !(hidden && count > kPrepareRows);
    all = all && x;
  }
  prepares_ = prepares_ && !all;
  x_integers_.allocate(workspace_, Workspace::kRowCodes);
  hidden_integers_.allocate(workspace_, Workspace::kHiddenCodes);
}

void ExpertForward::count_pairs() {
  if (!converts_at_end_) return;
  unfinished_ = std::vector<Countdown>(plan_.experts.size());
  for (const Part& part : parts_) {
    std::atomic<int32_t>& left = unfinished_[size_t(part.expert)].left;
    left.store(left.load(std::memory_order_relaxed) + layer_.gate_up_layout_.pairs, std::memory_order_relaxed);
  }
}

// The others' writes to `hidden_` happened before their counting.
void ExpertForward::finish(const Piece& piece) {
  if (unfinished_.empty()) return;
  std::atomic<int32_t>& left = unfinished_[size_t(piece.part.expert)].left;
  if (left.fetch_sub(piece.pairs, std::memory_order_acq_rel) > piece.pairs) return;
  const auto& [id, first, count] = plan_.experts[size_t(piece.part.expert)];
  if (hidden_integers_.has(first)) {
    const int64_t place = hidden_integers_.place(first);
    hidden_integers_.convert(hidden_, hidden_type_, place, place + count);
  }
  left.store(kComplete, std::memory_order_release);
}

void ExpertForward::list_parts() {
  parts_.reserve(plan_.experts.size());
  for (size_t e = 0; e < plan_.experts.size(); ++e) {
    const auto& [id, first, count] = plan_.experts[e];
    const int64_t blocks = ceil_div(count, rows_per_part(table_, layer_.gate_up_layout_, layer_.down_layout_, count));
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t begin = int32_t(count * b / blocks), end = int32_t(count * (b + 1) / blocks);
      parts_.push_back({int32_t(e), first + begin, end - begin});
    }
  }
}

int64_t ExpertForward::most_rows() const {
  int32_t most = 0;
  for (const Part& part : parts_) most = std::max(most, part.rows);
  return most;
}

// Many rows: equal tasks, as wide as a call can be, since each gathers its rows.
void ExpertForward::divide(Tasks& tasks, const WeightView& layout) const {
  const int64_t most = has_many_rows() ? workspace_.most_pairs(most_rows()) : table_.blocking.pairs_per_call;
  const int64_t pair_bytes = layout.pair_bytes;
  const int64_t workers = workspace_.pool().size(), nodes = workspace_.pool().nodes(), parts = int64_t(parts_.size());
  tasks.of_node.clear();
  tasks.by_node = {};
  for (size_t node = 0; node < layer_.slices_.size(); ++node) {
    const int64_t each = pairs_of(tasks, node).count, all = each * parts;
    if (has_many_rows())
      tasks.of_node.push_back(
          Division::equal(parts, each, std::clamp<int64_t>(all * nodes / (kTasksPerWorker * workers), 1, most)));
    else
      tasks.of_node.push_back(Division::guided(all, pair_bytes, ceil_div(workers, nodes), most));
    tasks.by_node.add(tasks.of_node.back().tasks());
  }
}

ExpertForward::Pairs ExpertForward::pairs_of(const Tasks& tasks, size_t node) const {
  const int64_t pairs = layer_.slices_[node].*tasks.pairs, first = pairs * tasks.round / tasks.rounds;
  return {first, pairs * (tasks.round + 1) / tasks.rounds - first};
}

int64_t ExpertForward::mean_rows() const {
  return int64_t(plan_.rows.size()) / std::max<int64_t>(1, int64_t(plan_.experts.size()));
}

bool ExpertForward::has_many_rows() const { return mean_rows() >= table_.blocking.many_expert_rows; }

void ExpertForward::run() {
  const PreparedRows given{static_cast<const uint8_t*>(call_.x.data), call_.x.length * bytes_of(call_.x.type)};
  const auto convert_x = [&](int64_t i) { convert(x_integers_, given, call_.x.type, i); };
  const auto convert_hidden = [&](int64_t i) { convert(hidden_integers_, hidden_, hidden_type_, i); };
  const auto scratch = [this](const Worker& w) -> WorkerScratch& { return workspace_.scratch(w.index); };
  const auto do_gate_up = [&](int64_t i, const Worker& w) {
    for_pieces(gate_up_, gate_up_.by_node.at(i), [&](const Piece& piece) { gate_up(piece, scratch(w)); });
  };
  const auto do_own = [&](int64_t i, int64_t count, const Worker& w) { own_gate_up(i, count, scratch(w)); };
  const auto fetch_gate_up = [this](int64_t i, int64_t step) {
    return own_.count() ? fetch_step(own_piece(i), step) : fetch(gate_up_, gate_up_.by_node.at(i), step);
  };
  const WorkerPool::Own own{own_.of_worker(), own_at_once(), do_own};
  const int64_t preparing = prepares_ ? ceil_div(call_.x.rows, kPrepareRows) : 0;
  const auto prepare_or_convert = [&](int64_t i, const Worker&) {
    i < preparing ? prepare(i) : convert_x(i - preparing);
  };
  const auto do_convert_hidden = [&](int64_t i, const Worker&) { convert_hidden(i); };
  std::vector<WorkerPool::Phase> phases = {
      {preparing + tasks_of(x_integers_), prepare_or_convert},
      {own_.count() + gate_up_.by_node.count(), do_gate_up, gate_up_.by_node.of_node(),
       has_many_rows() ? WorkerPool::AheadBody() : fetch_gate_up, own_.count() ? &own : nullptr},
      {converts_at_end_ ? 0 : tasks_of(hidden_integers_), do_convert_hidden},
  };
  for (const DownStep& step : steps_)  // which does tasks, fetches for them, and knows which are ready
    phases.push_back({step.by_node.count(), step, step.by_node.of_node(), step, nullptr, step});
  for (size_t first = 0; first < phases.size(); first += WorkerPool::kMostPhases)
    workspace_.pool().run_phases(
        std::span(phases).subspan(first, std::min(WorkerPool::kMostPhases, phases.size() - first)));
}

// Finding digits takes longer than copying.
int64_t ExpertForward::converted_each(int64_t rows) const {
  return std::clamp<int64_t>(rows / (kTasksPerWorker * workspace_.pool().size()), 1, kPrepareRows);
}

int64_t ExpertForward::tasks_of(const ConvertedRows& rows) const {
  return ceil_div(rows.count(), converted_each(rows.count()));
}

void ExpertForward::prepare(int64_t task) {
  const int64_t first = task * kPrepareRows, last = std::min(call_.x.rows, first + kPrepareRows);
  prepare_rows(table_, layer_.gate_up_layout_, call_.x, first, last, const_cast<uint8_t*>(x_.data));
}

void ExpertForward::convert(const ConvertedRows& rows, const PreparedRows& from, DType type, int64_t task) const {
  const int64_t each = converted_each(rows.count()), first = task * each;
  rows.convert(from, type, first, std::min(rows.count(), first + each));
}

MatmulFn ExpertForward::find_x(const RoutingPlan::Expert& expert, int64_t first, int64_t rows,
                               WorkerScratch& scratch) const {
  const bool integers = takes_x(expert.count);
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t token = plan_.rows[size_t(first + r)].token;
    scratch.rows[r] = integers ? x_integers_.row(token) : x_.row(token);
  }
  return integers ? x_integers_.how().kernel() : matmul_of(table_, layer_.gate_up_layout_.format, rows);
}

MatmulFn ExpertForward::find_hidden(const RoutingPlan::Expert& expert, int64_t first, int64_t rows,
                                    WorkerScratch& scratch) const {
  const bool integers = hidden_integers_.how().takes(expert.count);
  for (int64_t r = first; r < first + rows; ++r)
    scratch.rows[r - first] = integers ? hidden_integers_.row(r) : hidden_.row(r);
  return integers ? hidden_integers_.how().kernel() : matmul_of(table_, layer_.down_layout_.format, rows);
}

// What lies of pairs [pair, end) in the part that begins with them.
ExpertForward::Piece ExpertForward::piece_at(const Tasks& tasks, size_t node, int64_t pair, int64_t end) const {
  const Pairs pairs = pairs_of(tasks, node);
  const int64_t index = pair / pairs.count, first = pair - index * pairs.count;
  const Part& part = parts_[size_t(index)];
  return {part,
          node,
          (layer_.*tasks.weights)(plan_.experts[size_t(part.expert)].id, node),
          int32_t(pairs.first + first),
          int32_t(std::min(pairs.count, first + end - pair) - first),
          nullptr};
}

// Where the task begins that a worker probably takes after this one; null past its node's last.
const uint8_t* ExpertForward::next_panels(const Tasks& tasks, NodeTasks::Place place) const {
  const auto [node, of_node] = place;
  const int64_t next = of_node + workspace_.pool().workers_of(int(node));
  if (next >= tasks.by_node.of_node()[node]) return nullptr;
  const auto [begin, end] = tasks.of_node[node].at(next);
  const Piece piece = piece_at(tasks, node, begin, end);
  return piece.weights.panels + piece.first_pair * piece.weights.pair_bytes;
}

template <class Body>
void ExpertForward::for_pieces(const Tasks& tasks, NodeTasks::Place place, Body body) const {
  const auto [node, of_node] = place;
  const auto [begin, end] = tasks.of_node[node].at(of_node);
  for (int64_t pair = begin; pair < end;) {
    Piece piece = piece_at(tasks, node, pair, end);
    pair += piece.pairs;
    if (pair < end) {
      const Piece after = piece_at(tasks, node, pair, end);
      piece.next = after.weights.panels + after.first_pair * after.weights.pair_bytes;
    } else {
      piece.next = next_panels(tasks, place);
    }
    body(piece);
  }
}

void ExpertForward::down_task(const Tasks& round, NodeTasks::Place place, WorkerScratch& scratch) {
  for_pieces(round, place, [&](const Piece& piece) { down(round, piece, scratch); });
}

// A step of what may be fetched of a task's weights before its phase begins; false when that is all.
bool ExpertForward::fetch(const Tasks& tasks, NodeTasks::Place place, int64_t step) const {
  const auto [node, of_node] = place;
  const auto [begin, end] = tasks.of_node[node].at(of_node);
  return fetch_step(piece_at(tasks, node, begin, end), step);
}

bool ExpertForward::fetch_step(const Piece& piece, int64_t step) {
  const WeightView& view = piece.weights;
  if (view.pair_bytes == view.panel_bytes && view.second == view.panel_bytes) return false;  // of two formats
  const int64_t steps = ceil_div(view.panel_bytes, kAheadStepBytes), panel = step / steps;
  if (panel >= std::min<int64_t>(2 * piece.pairs, ceil_div(kAheadBytes, view.panel_bytes))) return false;
  const uint8_t* const from = view.panels + (piece.first_pair + panel / 2) * view.pair_bytes + panel % 2 * view.second;
  const int64_t first = step % steps * kAheadStepBytes, last = std::min(view.panel_bytes, first + kAheadStepBytes);
  for (int64_t at = first; at < last; at += kCacheLine) __builtin_prefetch(from + at, 0, 2);  // into L2
  return true;
}

// The rows that were found times the piece's weights, to scratch.tile.
void ExpertForward::multiply(MatmulFn kernel, const Piece& piece, int64_t x_stride, WorkerScratch& scratch) const {
  const MatmulArgs args{piece.weights,  scratch.rows,    scratch.tile,        tile_stride(piece.pairs),
                        scratch.matmul, piece.part.rows, piece.first_pair,    piece.pairs,
                        piece.next,     x_stride,        workspace_.one_way()};
  kernel(&args);
}

// Gate and up of two formats, to scratch.tile as one view of both would give it: 16 columns of each in turn. Kernels
// take pairs of panels, so an odd number of them gets one that is not asked for, before or behind; a node has an even
// number (see together() in experts/store/expert_store.cc).
void ExpertForward::multiply_each(const Piece& piece, WorkerScratch& scratch) const {
  const int32_t extra = piece.pairs % 2, early = piece.first_pair + piece.pairs == piece.weights.pairs ? extra : 0;
  const int32_t calls = (piece.pairs + extra) / 2;
  const int64_t stride = tile_stride(calls), rows = ceil_div(piece.part.rows, kPanelRows) * kPanelRows;
  const WeightView views[] = {piece.weights, layer_.up(piece.weights)};
  for (int p = 0; p < 2; ++p) {
    WeightView view = views[p];
    view.panels += (piece.first_pair - early) * view.panel_bytes;
    view.pairs = calls;
    view.pair_bytes = 2 * view.panel_bytes;
    float* const to = scratch.sums + p * rows * stride;
    const uint8_t* next = p ? piece.next : views[1].panels + piece.first_pair * views[1].panel_bytes;
    const MatmulArgs args{view, scratch.rows, to,   stride, scratch.matmul,      piece.part.rows,
                          0,    calls,        next, 0,      workspace_.one_way()};
    matmul_of(table_, view.format, piece.part.rows)(&args);
    for (int64_t r = 0; r < piece.part.rows; ++r)
      for (int32_t i = 0; i < piece.pairs; ++i)
        std::copy_n(to + r * stride + (i + early) * kPanelRows, kPanelRows,
                    scratch.tile + r * tile_stride(piece.pairs) + i * kPairColumns + p * kPanelRows);
  }
}

void ExpertForward::gate_up(const Piece& piece, WorkerScratch& scratch) {
  const Part& part = piece.part;
  const RoutingPlan::Expert& expert = plan_.experts[size_t(part.expert)];
  const MatmulFn kernel = find_x(expert, part.first_row, part.rows, scratch);
  layer_.shape_.mixed() ? multiply_each(piece, scratch) : multiply(kernel, piece, 0, scratch);
  const int64_t length = int64_t{layer_.gate_up_layout_.pairs} * kPairColumns;
  const int64_t pair = layer_.slices_[piece.node].first_gate_up + piece.first_pair, column = pair * kPairColumns;
  const float* bias =
      layer_.gate_up_bias_.empty() ? nullptr : layer_.gate_up_bias_.data() + expert.id * length + column;
  for (int r = 0; r < part.rows; ++r) {
    float* y = scratch.tile + r * tile_stride(piece.pairs);
    if (bias) table_.add_row(y, bias, int64_t{piece.pairs} * kPairColumns);
    uint8_t* to = const_cast<uint8_t*>(hidden_.data) + (part.first_row + r) * hidden_.stride +
                  column / 2 * bytes_of(hidden_type_);
    uint8_t* second = to + layer_.shape_.gate_rows() * bytes_of(hidden_type_);
    table_.activate_row(&layer_.shape_.activation, y, to, second, hidden_type_,
                        layer_.shape_.down.format != Format::f32, piece.pairs);
    if (pair + piece.pairs == layer_.gate_up_layout_.pairs) clear_padding(part.first_row + r);
  }
  finish(piece);
}

// Padded weights are 0, but 0 times what an earlier call left here could be NaN.
void ExpertForward::clear_padding(int64_t row) {
  const int64_t columns = layer_.gate_up_layout_.pairs * int64_t{layer_.shape_.gated() ? kPanelRows : kPairColumns};
  const int64_t used = columns * bytes_of(hidden_type_);
  std::memset(const_cast<uint8_t*>(hidden_.data) + row * hidden_.stride + used, 0, size_t(hidden_.stride - used));
}

}  // namespace tandem
