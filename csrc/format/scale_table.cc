#include "format/scale_table.h"

#include <cmath>
#include <cstring>

#include "isa/inline.h"

namespace tandem {
namespace {

constexpr int64_t kFactorBytes = kPanelRows * int64_t(sizeof(float));  // before the groups, where scales are e4m3
constexpr int64_t kShiftHalvesAt = 2 * kPanelRows;                     // behind those of scales, in nibbles16

int64_t scale_bytes(ScaleType type) {
  if (type == ScaleType::f32) return 4;
  return type == ScaleType::bf16 || type == ScaleType::f16 ? 2 : 1;
}

int64_t head_bytes(ScaleType type) { return type == ScaleType::e4m3 ? kFactorBytes : 0; }

// Bytes of a row's halves that some groups share, and of such a table of 16 rows.
int64_t half_bytes(ScaleType type) { return type == ScaleType::nibbles16 ? 4 : 2; }
bool is_odd(ScaleType type) { return type == ScaleType::odd8 || type == ScaleType::odd16; }
int64_t shared_bytes(ScaleType type) {
  return kPanelRows * (half_bytes(type) + groups_per_half(type) / (is_odd(type) ? 2 : 1));
}

// Where a group's scale of row r lies in a table; for shared ones, its byte.
int64_t scale_at(const WeightView& w, int64_t group, int64_t r) {
  const int shared = groups_per_half(w.scale_type);
  if (!shared) return head_bytes(w.scale_type) + (group * kPanelRows + r) * scale_bytes(w.scale_type);
  const int64_t line = group % shared / (is_odd(w.scale_type) ? 2 : 1);
  return group / shared * shared_bytes(w.scale_type) + kPanelRows * (half_bytes(w.scale_type) + line) + r;
}

int64_t half_at(const WeightView& w, int64_t group, int64_t r) {
  return group / groups_per_half(w.scale_type) * shared_bytes(w.scale_type) + 2 * r;
}

float value_in(const WeightView& w, const uint8_t* table, int64_t group, int64_t r) {
  const uint8_t* from = table + scale_at(w, group, r);
  const auto half = [](const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); };
  if (w.scale_type == ScaleType::f32) return *reinterpret_cast<const float*>(from);
  if (w.scale_type == ScaleType::bf16) return float_of_bf16(half(from));
  if (w.scale_type == ScaleType::f16) return float_of_f16(half(from));
  if (w.scale_type == ScaleType::e8m0) return float_of_e8m0(*from);
  if (w.scale_type == ScaleType::e4m3) return float_of_e4m3(*from) * reinterpret_cast<const float*>(table)[r];
  const float shared = float_of_f16(half(table + half_at(w, group, r)));
  if (is_odd(w.scale_type)) return float(2 * (*from >> group % 2 * 4 & 15) + 1) * 0.125f * shared;
  return (w.scale_type == ScaleType::nibbles16 ? float(*from & 15) : float(int8_t(*from))) * shared;
}

// nibbles16's, in the table of the scales.
float nibble_shift_in(const WeightView& w, const uint8_t* table, int64_t group, int64_t r) {
  const uint8_t* half = table + kShiftHalvesAt + half_at(w, group, r);
  return float(table[scale_at(w, group, r)] >> 4) * float_of_f16(*reinterpret_cast<const uint16_t*>(half));
}

bool has_nan(const uint8_t* e4m3, int64_t count) {
  int found = 0;
  for (int64_t i = 0; i < count; ++i) found |= (e4m3[i] & 0x7f) == 0x7f;
  return found;
}

// The kernels do not look for NaN bytes, so the row's factor says that there is one.
void copy_factor(const StoredScales& stored, int64_t block, int64_t groups, int64_t r, uint8_t* table) {
  const uint8_t* values = static_cast<const uint8_t*>(stored.values) + block * groups;
  const float factor = has_nan(values, groups) ? NAN : stored.factors[block];
  std::memcpy(table + r * sizeof factor, &factor, sizeof factor);
}

void copy_halves(const WeightView& w, const StoredScales& stored, int64_t block, int64_t groups, int64_t r,
                 uint8_t* table) {
  const int shared = groups_per_half(w.scale_type);
  const int64_t count = (groups + shared - 1) / shared;
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(table + half_at(w, i * shared, r), stored.halves + block * count + i, 2);
}

// One row's scales or shifts, as they are, from row `block` of what is stored.
void copy_scales(const WeightView& w, const StoredScales& stored, int64_t block, int64_t groups, int64_t r,
                 uint8_t* table) {
  const int64_t bytes = scale_bytes(w.scale_type);
  const uint8_t* values = static_cast<const uint8_t*>(stored.values) + block * groups * bytes;
  if (is_odd(w.scale_type))
    for (int64_t g = 0; g < groups; ++g) table[scale_at(w, g, r)] |= uint8_t(values[g] << g % 2 * 4);
  else
    for (int64_t g = 0; g < groups; ++g) std::memcpy(table + scale_at(w, g, r), values + g * bytes, size_t(bytes));
  if (w.scale_type == ScaleType::e4m3) copy_factor(stored, block, groups, r, table);
  if (groups_per_half(w.scale_type)) copy_halves(w, stored, block, groups, r, table);
}

void copy_zeros(const StoredScales& stored, int64_t block, int64_t groups, int64_t r, uint8_t* table) {
  const uint8_t* zeros = static_cast<const uint8_t*>(stored.values) + block * groups;
  for (int64_t g = 0; g < groups; ++g) table[g * kPanelRows + r] = zeros[g];
}

}  // namespace

