#include "experts/store/expert_store.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "experts/run/expert_forward.h"
#include "experts/run/task_sizes.h"
#include "format/staged.h"
#include "ops/integer_rows.h"
#include "runtime/fill.h"

namespace tandem {
namespace {

constexpr int64_t kIntermediateBytes = int64_t{144} << 20;  // of experts: DeepSeek-V3's of 4096 tokens
constexpr int64_t kCopyBytes = int64_t{512} << 10;          // of packed bytes, per task

void check_shape(const ExpertShape& shape) {
  if (shape.experts < 1 || shape.hidden < 1 || shape.width < 1)
    throw std::invalid_argument("an expert layer needs at least one expert, hidden and width >= 1");
  const auto whole = [](const WeightFormat& f) { return f.format == Format::bf16_rows; };
  if (whole(shape.gate) != whole(shape.down) || whole(shape.gate) != whole(shape.up))
    throw std::invalid_argument("either all of an expert's matrices are read in whole rows, or none");
  if (shape.mixed() && (!shape.gated() || (shape.gate.format == Format::f32) != (shape.up.format == Format::f32)))
    throw std::invalid_argument("gate and up cannot be " + described(shape.gate) + " and " + described(shape.up));
  if (!shape.gated() && shape.width % kPairColumns)
    throw std::invalid_argument("experts without a gate have a width of whole " + std::to_string(kPairColumns) +
                                "s, not of " + std::to_string(shape.width));
}

std::vector<ExpertStore::Piece> joined(const std::vector<ExpertStore::Piece>& pieces) {
  std::vector<ExpertStore::Piece> made;
  for (const ExpertStore::Piece& piece : pieces) {
    if (piece.bytes == 0) continue;
    if (!made.empty() && made.back().here + made.back().bytes == piece.here)
      made.back().bytes += piece.bytes;
    else
      made.push_back(piece);
  }
  return made;
}

int64_t panels_of(const NodeSlice& slice) { return 2 * (slice.gate_up_pairs + slice.down_pairs); }

// Of two formats, gate and up are computed as matrices of their own, in pairs of panels of each.
int64_t together(const ExpertShape& shape) { return shape.mixed() ? 2 : 1; }

}  // namespace

ExpertStore::ExpertStore(std::shared_ptr<Workspace> workspace, const ExpertShape& shape)
    : workspace_(std::move(workspace)),
      shape_(shape),
      cpu_slots_(std::max(shape.experts, 1), shape.cpu_slots ? shape.cpu_slots : std::max(shape.experts, 1)) {
  check_shape(shape);
  // Whole pairs of 16 gate and 16 up columns.
  const int64_t unit = kPanelRows * together(shape), padded_width = (shape.gate_rows() + unit - 1) / unit * unit;
  gate_up_layout_ = packed_layout(shape.gate, 2 * padded_width, shape.hidden);
  up_layout_ = packed_layout(shape.up, 2 * padded_width, shape.hidden);
  if (up_layout_.padded_depth != gate_up_layout_.padded_depth)
    throw std::invalid_argument("gate and up have groups that end in different slots: " + described(shape.gate) +
                                " and " + described(shape.up));
  gate_up_layout_.pair_bytes = gate_up_layout_.panel_bytes + up_layout_.panel_bytes;
  down_layout_ = packed_layout(shape.down, shape.hidden, shape.width);
  expert_bytes_ = packed_bytes(gate_up_layout_) + packed_bytes(down_layout_);
  slices_ = cut_by_node(gate_up_layout_, together(shape), down_layout_, cpu_slots_.count(), workspace_->pool());
  if (in_place()) rows_.resize(size_t(shape_.experts));
}

WeightView ExpertStore::gate_up(int expert, size_t node) const {
  const NodeSlice& slice = slices_[node];
  WeightView view = gate_up_layout_;
  view.pairs = int32_t(slice.gate_up_pairs);
  if (in_place()) {
    const Rows& rows = rows_[size_t(expert)];
    view.pair_bytes = view.panel_bytes;
    view.second = int64_t(uintptr_t(rows.up) - uintptr_t(rows.gate));
    view.panels = rows.gate + slice.first_gate_up * view.pair_bytes;
    return view;
  }
  view.panels = panels_ + slice.offset + cpu_slots_.of(expert) * slice.expert_bytes;
  if (shape_.mixed()) view.pair_bytes = view.panel_bytes;
  return view;
}

WeightView ExpertStore::up(const WeightView& gate) const {
  WeightView view = up_layout_;
  view.pairs = gate.pairs;
  view.pair_bytes = view.panel_bytes;
  view.panels = gate.panels + gate.pairs * gate.panel_bytes;
  return view;
}

WeightView ExpertStore::down(int expert, size_t node) const {
  const NodeSlice& slice = slices_[node];
  WeightView view = down_layout_;
  view.pairs = int32_t(slice.down_pairs);
  if (in_place()) {
    view.panels = rows_[size_t(expert)].down + slice.first_down * view.pair_bytes;
    return view;
  }
  view.panels = panels_ + slice.offset + cpu_slots_.of(expert) * slice.expert_bytes +
                slice.gate_up_pairs * gate_up_layout_.pair_bytes;
  return view;
}

std::vector<ByteRange> ExpertStore::bytes(int first, int count) const {
  if (first < 0 || count < 0 || first + count > shape_.experts)
    throw std::out_of_range("a layer of " + std::to_string(shape_.experts) + " experts has no " +
                            std::to_string(count) + " from " + std::to_string(first));
  if (in_place()) return rows_of(first, count);
  const int32_t cpu_slot = cpu_slots_.for_all() || count == 0 ? first : cpu_slots_.of(first);
  for (int i = 0; i < count && !cpu_slots_.for_all(); ++i)
    if (cpu_slot < 0 || cpu_slots_.of(first + i) != cpu_slot + i)
      throw std::invalid_argument("the experts " + std::to_string(first) + " to " + std::to_string(first + count - 1) +
                                  " do not lie side by side");
  std::vector<ByteRange> ranges;
  for (const NodeSlice& slice : slices_)
    ranges.push_back({panels_ + slice.offset + cpu_slot * slice.expert_bytes, count * slice.expert_bytes});
  return ranges;
}

std::vector<SharedRange> ExpertStore::shared_gate_up(int expert) const {
  std::vector<SharedRange> ranges;
  for (int node = 0, first = 0; node < int(slices_.size()); ++node) {
    const WeightView view = gate_up(expert, size_t(node));
    const int workers = workspace_->pool().workers_of(node);
    ranges.push_back({view.panels, view.pairs, view.pair_bytes, expert, first, workers});
    if (in_place()) ranges.push_back({view.panels + view.second, view.pairs, view.pair_bytes, expert, first, workers});
    if (shape_.mixed()) ranges.push_back({up(view).panels, view.pairs, up(view).pair_bytes, expert, first, workers});
    first += workers;
  }
  return ranges;
}

std::vector<ByteRange> ExpertStore::all_cpu_slots() const {
  if (in_place()) return rows_of(0, shape_.experts);
  std::vector<ByteRange> ranges;
  for (const NodeSlice& slice : slices_)
    if (panels_) ranges.push_back({panels_ + slice.offset, cpu_slots_.count() * slice.expert_bytes});
  return ranges;
}

ByteRange ExpertStore::packed() const {
  check_packed();
  if (!cpu_slots_.for_all()) throw std::invalid_argument("this layer holds only some of its experts");
  return {panels_, memory_bytes()};
}

void ExpertStore::load(int expert, const ExpertSource& source) { load_all({expert}, {source}); }

void ExpertStore::check_formats(const ExpertSource& source) const {
  check_source(gate_up_layout_, source.gate);
  check_source(up_layout_, source.up);
  check_source(down_layout_, source.down);
}

void ExpertStore::check_sources(const std::vector<int>& experts, const std::vector<ExpertSource>& sources) const {
  if (experts.size() != sources.size()) throw std::invalid_argument("every expert needs its gate, up and down");
  for (const int expert : experts)
    if (expert < 0 || expert >= shape_.experts)
      throw std::out_of_range("there is no expert " + std::to_string(expert) + " in a layer of " +
                              std::to_string(shape_.experts));
  for (const ExpertSource& source : sources) check_formats(source);
  cpu_slots_.check_room(experts);
}

void ExpertStore::check_activations() const {
  if (!shape_.int8_activations) return;
  if (shape_.mixed())
    throw std::invalid_argument("int8 activations do not exist for experts whose gate and up are " +
                                described(shape_.gate) + " and " + described(shape_.up) + ": leave the mode off");
  check_int8(workspace_->table(), gate_up_layout_);
  check_int8(workspace_->table(), down_layout_);
}

void ExpertStore::own_memory() {
  check_packed();
  check_activations();
  if (file_) throw std::invalid_argument("this layer's experts lie in a file; they cannot be loaded again");
  if (!memory_.data()) {
    memory_ = HugeBuffer(size_t(memory_bytes()));
    panels_ = memory_.data();
    for (size_t n = 0; slices_.size() > 1 && n < slices_.size(); ++n) {
      uint8_t* begin = memory_.data() + slices_[n].offset;
      HugeBuffer::prefer_node(begin, begin + slices_[n].expert_bytes * cpu_slots_.count(),
                              workspace_->pool().memory_node(int(n)));
    }
  }
}

std::vector<int32_t> ExpertStore::take_cpu_slots(NewCpuSlots& taken, const std::vector<int>& experts) {
  std::vector<int32_t> cpu_slots;
  for (const int expert : experts) cpu_slots.push_back(taken.take(expert));
  return cpu_slots;
}

void ExpertStore::load_all(const std::vector<int>& experts, const std::vector<ExpertSource>& sources) {
  check_sources(experts, sources);
  const auto lock = workspace_->lock();
  if (in_place()) return take_rows(experts, sources);
  own_memory();
  NewCpuSlots taken(cpu_slots_);
  const std::vector<int32_t> cpu_slots = take_cpu_slots(taken, experts);
  const auto pack = [&](size_t node, int64_t i) {
    const NodeSlice& slice = slices_[node];
    const size_t expert = size_t(i / panels_of(slice));
    uint8_t* const to = memory_.data() + slice.offset + cpu_slots[expert] * slice.expert_bytes;
    pack_panel_of(to, sources[expert], slice, i % panels_of(slice));
  };
  const auto first_from = [&](size_t node, int64_t offset) {
    const NodeSlice& slice = slices_[node];
    if (slice.expert_bytes == 0) return int64_t{0};
    return offset / slice.expert_bytes * panels_of(slice) + first_panel_from(slice, offset % slice.expert_bytes);
  };
  fill_cpu_slots(cpu_slots, first_from, pack);
  taken.keep();
}

std::array<ExpertStore::Stretch, 3> ExpertStore::stretches(const NodeSlice& slice) const {
  const int64_t gate = gate_up_layout_.panel_bytes, up = up_layout_.panel_bytes, pairs = slice.gate_up_pairs;
  const Stretch down{packed_bytes(gate_up_layout_) + slice.first_down * down_layout_.pair_bytes, 2 * slice.down_pairs,
                     down_layout_.panel_bytes};
  if (!shape_.mixed()) return {{{slice.first_gate_up * gate_up_layout_.pair_bytes, 2 * pairs, gate}, down, {}}};
  return {{{slice.first_gate_up * gate, pairs, gate},
           {gate_up_layout_.pairs * gate + slice.first_gate_up * up, pairs, up},
           down}};
}

int64_t ExpertStore::first_panel_from(const NodeSlice& slice, int64_t offset) const {
  int64_t panels = 0;
  for (const Stretch& stretch : stretches(slice)) {
    if (offset <= 0 || stretch.panels == 0) continue;
    panels += std::min(stretch.panels, (offset + stretch.panel_bytes - 1) / stretch.panel_bytes);
    offset -= stretch.bytes();
  }
  return panels;
}

void ExpertStore::pack_panel_of(uint8_t* memory, const ExpertSource& source, const NodeSlice& slice,
                                int64_t panel) const {
  const int64_t gate_up_panels = 2 * slice.gate_up_pairs, down_panel = panel - gate_up_panels;
  if (down_panel >= 0) {
    const int64_t row = (2 * slice.first_down + down_panel) * kPanelRows;
    memory += slice.gate_up_pairs * gate_up_layout_.pair_bytes + down_panel * down_layout_.panel_bytes;
    return pack_panel(down_layout_, staged(source.down, row), row, memory);
  }
  const int64_t pair = shape_.mixed() ? panel % slice.gate_up_pairs : panel / 2;
  const bool is_up = shape_.mixed() ? panel >= slice.gate_up_pairs : panel % 2;
  const int64_t row = (slice.first_gate_up + pair) * kPanelRows;
  if (!shape_.mixed())
    memory += panel * gate_up_layout_.panel_bytes;
  else if (is_up)
    memory += slice.gate_up_pairs * gate_up_layout_.panel_bytes + pair * up_layout_.panel_bytes;
  else
    memory += pair * gate_up_layout_.panel_bytes;
  pack_panel(is_up ? up_layout_ : gate_up_layout_, staged(is_up ? source.up : source.gate, row), row, memory);
}

void ExpertStore::adopt(std::shared_ptr<const MappedFile> file, int64_t offset) {
  check_packed();
  check_activations();
  const auto lock = workspace_->lock();
  panels_ = file->at(offset, packed().bytes);
  file_ = std::move(file);
  memory_ = HugeBuffer();
  cpu_slots_.take_all();
}

// copy(whole, here, bytes), on all workers, for each part of the expert's pieces: where it is in the whole expert, and
// where in this layer's memory.
template <class Copy>
void ExpertStore::copy_pieces(int expert, Copy copy) const {
  struct Piece {
    int64_t whole, here, bytes;
  };
  std::vector<Piece> parts;
  const auto add = [&](int64_t whole, int64_t here, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kCopyBytes)
      parts.push_back({whole + at, here + at, std::min(kCopyBytes, bytes - at)});
  };
  for (const NodeSlice& slice : slices_) {
    int64_t here = slice.offset + cpu_slots_.of(expert) * slice.expert_bytes;
    for (const Stretch& stretch : stretches(slice)) {
      add(stretch.whole, here, stretch.bytes());
      here += stretch.bytes();
    }
  }
  workspace_->pool().run_phases({{int64_t(parts.size()), [&](int64_t i, const Worker&) {
                                    const Piece& part = parts[size_t(i)];
                                    copy(part.whole, part.here, size_t(part.bytes));
                                  }}});
}

