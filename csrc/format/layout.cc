// What packed weights look like: names, what can be packed, sizes.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "abi/kernel_table.h"
#include "format/codes.h"
#include "format/pack.h"
#include "format/scale_table.h"

namespace tandem {

const char* const kFormatNames[kFormatCount] = {"f32",     "bf16",   "int8",      "int4",    "fp8",   "fp4",
                                                "uint4",   "int6",   "bf16_rows", "uint2",   "int3",  "nl4",
                                                "iq2_xxs", "iq2_xs", "iq2_s",     "iq3_xxs", "iq3_s", "iq1"};
const char* const kScaleTypeNames[kScaleTypeCount] = {"f32",  "bf16", "f16",       "bytes8", "bytes16",
                                                      "e8m0", "e4m3", "nibbles16", "odd8",   "odd16"};

namespace {

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

bool has_group_size(int group) { return group == 16 || group == 32 || group == 64 || group == 128 || group == 256; }

// Whether a group can be made NaN through its scale, as pack_panel does for fp8.
bool can_be_nan(ScaleType type) { return type == ScaleType::f32 || type == ScaleType::bf16 || type == ScaleType::e8m0; }

bool is_odd(ScaleType type) { return type == ScaleType::odd8 || type == ScaleType::odd16; }

void check_scales(const WeightFormat& f, const std::string& name) {
  const int shared = groups_per_half(f.scale_type);
  if (shared && shared * f.group != 256)
    throw std::invalid_argument("a half and bytes are scales of groups of " + std::to_string(256 / shared) + ", not " +
                                std::to_string(f.group));
  if (f.scale_type == ScaleType::nibbles16 && f.shift_type != ShiftType::as_scales)
    throw std::invalid_argument("nibbles are scales and offsets: " + name + " has no offsets");
  if (is_odd(f.scale_type) != is_grid(f.format))
    throw std::invalid_argument("codebooks have scales of odd numbers, and nothing else has: " + name + " with " +
                                kScaleTypeNames[int(f.scale_type)]);
  if (f.format == Format::fp8 && !can_be_nan(f.scale_type))
    throw std::invalid_argument("fp8 needs float32, bfloat16 or e8m0 scales");
  if (f.scale_type == ScaleType::e4m3 && f.shift_type == ShiftType::as_scales)
    throw std::invalid_argument("e4m3 scales go without offsets");
  if (f.scale_type == ScaleType::e4m3 && f.group == 0)
    throw std::invalid_argument("e4m3 scales are those of groups: " + name +
                                " by row needs float32, bfloat16 or float16 ones");
  if (f.shift_type != ShiftType::none && f.group == 0)
    throw std::invalid_argument(name + " with offsets needs a group size");
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

// Rows are read as they are, so there is nobody to pad them.
void check_rows(const WeightFormat& f, int64_t columns, int64_t depth) {
  if (is_grid(f.format) && depth % 32)
    throw std::invalid_argument("rows of codebooks have multiples of 32 weights, not " + std::to_string(depth));
  if (f.format == Format::bf16_rows && (columns % kPairColumns || depth % 32))
    throw std::invalid_argument("a matrix of " + std::to_string(columns) + " x " + std::to_string(depth) +
                                " cannot be read as it is: it needs multiples of 32");
}

}  // namespace

int groups_per_half(ScaleType type) {
  if (type == ScaleType::bytes8 || type == ScaleType::odd8) return 8;
  return type == ScaleType::bytes16 || type == ScaleType::nibbles16 || type == ScaleType::odd16 ? 16 : 0;
}

int64_t groups_along(int64_t depth, int group) { return group ? (depth + group - 1) / group : 1; }

WeightView packed_layout(const WeightFormat& f, int64_t columns, int64_t depth) {
  check_group(f);
  if (columns < 1 || depth < 1 || columns > INT32_MAX / 2 || depth > INT32_MAX / 2)
    throw std::invalid_argument("a weight matrix of " + std::to_string(columns) + " x " + std::to_string(depth) +
                                " cannot be packed");
  check_rows(f, columns, depth);
  if (f.shift_type != ShiftType::none && depth > kMaxShiftedGroups * f.group)
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
  const int64_t payload = payload_bytes(f.format, w.padded_depth);
  w.shift_type = scaled ? f.shift_type : ShiftType::none;
  const int64_t scales = scaled ? table_bytes(w) : 0;
  w.scale_offset = scaled ? payload : 0;
  w.shift_offset = w.shift_type != ShiftType::none ? payload + shift_at(w, scales) : 0;
  w.panel_bytes = round_up(payload + scales + shift_table_bytes(w), kCacheLine);
  w.pair_bytes = 2 * w.panel_bytes;
  w.second = w.panel_bytes;
  return w;
}

WeightFormat format_of(const WeightView& w) { return {w.format, w.group, w.scale_type, w.shift_type}; }

bool operator==(const WeightFormat& a, const WeightFormat& b) {
  return a.format == b.format && a.group == b.group && a.scale_type == b.scale_type && a.shift_type == b.shift_type;
}

std::string described(const WeightFormat& f) {
  std::string text = kFormatNames[int(f.format)];
  if (!is_quantised(f.format)) return text;
  text += f.group ? " in groups of " + std::to_string(f.group) : std::string(" by row");
  const char* const shifts[] = {" scales", " scales and offsets", " scales and zero points"};
  return text + " with " + kScaleTypeNames[int(f.scale_type)] + shifts[int(f.shift_type)];
}

int64_t packed_bytes(const WeightView& layout) { return layout.pairs * layout.pair_bytes; }

}  // namespace tandem
