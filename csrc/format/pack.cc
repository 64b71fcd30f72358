#include "format/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "format/codes.h"

namespace tandem {

const char* const kFormatNames[kFormatCount] = {"f32", "bf16", "int8", "int4", "fp8", "fp4"};

namespace {

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

bool has_group_size(int group) { return group == 16 || group == 32 || group == 64 || group == 128 || group == 256; }

void check_group(const WeightFormat& f) {
  if (!is_quantised(f.format)) return;
  const std::string name = kFormatNames[int(f.format)];
  if (is_nibble(f.format) && f.group == 0)
    throw std::invalid_argument(name + " needs a group size: 16, 32, 64, 128 or 256");
  if (f.group != 0 && !has_group_size(f.group))
    throw std::invalid_argument("group size " + std::to_string(f.group) + " is not supported for " + name +
                                ": take 16, 32, 64, 128 or 256" +
                                (is_nibble(f.format) ? "" : ", or 0 for one scale per row"));
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

void put_scale(const WeightView& w, uint8_t* panel, int64_t index, float scale) {
  uint8_t* scales = panel + w.scale_offset;
  if (w.scale_type == DType::f32)
    std::memcpy(scales + 4 * index, &scale, 4);
  else
    *reinterpret_cast<uint16_t*>(scales + 2 * index) = bf16_of_float(scale);
}

float get_scale(const WeightView& w, const uint8_t* panel, int64_t index) {
  const uint8_t* scales = panel + w.scale_offset;
  if (w.scale_type == DType::f32) return *reinterpret_cast<const float*>(scales + 4 * index);
  return float_of_bf16(*reinterpret_cast<const uint16_t*>(scales + 2 * index));
}

void quantise_rows(const WeightView& w, const std::vector<float>& rows, uint8_t* panel) {
  const int64_t group = w.group ? w.group : w.padded_depth;
  const float low = w.format == Format::int8 ? -127.0f : -8.0f, high = w.format == Format::int8 ? 127.0f : 7.0f;
  for (int64_t g = 0; g < groups_of(w); ++g)
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const float* in = rows.data() + r * w.padded_depth + g * group;
      const float top = extreme(in, group);
      const int64_t index = g * kPanelRows + r;
      put_scale(w, panel, index, w.format == Format::int8 ? std::fabs(top) / 127.0f : top / -8.0f);
      const float scale = get_scale(w, panel, index), inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
      for (int64_t k = 0; k < group; ++k) {
        const float code = std::fmin(high, std::fmax(low, std::nearbyint(in[k] * inverse)));
        put_code(w.format, panel, r, g * group + k, int(code));
      }
    }
}

float stored_scale(const StoredCodes& s, int64_t index) {
  if (s.scale_type == DType::f32) return static_cast<const float*>(s.scales)[index];
  return float_of_bf16(static_cast<const uint16_t*>(s.scales)[index]);
}

// One row's codes; NaN scales where a group of fp8 holds one.
void store_codes(const WeightView& w, const MatrixSource& source, int64_t row, int64_t r, uint8_t* panel) {
  const bool nibble = is_nibble(w.format);
  const uint8_t* codes = source.stored.codes + row * (nibble ? (source.depth + 1) / 2 : source.depth);
  for (int64_t k = 0; k < source.depth; ++k) {
    const int code = nibble ? codes[k / 2] >> 4 * (k % 2) : codes[k];
    put_code(w.format, panel, r, k, code);
    if (w.format == Format::fp8 && (code & 0x7f) == 0x7f)
      put_scale(w, panel, (w.group ? k / w.group : 0) * kPanelRows + r, NAN);
  }
}

void copy_codes(const WeightView& w, const MatrixSource& source, int64_t first_row, uint8_t* panel) {
  const int64_t groups = groups_along(source.depth, w.group);
  for (int64_t r = 0; r < kPanelRows && first_row + r < source.rows; ++r) {
    const int64_t row = first_row + r, first = row / source.stored.block_rows * groups;
    for (int64_t g = 0; g < groups; ++g)
      put_scale(w, panel, g * kPanelRows + r, stored_scale(source.stored, first + g));
    store_codes(w, source, row, r, panel);
  }
}

void store_rows(const WeightView& w, const std::vector<float>& rows, uint8_t* panel) {
  for (int64_t r = 0; r < kPanelRows; ++r)
    for (int64_t k = 0; k < w.padded_depth; ++k) {
      const float value = rows[r * w.padded_depth + k];
      if (w.format == Format::f32)
        reinterpret_cast<float*>(panel)[k * kPanelRows + r] = value;
      else
        reinterpret_cast<uint16_t*>(panel)[pair_order(r, k)] = bf16_of_float(value);
    }
}

float weight_at(const WeightView& w, const uint8_t* panel, int64_t row, int64_t k) {
  if (w.format == Format::f32) return reinterpret_cast<const float*>(panel)[k * kPanelRows + row];
  if (w.format == Format::bf16) return float_of_bf16(reinterpret_cast<const uint16_t*>(panel)[pair_order(row, k)]);
  const int64_t group = w.group ? k / w.group : 0;
  return value_of(w.format, get_code(w.format, panel, row, k)) * get_scale(w, panel, group * kPanelRows + row);
}

}  // namespace

int64_t groups_along(int64_t depth, int group) { return group ? (depth + group - 1) / group : 1; }

WeightView packed_layout(const WeightFormat& f, int64_t columns, int64_t depth) {
  check_group(f);
  if (columns < 1 || depth < 1 || columns > INT32_MAX / 2 || depth > INT32_MAX / 2)
    throw std::invalid_argument("a weight matrix of " + std::to_string(columns) + " x " + std::to_string(depth) +
                                " cannot be packed");
  WeightView w{};
  const bool scaled = is_quantised(f.format);
  w.format = f.format;
  w.group = scaled ? f.group : 0;
  w.scale_type = scaled ? f.scale_type : DType::f32;
  w.columns = int32_t(columns);
  w.depth = int32_t(depth);
  w.padded_depth = int32_t(round_up(depth, std::max(32, w.group)));
  w.pairs = int32_t(round_up(columns, kPairColumns) / kPairColumns);
  const int64_t payload = int64_t{kPanelRows} * w.padded_depth * bits_of(f.format) / 8;
  const int64_t scales = groups_of(w) * kPanelRows * (w.scale_type == DType::bf16 ? 2 : 4);
  w.scale_offset = scaled ? payload : 0;
  w.panel_bytes = round_up(payload + (scaled ? scales : 0), kCacheLine);
  return w;
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
  if (source.stored.scale_type != layout.scale_type)
    throw std::invalid_argument("the scales are not of the type that was chosen for these weights, which is " +
                                std::string(layout.scale_type == DType::f32 ? "float32" : "bfloat16"));
}

void pack_panel(const WeightView& layout, const MatrixSource& source, int64_t first_row, uint8_t* panel) {
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
