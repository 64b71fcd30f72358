// The function pointers of one tier (instruction set). Each of a tier's translation units exports exactly one of these,
// with what it has and zeros elsewhere; runtime/tiers.cc puts them together.
#pragma once

#include <stdint.h>

#include "abi/weight_view.h"

namespace tandem {

enum class Tier : int32_t {
  scalar = 0,
  avx2 = 1,
  avx512 = 2,
  avx512_bf16 = 3,
  amx = 4,
  amx_standin = 5,  // the AMX blocking on portable code: for tests where no AMX exists
};

enum class ActivationKind : int32_t {
  silu = 0,          // silu(gate) * up
  gelu = 1,          // gelu(gate) * up, with erf
  gelu_tanh = 2,     // the tanh approximation
  swiglu_clamp = 3,  // gate <= limit, -limit <= up <= limit, then silu(gate) * up
  swiglu_oai = 4,    // clamped as above, then gate * sigmoid(alpha * gate) * (up + 1)   (gpt-oss)
  silu_clamp = 5,    // silu(gate) <= limit, -limit <= up <= limit, then their product
  relu2 = 6,         // without a gate: max(x, 0)^2 of every column; see ExpertShape
};

constexpr bool is_gated(ActivationKind kind) { return kind != ActivationKind::relu2; }

struct Activation {
  ActivationKind kind;
  float alpha;
  float limit;
};

// y[r, 0 : 32 * pairs] = sum over k of x_rows[r][k] * W[32 * first_pair + column, k], in float. Each output has one
// accumulator, which runs over K in ascending order. Scaled groups are summed on their own and added with one FMA.
struct MatmulArgs {
  WeightView weights;
  const void* const* x_rows;  // `rows` pointers to prepared activations (see KernelTable::lane_type), padded_depth long
  float* y;                   // 64-byte aligned, room for `rows` rounded up to 16
  int64_t y_stride;           // floats
  uint8_t* scratch;           // kMatmulScratchBytes, 64-byte aligned
  int32_t rows;
  int32_t first_pair;
  int32_t pairs;
  const uint8_t* next_panel;  // where the caller goes on reading weights, for prefetching; may be null
  int64_t x_stride = 0;       // bytes from each row to the next, where that is the same for all; 0: they lie anywhere
  bool one_way = false;       // a row's sums have the same order and roundings beside any number of others
};
using MatmulFn = void (*)(const MatmulArgs*);

constexpr int64_t kMatmulScratchBytes = 1152 * 1024;  // gathered rows and unpacked weights of many rows
constexpr int64_t kFewRowsScratchBytes = 512 * 1024;  // what kernels of few rows take of it
constexpr int64_t kMaxShiftedGroups =
    32 * 1024;                        // along K, where codes have offsets: sums of some rows fit the scratch
constexpr int kMaxPairsPerCall = 16;  // of kMaxRowsPerCall rows
constexpr int kMaxRowsPerCall = 512;
constexpr int kMaxSumFloats = 512 * 1024;

struct FormatKernels {
  MatmulFn dot_rows;       // few rows: weights are streamed once and decoded in registers
  MatmulFn tile_mm;        // many rows: a panel is unpacked to scratch, then a format-blind kernel
  int32_t tile_from_rows;  // from this many rows tile_mm is faster: measured
  // An expert of at most 2 L rows is cut into parts of at most L: measured. L is part_rows, or the rows of as many
  // whole tiles of its K as part_bytes hold. 0: never.
  int32_t part_rows, part_bytes;
};

// A row of activations to be converted for products of integers with weights of this layout: rounded to int8 (see
// format/int8_row.h), or cut into digits (format/digit_row.h).
struct IntegerRowArgs {
  WeightView weights;  // only sizes count
  const void* source;  // weights.depth numbers
  DType from;
  uint8_t* to;
  int32_t offset;  // as in IntegerKernels
  bool split;
};

// What a tier has for products of integers, for one format; MatmulArgs::x_rows are rows that round_row or cut_row has
// made.
struct IntegerKernels {
  MatmulFn rows;       // any number of rows; null: there is nothing for this format
  int32_t below_rows;  // from this many rows on, the tier's usual kernels should be faster, and nothing is converted
  int32_t below_rows_of_groups;  // likewise, where weights have scales of groups of 16 to 128 k
  int32_t offset;                // of the codes that weights are decoded to
  bool split;                    // which order codes of activations have: see kSplitOrder
};

// How a tier's kernels want many rows divided.
struct Blocking {
  int32_t rows_per_call;     // at most kMaxRowsPerCall, and
  int32_t pairs_per_call;    // at most kMaxPairsPerCall: the results stay in L2
  int32_t most_pairs;        // instead, where no expert's part has so many rows and the results take no more memory
  int32_t many_rows;         // of a matrix: from here on multiplying takes longer than streaming weights
  int32_t many_expert_rows;  // likewise, of an expert in the mean: others' weights can stream meanwhile
  int32_t result_rows;       // of a call's experts: up to here results are added up by columns, else by tokens
  bool gathers_rows;         // many rows are copied before they are multiplied: it does not matter where they lie
};

struct KernelTable {
  Tier tier;
  DType lane_type;  // what "prepared" activations of bf16, int8 and int4 weights are made of; f32 weights: always f32.
                    // With f32 lanes the values are still rounded to bf16.
  Blocking blocking;
  FormatKernels formats[kFormatCount];

  // Rows of `source` to prepared rows: rounded to bf16 where round_to_bf16, stored as `to`, padded with zeros.
  void (*prepare_row)(const void* source, DType from, void* destination, DType to, bool round_to_bf16, int64_t length,
                      int64_t padded_length);
  // gate_up: pairs of [16 gate][16 up] columns, `pairs` of them; destination: 16 * pairs values as prepared. Without a
  // gate the first 16 columns of each pair go to destination, the others to `second`; else that is not used.
  void (*activate_row)(const Activation* activation, const float* gate_up, void* destination, void* second, DType to,
                       bool round_to_bf16, int64_t pairs);
  void (*add_scaled_row)(float* sum, const float* y, float weight, int64_t length);  // sum += weight * y
  void (*add_row)(float* sum, const float* y, int64_t length);                       // sum += y
  // `rows` rows of `length` to memory that is read when caches have forgotten it: past them. Strides in floats; all
  // 64-byte aligned.
  void (*stream_rows)(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
                      int64_t length);
  // destination[0 : length] = y (+ destination where add), rounded to `to`.
  void (*store_row)(const float* y, void* destination, DType to, bool add, int64_t length);

  // The most this tier can multiply and add, in the compute type of its prepared activations and in f32: registers only
  // (AMX: tiles from L1). Returns the floating-point operations done. scratch: kMatmulScratchBytes, 64-byte aligned.
  int64_t (*peak)(int64_t rounds, uint8_t* scratch);
  int64_t (*peak_f32)(int64_t rounds, uint8_t* scratch);

  // With int8 activations, an explicit choice that costs accuracy.
  IntegerKernels int8[kFormatCount];
  void (*round_row)(const IntegerRowArgs* args);
  int64_t (*peak_int8)(int64_t rounds, uint8_t* scratch);  // multiplications and additions of integers

  // What few rows of bf16 activations are multiplied with where memory is faster than dot_rows; no less accurate.
  IntegerKernels digits[kFormatCount];
  void (*cut_row)(const IntegerRowArgs* args);
};

}  // namespace tandem