void ExpertStore::copy_packed(int expert, uint8_t* to) const {
  const auto lock = workspace_->lock();
  check_packed();
  copy_pieces(expert,
              [&](int64_t whole, int64_t here, size_t bytes) { std::memcpy(to + whole, panels_ + here, bytes); });
}

void ExpertStore::load_packed(int expert, const uint8_t* from) {
  const auto lock = workspace_->lock();
  own_memory();
  cpu_slots_.check_room({expert});
  cpu_slots_.take(expert);
  copy_pieces(expert, [&](int64_t whole, int64_t here, size_t bytes) {
    std::memcpy(memory_.data() + here, from + whole, bytes);
  });
}

void ExpertStore::forget(int expert) {
  const auto lock = workspace_->lock();
  if (file_) throw std::invalid_argument("this layer's experts lie in a file; they cannot be taken out of it");
  cpu_slots_.give_back(expert);
}

int32_t ExpertStore::reserve(int expert) {
  const auto lock = workspace_->lock();
  own_memory();
  return cpu_slots_.reserve(expert);
}

void ExpertStore::assign(int expert, int32_t cpu_slot) {
  const auto lock = workspace_->lock();
  cpu_slots_.assign(expert, cpu_slot);
}

void ExpertStore::release(int32_t cpu_slot) {
  const auto lock = workspace_->lock();
  cpu_slots_.release(cpu_slot);
}

