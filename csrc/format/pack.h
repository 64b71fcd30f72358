// From a matrix as a checkpoint has it to the packed panels of abi/weight_view.h, and back. Compiled at baseline.
#pragma once

#include <cstdint>
#include <string>

#include "abi/weight_view.h"

namespace tandem {

// What the formats are called, in errors and in Python.
extern const char* const kFormatNames[kFormatCount];
extern const char* const kScaleTypeNames[kScaleTypeCount];

// A weight format is data: what a code is, how many k share a scale, how a scale is stored, and what is added to each
// group after scaling. Only the first means anything for f32 and bf16. group: 16, 32, 64, 128 or 256; 0: one scale per
// output row, which 4-bit codes cannot have.
struct WeightFormat {
  Format format;
  int group;
  ScaleType scale_type;
  ShiftType shift_type = ShiftType::none;
};

WeightFormat format_of(const WeightView& layout);
bool operator==(const WeightFormat& a, const WeightFormat& b);
std::string described(const WeightFormat& format);  // for errors

// Scales, or shifts, of a whole matrix: [ceil(rows / block_rows), groups along the depth, or 1] of a ScaleType, and for
// shared ones [.., ceil(depth / 256)] halves; for e4m3 [ceil(rows / block_rows)] factors.
struct StoredScales {
  const void* values;
  const uint16_t* halves;
  const float* factors;
};

// Weights as codes and scales, row-major and contiguous, which somebody else owns.
struct StoredCodes {
  const uint8_t* codes;         // [rows, depth], or for 4 bits [rows, ceil(depth / 2)]: even k in the low half
  StoredScales scales, shifts;  // shifts may be zeros: bytes
  WeightFormat format;
  int64_t block_rows;  // output rows that share a scale
};

// A matrix [rows, depth], row-major and contiguous, that somebody else owns: numbers, or (`data` null) codes.
struct MatrixSource {
  const void* data;
  DType type;
  int64_t rows;
  int64_t depth;
  StoredCodes stored = {};
};

// A view without memory: sizes of the packed form of [columns, depth]. Throws std::invalid_argument.
WeightView packed_layout(const WeightFormat& format, int64_t columns, int64_t depth);
int64_t packed_bytes(const WeightView& layout);
int64_t groups_along(int64_t depth, int group);  // scales of a row
// Groups that share a half: 8 or 16, or 0 where a scale stands for itself.
int groups_per_half(ScaleType type);

// Throws std::invalid_argument if `source` cannot be packed as `layout` wants it.
void check_source(const WeightView& layout, const MatrixSource& source);

// Writes one panel (`layout.panel_bytes`): the 16 rows of `source` from `first_row`, zeros past its end.
//
// Codes and scales are taken as they are. A scale whose group holds an fp8 NaN becomes NaN, and with it every product
// of that row, as it would anyway: so the kernels need not look for NaN codes.
//
// Numbers can become f32, bf16, int8 or int4. Groups get the scale of the least squared error that a search finds
// (micro/fit.h); `kt convert` writes the same. int8 by row has the scale of the largest weight. Codes are made with the
// scale as it is stored, so its rounding costs no accuracy.
void pack_panel(const WeightView& layout, const MatrixSource& source, int64_t first_row, uint8_t* panel);

// The 16 x depth weights that a panel stands for, row-major in `rows`.
void unpack_panel_rows(const WeightView& layout, const uint8_t* panel, float* rows);

}  // namespace tandem
