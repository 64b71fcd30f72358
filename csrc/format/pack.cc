#include "format/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa/inline.h"

namespace tandem {
namespace {

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

bool quantised(Format f) { return f == Format::int8 || f == Format::int4; }

int64_t bits_of(Format f) {
  switch (f) {
    case Format::f32:
      return 32;
    case Format::bf16:
      return 16;
    case Format::int8:
      return 8;
    case Format::int4:
      return 4;
  }
  throw std::invalid_argument("unknown weight format");
}

void check_group(Format format, int group) {
  if (!quantised(format)) return;
  if (format == Format::int4 && group == 0) throw std::invalid_argument("int4 needs a group size: 32, 64, 128 or 256");
  if (group != 0 && group != 32 && group != 64 && group != 128 && group != 256)
    throw std::invalid_argument("group size " + std::to_string(group) + " is not supported: take 32, 64, 128 or 256" +
                                (format == Format::int8 ? ", or 0 for one scale per row" : ""));
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

// Index of weight (row, k) in the panel's payload, in units of one weight.
int64_t pair_order(int64_t row, int64_t k) { return (k / 2 * kPanelRows + row) * 2 + k % 2; }

void put_code(Format format, uint8_t* panel, int64_t row, int64_t k, int code) {
  if (format == Format::int8) {
    panel[pair_order(row, k)] = uint8_t(code);
    return;
  }
  uint16_t* lane = reinterpret_cast<uint16_t*>(panel + k / 8 * kCacheLine) + row * 2 + k % 2;
  *lane = uint16_t(*lane | (code & 15) << (k % 8 / 2 * 4));
}

int get_code(Format format, const uint8_t* panel, int64_t row, int64_t k) {
  if (format == Format::int8) return int8_t(panel[pair_order(row, k)]);
  const uint16_t lane = reinterpret_cast<const uint16_t*>(panel + k / 8 * kCacheLine)[row * 2 + k % 2];
  return int16_t(uint16_t(lane << (12 - k % 8 / 2 * 4))) >> 12;
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
  return float(get_code(w.format, panel, row, k)) * get_scale(w, panel, group * kPanelRows + row);
}

}  // namespace

WeightView packed_layout(Format format, int64_t columns, int64_t depth, int group) {
  check_group(format, group);
  if (columns < 1 || depth < 1 || columns > INT32_MAX / 2 || depth > INT32_MAX / 2)
    throw std::invalid_argument("a weight matrix of " + std::to_string(columns) + " x " + std::to_string(depth) +
                                " cannot be packed");
  WeightView w{};
  w.format = format;
  w.group = quantised(format) ? group : 0;
  w.scale_type = w.group ? DType::bf16 : DType::f32;
  w.columns = int32_t(columns);
  w.depth = int32_t(depth);
  w.padded_depth = int32_t(round_up(depth, std::max(32, w.group)));
  w.pairs = int32_t(round_up(columns, kPairColumns) / kPairColumns);
  const int64_t payload = int64_t{kPanelRows} * w.padded_depth * bits_of(format) / 8;
  const int64_t scales = groups_of(w) * kPanelRows * (w.scale_type == DType::bf16 ? 2 : 4);
  w.scale_offset = quantised(format) ? payload : 0;
  w.panel_bytes = round_up(payload + (quantised(format) ? scales : 0), kCacheLine);
  return w;
}

int64_t packed_bytes(const WeightView& layout) { return 2 * layout.pairs * layout.panel_bytes; }

void pack_panel(const WeightView& layout, const MatrixSource& source, int64_t first_row, uint8_t* panel) {
  const std::vector<float> rows = read_rows(layout, source, first_row);
  std::memset(panel, 0, size_t(layout.panel_bytes));
  if (quantised(layout.format))
    quantise_rows(layout, rows, panel);
  else
    store_rows(layout, rows, panel);
}

void unpack_panel_rows(const WeightView& layout, const uint8_t* panel, float* rows) {
  for (int64_t r = 0; r < kPanelRows; ++r)
    for (int64_t k = 0; k < layout.depth; ++k) rows[r * layout.depth + k] = weight_at(layout, panel, r, k);
}

}  // namespace tandem
