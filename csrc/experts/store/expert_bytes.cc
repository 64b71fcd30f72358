// Experts as blocks of bytes: packed to, copied to and taken from memory outside of their layer, many at a time.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "experts/store/expert_store.h"
#include "runtime/bulk_copy.h"
#include "runtime/fill.h"

namespace tandem {
namespace {

bool same_slices(const std::vector<NodeSlice>& a, const std::vector<NodeSlice>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const NodeSlice& x, const NodeSlice& y) {
    return x.first_gate_up == y.first_gate_up && x.gate_up_pairs == y.gate_up_pairs && x.first_down == y.first_down &&
           x.down_pairs == y.down_pairs && x.expert_bytes == y.expert_bytes;
  });
}

}  // namespace

void ExpertStore::pack_to(const std::vector<ExpertSource>& sources, uint8_t* to) const {
  check_packed();
  for (const ExpertSource& source : sources) check_formats(source);
  const auto lock = workspace_->lock();
  const NodeSlice whole{0, gate_up_layout_.pairs, 0, down_layout_.pairs, 0, expert_bytes_};
  const int64_t panels = 2 * int64_t{gate_up_layout_.pairs} + 2 * int64_t{down_layout_.pairs};
  workspace_->pool().for_each(int64_t(sources.size()) * panels, [&](int64_t i, const Worker&) {
    pack_panel_of(to + i / panels * expert_bytes_, sources[size_t(i / panels)], whole, i % panels);
  });
}

void ExpertStore::copy_all(const std::vector<int>& experts, uint8_t* to) const {
  check_packed();
  struct Piece {
    const uint8_t* from;
    uint8_t* to;
    int64_t bytes;
  };
  std::vector<Piece> pieces;
  const auto add = [&](const uint8_t* from, uint8_t* target, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kCopyBytes)
      pieces.push_back({from + at, target + at, std::min(kCopyBytes, bytes - at)});
  };
  for (size_t i = 0; i < experts.size(); ++i) {
    uint8_t* const expert = to + int64_t(i) * expert_bytes_;
    for (const NodeSlice& slice : slices_) {
      const uint8_t* here = panels_ + slice.offset + cpu_slots_.of(experts[i]) * slice.expert_bytes;
      for (const Stretch& stretch : stretches(slice)) {
        add(here, expert + stretch.whole, stretch.bytes());
        here += stretch.bytes();
      }
    }
  }
  const auto lock = workspace_->lock();
  workspace_->pool().for_each(int64_t(pieces.size()), [&](int64_t i, const Worker&) {
    const Piece& piece = pieces[size_t(i)];
    copy_out(piece.from, piece.bytes, piece.to);
  });
}

void ExpertStore::load_from(const ExpertStore& other, const std::vector<int>& experts) {
  if (&other == this || !same_slices(slices_, other.slices_) || !(shape_.gate == other.shape_.gate) ||
      !(shape_.up == other.shape_.up) || !(shape_.down == other.shape_.down))
    throw std::invalid_argument("experts are taken from another layer, packed alike");
  other.check_packed();
  cpu_slots_.check_room(experts);
  const auto lock = workspace_->lock();
  own_memory();
  NewCpuSlots taken(cpu_slots_);
  const std::vector<int32_t> cpu_slots = take_cpu_slots(taken, experts);
  const auto pieces_of = [](const NodeSlice& slice) { return (slice.expert_bytes + kCopyBytes - 1) / kCopyBytes; };
  const auto copy = [&](size_t node, int64_t i) {
    const NodeSlice& slice = slices_[node];
    const size_t expert = size_t(i / pieces_of(slice));
    const int64_t at = i % pieces_of(slice) * kCopyBytes;
    const uint8_t* from =
        other.panels_ + other.slices_[node].offset + other.cpu_slots_.of(experts[expert]) * slice.expert_bytes;
    uint8_t* to = memory_.data() + slice.offset + cpu_slots[expert] * slice.expert_bytes;
    copy_out(from + at, std::min(kCopyBytes, slice.expert_bytes - at), to + at);
  };
  const auto first_from = [&](size_t node, int64_t offset) {
    const NodeSlice& slice = slices_[node];
    if (slice.expert_bytes == 0) return int64_t{0};
    return offset / slice.expert_bytes * pieces_of(slice) + (offset % slice.expert_bytes + kCopyBytes - 1) / kCopyBytes;
  };
  fill_cpu_slots(cpu_slots, first_from, copy);
  taken.keep();
}

}  // namespace tandem
