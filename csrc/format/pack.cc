#include "format/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi/kernel_table.h"
#include "format/codes.h"
#include "format/interleave.h"

namespace tandem {

const char* const kFormatNames[kFormatCount] = {"f32", "bf16", "int8", "int4", "fp8", "fp4", "uint4"};
const char* const kScaleTypeNames[kScaleTypeCount] = {"f32", "bf16", "f16", "bytes8", "bytes16"};

namespace {

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

bool has_group_size(int group) { return group == 16 || group == 32 || group == 64 || group == 128 || group == 256; }

void check_scales(const WeightFormat& f, const std::string& name) {
  const int shared = groups_per_half(f.scale_type);
  if (shared && shared * f.group != 256)
    throw std::invalid_argument("a half and bytes are scales of groups of " + std::to_string(256 / shared) + ", not " +
                                std::to_string(f.group));
  if (f.format == Format::fp8 && f.scale_type != ScaleType::f32 && f.scale_type != ScaleType::bf16)
    throw std::invalid_argument("fp8 needs float32 or bfloat16 scales");
  if (f.shifted && f.group == 0) throw std::invalid_argument(name + " with offsets needs a group size");
}

void check_group(const WeightFormat& f) {
  if (!is_quantised(f.format)) return;
  const std::string name = kFormatNames[int(f.format)];
  if (is_nibble(f.format) && f.group == 0)
    throw std::invalid_argument(name + " needs a group size: 16, 32, 64, 128 or 256");
  if (f.group != 0 && !has_group_size(f.group))
    throw std::invalid_argument("group size " + std::to_string(f.group) + " is not supported for " + name +
                                ": take 16, 32, 64, 128 or 256" +
                                (is_nibble(f.format) ? "" : ", or 0 for one scale per row"));
  check_scales(f, name);
}

int64_t groups_of(const WeightView& w) { return w.group ? w.padded_depth / w.group : 1; }

// 16 rows of padded_depth floats.
std::vector<float> read_rows(const WeightView& w, const MatrixSource& source, int64_t first_row) {
  std::vector<float> rows(int64_t{kPanelRows} * w.padded_depth, 0.0f);
  for (int64_t r = 0; r < kPanelRows && first_row + r < source.rows; ++r) {
    float* out = rows.data() + r * w.padded_depth;
    const int64_t begin = (first_row + r) * source.depth;
    if (source.type == DType::f32) {
      std::memcpy(out, static_cast<const float*>(source.data) + begin, source.depth * sizeof(float));
    } else {
      const uint16_t* in = static_cast<const uint16_t*>(source.data) + begin;
      for (int64_t k = 0; k < source.depth; ++k) out[k] = float_of_bf16(in[k]);
    }
  }
  return rows;
}

float extreme(const float* w, int64_t n) {
  return *std::max_element(w, w + n, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
}

int64_t scale_bytes(ScaleType type) { return type == ScaleType::f32 ? 4 : 2; }

// Of a panel's scales, or shifts.
int64_t table_bytes(const WeightView& w) {
  const int shared = groups_per_half(w.scale_type);
  if (!shared) return groups_of(w) * kPanelRows * scale_bytes(w.scale_type);
  return (groups_of(w) + shared - 1) / shared * kPanelRows * (2 + shared);
}

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

void put_scale(const WeightView& w, uint8_t* panel, int64_t group, int64_t r, float scale) {
  uint8_t* to = panel + w.scale_offset + scale_at(w, group, r);
  if (w.scale_type == ScaleType::f32)
    std::memcpy(to, &scale, 4);
  else
    *reinterpret_cast<uint16_t*>(to) = bf16_of_float(scale);
}

float value_in(const WeightView& w, const uint8_t* table, int64_t group, int64_t r) {
  const uint8_t* from = table + scale_at(w, group, r);
  const auto half = [](const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); };
  if (w.scale_type == ScaleType::f32) return *reinterpret_cast<const float*>(from);
  if (w.scale_type == ScaleType::bf16) return float_of_bf16(half(from));
  if (w.scale_type == ScaleType::f16) return float_of_f16(half(from));
  return float(int8_t(*from)) * float_of_f16(half(table + half_at(w, group, r)));
}

float get_scale(const WeightView& w, const uint8_t* panel, int64_t group, int64_t r) {
  return value_in(w, panel + w.scale_offset, group, r);
}

// Codes of one row's group, one per byte. Adding and taking away 1.5 * 2^23 rounds to the nearest, ties to even, and
// unlike nearbyint() it is done four at a time.
void quantise_group(const float* in, int64_t count, float scale, float low, float high, uint8_t* codes) {
  constexpr float kRound = 12582912.0f;
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  for (int64_t k = 0; k < count; ++k) {
    float code = in[k] * inverse;
    code = code > low ? code : low;  // low for NaN
    code = code > high ? high : code;
    codes[k] = uint8_t(int((code + kRound) - kRound));
  }
}

// Whole rows of codes, one per byte, to a panel.
void place_codes(const WeightView& w, uint8_t* codes, uint8_t* panel) {
  if (!is_nibble(w.format)) return interleave16(codes, w.padded_depth, kPanelRows, w.padded_depth / 2, panel);
  const int64_t bytes = kPanelRows * int64_t{w.padded_depth} / 2;
  for (int64_t i = 0; i < bytes; ++i) codes[i] = uint8_t((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
  interleave_nibbles(codes, w.padded_depth / 2, kPanelRows, w.padded_depth / 8, panel);
}

void quantise_rows(const WeightView& w, const std::vector<float>& rows, uint8_t* panel) {
  const int64_t group = w.group ? w.group : w.padded_depth;
  const float low = w.format == Format::int8 ? -127.0f : -8.0f, high = w.format == Format::int8 ? 127.0f : 7.0f;
  std::vector<uint8_t> codes(rows.size());
  for (int64_t r = 0; r < kPanelRows; ++r)
    for (int64_t g = 0; g < groups_of(w); ++g) {
      const int64_t first = r * w.padded_depth + g * group;
      const float top = extreme(rows.data() + first, group);
      put_scale(w, panel, g, r, w.format == Format::int8 ? std::fabs(top) / 127.0f : top / -8.0f);
      quantise_group(rows.data() + first, group, get_scale(w, panel, g, r), low, high, codes.data() + first);
    }
  place_codes(w, codes.data(), panel);
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

bool has_nan(const uint8_t* fp8, int64_t count) {
  int found = 0;
  for (int64_t k = 0; k < count; ++k) found |= (fp8[k] & 0x7f) == 0x7f;
  return found;
}

// NaN scales where a group of this row's fp8 codes holds a NaN.
void mark_nan(const WeightView& w, const uint8_t* codes, int64_t depth, int64_t r, uint8_t* panel) {
  const int64_t group = w.group ? w.group : depth;
  for (int64_t first = 0; first < depth; first += group)
    if (has_nan(codes + first, std::min(group, depth - first))) put_scale(w, panel, first / group, r, NAN);
}

// The codes of up to 16 rows: whole units at once, what is left of a row one by one.
void store_codes(const WeightView& w, const MatrixSource& source, int64_t first_row, int64_t count, uint8_t* panel) {
  const bool nibble = is_nibble(w.format);
  const int64_t stride = nibble ? (source.depth + 1) / 2 : source.depth, unit = nibble ? 8 : 2;
  const uint8_t* codes = source.stored.codes + first_row * stride;
  (nibble ? interleave_nibbles : interleave16)(codes, stride, count, source.depth / unit, panel);
  for (int64_t r = 0; r < count; ++r, codes += stride) {
    for (int64_t k = source.depth / unit * unit; k < source.depth; ++k)
      put_code(w.format, panel, r, k, nibble ? codes[k / 2] >> 4 * (k % 2) : codes[k]);
    if (w.format == Format::fp8) mark_nan(w, codes, source.depth, r, panel);
  }
}

void copy_codes(const WeightView& w, const MatrixSource& source, int64_t first_row, uint8_t* panel) {
  const int64_t groups = groups_along(source.depth, w.group);
  for (int64_t r = 0; r < kPanelRows && first_row + r < source.rows; ++r) {
    const int64_t block = (first_row + r) / source.stored.block_rows;
    copy_scales(w, source.stored.scales, block, groups, r, panel + w.scale_offset);
    if (w.shift_offset) copy_scales(w, source.stored.shifts, block, groups, r, panel + w.shift_offset);
  }
  store_codes(w, source, first_row, std::min<int64_t>(kPanelRows, source.rows - first_row), panel);
}

// 16 rows of padded_depth floats.
void store_rows(const WeightView& w, const std::vector<float>& rows, uint8_t* panel) {
  const int64_t depth = w.padded_depth;
  if (w.format == Format::f32)
    return interleave32(reinterpret_cast<const uint8_t*>(rows.data()), 4 * depth, kPanelRows, depth, panel);
  std::vector<uint16_t> halves(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) halves[i] = bf16_of_float(rows[i]);
  interleave32(reinterpret_cast<const uint8_t*>(halves.data()), 2 * depth, kPanelRows, depth / 2, panel);
}

bool is_stored_as(const WeightView& w, const MatrixSource& source) {
  return (w.format == Format::f32 && source.type == DType::f32) ||
         (w.format == Format::bf16 && source.type == DType::bf16 && source.depth % 2 == 0);
}

// Numbers that only change places: straight from the source, which is most of what loading does.
void place_rows(const WeightView& w, const MatrixSource& source, int64_t first_row, uint8_t* panel) {
  const int64_t stride = source.depth * (w.format == Format::f32 ? 4 : 2), units = stride / 4;
  const uint8_t* rows = static_cast<const uint8_t*>(source.data) + first_row * stride;
  interleave32(rows, stride, std::clamp<int64_t>(source.rows - first_row, 0, kPanelRows), units, panel);
}

float weight_at(const WeightView& w, const uint8_t* panel, int64_t row, int64_t k) {
  if (w.format == Format::f32) return reinterpret_cast<const float*>(panel)[k * kPanelRows + row];
  if (w.format == Format::bf16) return float_of_bf16(reinterpret_cast<const uint16_t*>(panel)[pair_order(row, k)]);
  const int64_t group = w.group ? k / w.group : 0;
  const float shift = w.shift_offset ? value_in(w, panel + w.shift_offset, group, row) : 0.0f;
  return value_of(w.format, get_code(w.format, panel, row, k)) * get_scale(w, panel, group, row) + shift;
}

}  // namespace

int groups_per_half(ScaleType type) {
  if (type == ScaleType::bytes8) return 8;
  return type == ScaleType::bytes16 ? 16 : 0;
}

int64_t groups_along(int64_t depth, int group) { return group ? (depth + group - 1) / group : 1; }

WeightView packed_layout(const WeightFormat& f, int64_t columns, int64_t depth) {
  check_group(f);
  if (columns < 1 || depth < 1 || columns > INT32_MAX / 2 || depth > INT32_MAX / 2)
    throw std::invalid_argument("a weight matrix of " + std::to_string(columns) + " x " + std::to_string(depth) +
                                " cannot be packed");
  if (f.shifted && depth > kMaxShiftedGroups * f.group)
    throw std::invalid_argument("rows of " + std::to_string(depth) + " weights with offsets are too long");
  WeightView w{};
  const bool scaled = is_quantised(f.format);
  w.format = f.format;
  w.group = scaled ? f.group : 0;
  w.scale_type = scaled ? f.scale_type : ScaleType::f32;
  w.columns = int32_t(columns);
  w.depth = int32_t(depth);
  w.padded_depth = int32_t(round_up(depth, std::max(32, w.group)));
  w.pairs = int32_t(round_up(columns, kPairColumns) / kPairColumns);
  const int64_t payload = int64_t{kPanelRows} * w.padded_depth * bits_of(f.format) / 8;
  const int64_t scales = scaled ? table_bytes(w) : 0;
  w.scale_offset = scaled ? payload : 0;
  w.shift_offset = scaled && f.shifted ? payload + scales : 0;
  w.panel_bytes = round_up(payload + scales + (w.shift_offset ? scales : 0), kCacheLine);
  return w;
}

WeightFormat format_of(const WeightView& w) { return {w.format, w.group, w.scale_type, w.shift_offset != 0}; }

bool operator==(const WeightFormat& a, const WeightFormat& b) {
  return a.format == b.format && a.group == b.group && a.scale_type == b.scale_type && a.shifted == b.shifted;
}

std::string described(const WeightFormat& f) {
  std::string text = kFormatNames[int(f.format)];
  if (!is_quantised(f.format)) return text;
  text += f.group ? " in groups of " + std::to_string(f.group) : std::string(" by row");
  return text + " with " + kScaleTypeNames[int(f.scale_type)] + (f.shifted ? " scales and offsets" : " scales");
}

int64_t packed_bytes(const WeightView& layout) { return 2 * layout.pairs * layout.panel_bytes; }

void check_source(const WeightView& layout, const MatrixSource& source) {
  const std::string name = kFormatNames[int(layout.format)];
  const bool number_format = !is_quantised(layout.format);
  if (source.data) {
    if (number_format || layout.format == Format::int8 || layout.format == Format::int4) return;
    throw std::invalid_argument(name + " weights are packed from codes and scales, not from numbers");
  }
  if (number_format) throw std::invalid_argument(name + " weights have no codes: pass the numbers themselves");
  const WeightFormat wanted = format_of(layout);
  if (!(source.stored.format == wanted))
    throw std::invalid_argument("these weights are " + described(source.stored.format) + "; the matrix was made for " +
                                described(wanted));
}

void pack_panel(const WeightView& layout, const MatrixSource& source, int64_t first_row, uint8_t* panel) {
  if (source.data && is_stored_as(layout, source)) {
    const int64_t used = kPanelRows * source.depth * (layout.format == Format::f32 ? 4 : 2);
    std::memset(panel + used, 0, size_t(layout.panel_bytes - used));
    return place_rows(layout, source, first_row, panel);
  }
  std::memset(panel, 0, size_t(layout.panel_bytes));
  if (!source.data) return copy_codes(layout, source, first_row, panel);
  const std::vector<float> rows = read_rows(layout, source, first_row);
  if (is_quantised(layout.format))
    quantise_rows(layout, rows, panel);
  else
    store_rows(layout, rows, panel);
}

void unpack_panel_rows(const WeightView& layout, const uint8_t* panel, float* rows) {
  for (int64_t r = 0; r < kPanelRows; ++r)
    for (int64_t k = 0; k < layout.depth; ++k) rows[r * layout.depth + k] = weight_at(layout, panel, r, k);
}

}  // namespace tandem