int32_t ExpertStore::cpu_slot_of(int expert) const {
  if (!is_loaded(expert)) throw std::invalid_argument("expert " + std::to_string(expert) + " is not loaded");
  return cpu_slots_.of(expert);
}

std::vector<ExpertStore::Piece> ExpertStore::pieces(int32_t cpu_slot) {
  const ByteRange memory = own();
  if (!memory.data || cpu_slot < 0 || cpu_slot >= cpu_slots_.count())
    throw std::invalid_argument("slot " + std::to_string(cpu_slot) + " is not in this layer's own memory");
  std::vector<Piece> pieces;
  for (const NodeSlice& slice : slices_) {
    uint8_t* here = memory_.data() + slice.offset + cpu_slot * slice.expert_bytes;
    for (const Stretch& stretch : stretches(slice)) {
      pieces.push_back({stretch.whole, here, stretch.bytes()});
      here += stretch.bytes();
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.offset < b.offset; });
  return joined(pieces);
}

ByteRange ExpertStore::own() const {
  return memory_.data() ? ByteRange{memory_.data(), memory_bytes()} : ByteRange{nullptr, 0};
}

void ExpertStore::set_biases(const ExpertBiases& biases) {
  const auto lock = workspace_->lock();
  const auto padded = [&](const WeightView& layout, bool any) {
    return std::vector<float>(any ? size_t(layout.pairs) * kPairColumns * size_t(shape_.experts) : 0);
  };
  gate_up_bias_ = padded(gate_up_layout_, biases.gate || biases.up);
  down_bias_ = padded(down_layout_, biases.down);
  const int64_t rows = shape_.gate_rows(), hidden = shape_.hidden;
  for (int64_t e = 0; e < shape_.experts; ++e) {
    const auto interleave = [&](const float* from, int64_t panel) {
      float* const to = gate_up_bias_.data() + e * gate_up_layout_.pairs * kPairColumns + panel * kPanelRows;
      for (int64_t i = 0; i < rows; ++i) to[i / kPanelRows * kPairColumns + i % kPanelRows] = from[e * rows + i];
    };
    if (biases.gate) interleave(biases.gate, 0);
    if (biases.up) interleave(biases.up, 1);
    if (biases.down)
      std::copy_n(biases.down + e * hidden, hidden, down_bias_.data() + e * down_layout_.pairs * kPairColumns);
  }
}

