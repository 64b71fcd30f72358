// Where an expert's panels lie on a node, and what is packed into each. Gate and up of one format are panels in turns;
// of two, each is a matrix of its own.
#include <algorithm>

#include "experts/store/expert_store.h"
#include "format/staged.h"

namespace tandem {

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

}  // namespace tandem
