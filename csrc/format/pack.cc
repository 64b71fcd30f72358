#include "format/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "format/codes.h"
#include "format/interleave.h"
#include "format/quantise.h"
#include "format/scale_table.h"

namespace tandem {
namespace {

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

// How whole units of so many codes are placed.
struct Interleaving {
  void (*interleave)(const uint8_t* rows, int64_t stride, int64_t count, int64_t units, uint8_t* out);
  int64_t unit;
};

Interleaving interleaving_of(Format format) {
  if (format == Format::int6) return {interleave_sixes, 16};
  if (format == Format::int3) return {interleave_threes, 16};
  if (format == Format::uint2) return {interleave_twos, 16};
  return is_nibble(format) ? Interleaving{interleave_nibbles, 8} : Interleaving{interleave16, 2};
}

// The codes of up to 16 rows: whole units at once, what is left of a row one by one.
void store_codes(const WeightView& w, const MatrixSource& source, int64_t first_row, int64_t count, uint8_t* panel) {
  const bool nibble = is_nibble(w.format);
  const auto [interleave, unit] = interleaving_of(w.format);
  const int64_t stride = row_bytes_of(w.format, source.depth);
  const uint8_t* codes = source.stored.codes + first_row * stride;
  interleave(codes, stride, count, source.depth / unit, panel);
  for (int64_t r = 0; r < count; ++r, codes += stride) {
    for (int64_t k = source.depth / unit * unit; k < source.depth; ++k)
      put_code(w.format, panel, r, k, nibble ? codes[k / 2] >> 4 * (k % 2) : codes[k]);
    if (w.format == Format::fp8) mark_nan(w, codes, source.depth, r, panel);
  }
}

void store_grids(const WeightView& w, const MatrixSource& source, int64_t first_row, uint8_t* panel) {
  const int64_t stride = row_bytes_of(w.format, source.depth), bytes = grid_block_bytes(w.format);
  for (int64_t r = 0; r < kPanelRows && first_row + r < source.rows; ++r) {
    const uint8_t* from = source.stored.codes + (first_row + r) * stride;
    for (int64_t b = 0; b < source.depth / kGridBlock; ++b, from += sizeof(GridSource)) {
      GridSource eight;
      std::memcpy(&eight, from, sizeof eight);
      put_grid(w.format, panel + b * bytes, r, eight);
    }
  }
}

void copy_codes(const WeightView& w, const MatrixSource& source, int64_t first_row, uint8_t* panel) {
  const int64_t groups = groups_along(source.depth, w.group);
  for (int64_t r = 0; r < kPanelRows && first_row + r < source.rows; ++r) {
    const int64_t block = (first_row + r) / source.stored.block_rows;
    copy_row_scales(w, source.stored, block, groups, r, panel);
  }
  if (is_grid(w.format)) return store_grids(w, source, first_row, panel);
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
  if (is_grid(w.format)) return float(grid_code(w.format, panel, row, k)) * get_scale(w, panel, group, row);
  return value_of(w.format, get_code(w.format, panel, row, k)) * get_scale(w, panel, group, row) +
         get_shift(w, panel, group, row);
}

}  // namespace

void check_source(const WeightView& layout, const MatrixSource& source) {
  const std::string name = kFormatNames[int(layout.format)];
  const bool number_format = !is_quantised(layout.format);
  if (source.data) {
    if (layout.format == Format::bf16_rows && source.type != DType::bf16)
      throw std::invalid_argument("only bfloat16 can be read in whole rows, not float32");
    if (number_format) return;
    if (layout.format != Format::int8 && layout.format != Format::int4)
      throw std::invalid_argument(name + " weights are packed from codes and scales, not from numbers");
    const bool written = layout.scale_type == ScaleType::f32 || layout.scale_type == ScaleType::bf16;
    if (!written || layout.shift_type != ShiftType::none)
      throw std::invalid_argument("numbers are packed with f32 or bf16 scales and nothing added, not as " +
                                  described(format_of(layout)));
    return;
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
  if (is_quantised(layout.format)) return quantise_rows(layout, source, first_row, panel);
  store_rows(layout, read_rows(layout, source, first_row), panel);
}

void unpack_panel_rows(const WeightView& layout, const uint8_t* panel, float* rows) {
  for (int64_t r = 0; r < kPanelRows; ++r)
    for (int64_t k = 0; k < layout.depth; ++k) rows[r * layout.depth + k] = weight_at(layout, panel, r, k);
}

}  // namespace tandem