int64_t ExpertStore::tokens_per_chunk(int64_t top_k) const {
  // Digits are only of experts with few rows.
  const int64_t codes = shape_.int8_activations ? IntegerRows(workspace_->table(), down_layout_, true).row_bytes() : 0;
  const int64_t row_bytes = prepared_stride(workspace_->table(), down_layout_) + codes;
  return std::clamp<int64_t>(kIntermediateBytes / (row_bytes * std::max<int64_t>(top_k, 1)), 1, kMaxChunkTokens);
}

void ExpertStore::forward(const ExpertCall& call) {
  const auto lock = workspace_->lock();
  // Equal chunks: a short last one would read all the weights again for a few rows.
  const int64_t tokens = call.x.rows,
                chunks = (tokens + tokens_per_chunk(call.top_k) - 1) / tokens_per_chunk(call.top_k);
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t first = tokens * c / chunks;
    run_chunk(call, first, tokens * (c + 1) / chunks - first);
  }
}

// Nobody is routed here: a few zeros need no region of the pool.
void ExpertStore::leave_out(const ExpertCall& call) const {
  if (!call.add) std::memset(call.out, 0, size_t(call.x.rows * shape_.hidden * bytes_of(call.out_type)));
}

void ExpertStore::check_loaded() const {
  for (const RoutingPlan::Expert& expert : plan_.experts)
    if (!is_loaded(expert.id))
      throw std::invalid_argument("expert " + std::to_string(expert.id) + " was routed to before it was loaded");
}

void ExpertStore::run_chunk(const ExpertCall& call, int64_t first, int64_t tokens) {
  ExpertCall part = call;
  part.x.rows = tokens;
  part.x.data = static_cast<const uint8_t*>(call.x.data) + first * call.x.length * bytes_of(call.x.type);
  part.out = static_cast<uint8_t*>(call.out) + first * shape_.hidden * bytes_of(call.out_type);
  part.ids = call.ids + first * call.top_k;
  part.weights = call.weights + first * call.top_k;
  plan_.build(part.ids, part.weights, tokens, call.top_k, shape_.experts);
  check_loaded();
  if (plan_.experts.empty()) return leave_out(part);
  workspace_->pool().announce(upcoming_);
  ExpertForward(*this, part).run();
}

}  // namespace tandem
