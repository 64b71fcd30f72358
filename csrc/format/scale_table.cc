#include "format/scale_table.h"

#include <cstring>

#include "isa/inline.h"

namespace tandem {
namespace {

int64_t scale_bytes(ScaleType type) { return type == ScaleType::f32 ? 4 : 2; }

// Where a group's scale of row r lies in a table; for shared ones, its byte.
int64_t scale_at(const WeightView& w, int64_t group, int64_t r) {
  const int shared = groups_per_half(w.scale_type);
  if (!shared) return (group * kPanelRows + r) * scale_bytes(w.scale_type);
  return group / shared * kPanelRows * (2 + shared) + kPanelRows * (2 + group % shared) + r;
}

int64_t half_at(const WeightView& w, int64_t group, int64_t r) {
  const int shared = groups_per_half(w.scale_type);
  return group / shared * kPanelRows * (2 + shared) + 2 * r;
}

float value_in(const WeightView& w, const uint8_t* table, int64_t group, int64_t r) {
  const uint8_t* from = table + scale_at(w, group, r);
  const auto half = [](const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); };
  if (w.scale_type == ScaleType::f32) return *reinterpret_cast<const float*>(from);
  if (w.scale_type == ScaleType::bf16) return float_of_bf16(half(from));
  if (w.scale_type == ScaleType::f16) return float_of_f16(half(from));
  return float(int8_t(*from)) * float_of_f16(half(table + half_at(w, group, r)));
}

// One row's scales or shifts, as they are, from row `block` of what is stored.
void copy_scales(const WeightView& w, const StoredScales& stored, int64_t block, int64_t groups, int64_t r,
                 uint8_t* table) {
  const int shared = groups_per_half(w.scale_type);
  const int64_t bytes = shared ? 1 : scale_bytes(w.scale_type);
  const uint8_t* values = static_cast<const uint8_t*>(stored.values) + block * groups * bytes;
  for (int64_t g = 0; g < groups; ++g) std::memcpy(table + scale_at(w, g, r), values + g * bytes, size_t(bytes));
  if (!shared) return;
  const int64_t count = (groups + shared - 1) / shared;
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(table + half_at(w, i * shared, r), stored.halves + block * count + i, 2);
}

}  // namespace

int64_t table_bytes(const WeightView& w) {
  const int shared = groups_per_half(w.scale_type);
  if (!shared) return groups_of(w) * kPanelRows * scale_bytes(w.scale_type);
  return (groups_of(w) + shared - 1) / shared * kPanelRows * (2 + shared);
}

void put_scale(const WeightView& w, uint8_t* panel, int64_t group, int64_t r, float scale) {
  uint8_t* to = panel + w.scale_offset + scale_at(w, group, r);
  if (w.scale_type == ScaleType::f32)
    std::memcpy(to, &scale, 4);
  else
    *reinterpret_cast<uint16_t*>(to) = bf16_of_float(scale);
}

float get_scale(const WeightView& w, const uint8_t* panel, int64_t group, int64_t r) {
  return value_in(w, panel + w.scale_offset, group, r);
}

float get_shift(const WeightView& w, const uint8_t* panel, int64_t group, int64_t r) {
  return w.shift_offset ? value_in(w, panel + w.shift_offset, group, r) : 0.0f;
}

void copy_row_scales(const WeightView& w, const StoredCodes& stored, int64_t block, int64_t groups, int64_t r,
                     uint8_t* panel) {
  copy_scales(w, stored.scales, block, groups, r, panel + w.scale_offset);
  if (w.shift_offset) copy_scales(w, stored.shifts, block, groups, r, panel + w.shift_offset);
}

}  // namespace tandem