int64_t table_bytes(const WeightView& w) {
  const int shared = groups_per_half(w.scale_type);
  if (!shared) return head_bytes(w.scale_type) + groups_of(w) * kPanelRows * scale_bytes(w.scale_type);
  return (groups_of(w) + shared - 1) / shared * shared_bytes(w.scale_type);
}

int64_t shift_at(const WeightView& w, int64_t scales) {
  return w.scale_type == ScaleType::nibbles16 ? kShiftHalvesAt : scales;
}

int64_t shift_table_bytes(const WeightView& w) {
  if (w.shift_type == ShiftType::none || w.scale_type == ScaleType::nibbles16) return 0;
  return w.shift_type == ShiftType::as_scales ? table_bytes(w) : groups_of(w) * kPanelRows;
}

void put_scale(const WeightView& w, uint8_t* panel, int64_t group, int64_t r, float scale) {
  uint8_t* to = panel + w.scale_offset + scale_at(w, group, r);
  if (w.scale_type == ScaleType::f32)
    std::memcpy(to, &scale, 4);
  else if (w.scale_type == ScaleType::e8m0)
    *to = std::isnan(scale) ? 255 : uint8_t(bits_of_float(scale) >> 23);
  else
    *reinterpret_cast<uint16_t*>(to) = bf16_of_float(scale);
}

float get_scale(const WeightView& w, const uint8_t* panel, int64_t group, int64_t r) {
  return value_in(w, panel + w.scale_offset, group, r);
}

float get_shift(const WeightView& w, const uint8_t* panel, int64_t group, int64_t r) {
  const uint8_t* table = panel + w.shift_offset;
  if (w.shift_type == ShiftType::none) return 0.0f;
  if (w.scale_type == ScaleType::nibbles16) return nibble_shift_in(w, panel + w.scale_offset, group, r);
  if (w.shift_type == ShiftType::as_scales) return value_in(w, table, group, r);
  return -(float(int8_t(table[group * kPanelRows + r])) * get_scale(w, panel, group, r));
}

void copy_row_scales(const WeightView& w, const StoredCodes& stored, int64_t block, int64_t groups, int64_t r,
                     uint8_t* panel) {
  copy_scales(w, stored.scales, block, groups, r, panel + w.scale_offset);
  uint8_t* shifts = panel + w.shift_offset;
  if (w.scale_type == ScaleType::nibbles16) return copy_halves(w, stored.shifts, block, groups, r, shifts);
  if (w.shift_type == ShiftType::as_scales) copy_scales(w, stored.shifts, block, groups, r, shifts);
  if (w.shift_type == ShiftType::zeros) copy_zeros(stored.shifts, block, groups, r, shifts);
}

}  // namespace tandem
