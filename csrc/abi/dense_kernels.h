// What a tier offers to the dense operations: function pointers over plain memory. No inline functions, no std headers.
#pragma once

#include "abi/kernel_table.h"

namespace tandem {

constexpr int kAttentionRows = 4;  // of one `attend` that are computed together, at most

constexpr int kRowLanes = 16;  // scratch rows of attention are padded to a multiple of it

// Online softmax over keys of one query row: exp-weighted values `acc` relative to the largest score `max`.
struct AttentionState {
  float max;  // -inf while no key has been seen
  float sum;  // of exp(score - max)
};

// Integer codes low … high, and initial values of a scale: the code of the weight of the largest magnitude.
struct FitGrid {
  float low, high;
  const float* targets;
  int32_t target_count;
};

// Codes and bf16 scales of `groups` groups of `group` weights, one after the other.
struct GroupFit {
  const float* weights;
  const float* importance;  // [groups_per_row * group], how much a column's squared error counts; or null: all alike
  int64_t groups, groups_per_row, group;  // group: 16 to 256, a multiple of 16
  FitGrid grid;
  int8_t* codes;
  uint16_t* scales;
};

// The same of 16 rows, whose weights lie side by side: weights and codes [groups * group][16], scales [groups][16].
struct PanelFit {
  const void* weights;
  DType type;
  int64_t groups, group;  // group: 16 to 256
  FitGrid grid;
  int8_t* codes;
  uint16_t* scales;
};

// XXH3: stripes of a block, and how far each moves on in the secret.
constexpr int64_t kXxh3StripeBytes = 64, kXxh3Stripes = 16, kXxh3BlockBytes = kXxh3Stripes * kXxh3StripeBytes;
constexpr int64_t kXxh3SecretStep = 8, kXxh3SecretBytes = 192;

// One token of one head of a gated delta net: q and k of unit length, q scaled, in f32.
struct DeltaToken {
  const float *q, *k, *v;
  float* out;
  float decay, beta;
};

// One token of one head of a memory [k_dim][v_dim], in f32. decay_step 0: one number for all of k_dim.
struct FoldToken {
  const float *asked, *written, *values, *decay;
  float* out;
  float beta;
  int64_t decay_step;
};

struct DenseKernels {
  Tier tier;

  // out = round(x / rms(x)) * weight for one row of n; with residual: residual = round(residual + x), then of that.
  // weight_type f32 beside rows of bf16: nothing is rounded before the weight multiplies.
  void (*rms_norm)(const void* x, void* residual, const void* weight, void* out, int64_t n, float eps, DType type,
                   DType weight_type);

  // One head of d elements, in = out allowed: optional scaling by inv_rms and norm weight, then rotation of the first
  // 2 * half elements by cos/sin (f32 [half]). inv_rms <= 0: no norm.
  void (*rotate_head)(const void* x, const void* norm_weight, float inv_rms, const float* cos, const float* sin,
                      int64_t half, void* out, int64_t d, DType type, DType weight_type);

  // 1 / sqrt(mean(x^2) + eps) of n elements.
  float (*inverse_rms)(const void* x, int64_t n, float eps, DType type);

  // Rows of d elements, `stride` bytes apart, to f32 rows of `padded` elements, times scale, zeros at the end.
  void (*widen)(const void* x, int64_t stride, int64_t rows, float scale, float* out, int64_t d, int64_t padded,
                DType type);
  void (*narrow)(const float* x, float scale, void* out, int64_t d, DType type);

  // Adds keys [begin, end) of a block to `rows` query rows. q, k, v, acc are f32 rows of `padded` elements. scratch
  // holds end - begin floats, rounded up to kRowLanes, for each of kAttentionRows rows.
  void (*attend)(const float* q, const float* k, const float* v, int64_t rows, int64_t begin, int64_t end,
                 int64_t padded, float* scratch, AttentionState* states, float* acc);

  // (into, acc) += (from, from_acc): the other half of online softmax.
  void (*merge)(AttentionState* into, float* acc, const AttentionState* from, const float* from_acc, int64_t padded);

  void (*fit_groups)(const GroupFit* fit);
  void (*fit_panel)(const PanelFit* fit);

  // Adds whole blocks to the eight sums of XXH3.
  void (*xxh3_blocks)(uint64_t* sums, const uint8_t* data, int64_t blocks, const uint8_t* secret);

  // out[c] = silu(sum over j of weights[j][c] * rows[j][c]) of n channels, rounded to `type`; weights `stride` apart.
  void (*conv_silu)(const void* const* rows, const float* weights, int64_t stride, int64_t width, float* out, int64_t n,
                    DType type);
  // The same sum of channels, rounded to `type`, times their gates: rows of `type`, as `out`.
  void (*conv_gated)(const void* const* rows, const float* weights, int64_t stride, int64_t width, const void* gate,
                     void* out, int64_t n, DType type);
  // out = x times y, of n elements.
  void (*multiply)(const void* x, const void* y, void* out, int64_t n, DType type);
  // state [k_dim][v_dim]: decays, learns v at k as far as beta says, and answers q.
  void (*delta_step)(float* state, const DeltaToken* token, int64_t k_dim, int64_t v_dim);
  // state [k_dim][v_dim]: decays, takes in values at what is written, and answers what is asked. corrected: as
  // delta_step.
  void (*fold_added)(float* state, const FoldToken* token, int64_t k_dim, int64_t v_dim);
  void (*fold_corrected)(float* state, const FoldToken* token, int64_t k_dim, int64_t v_dim);
  // out = norm of x, rounded to `type`, times weight, times silu(gate), or its sigmoid.
  void (*gated_norm)(const float* x, const void* gate, const void* weight, void* out, int64_t n, float eps,
                     bool sigmoid, DType type);

  // out = x of n elements times what makes its length `scale`; eps is added to the sum of squares.
  void (*to_unit)(const float* x, float* out, int64_t n, float scale, float eps);
  // out = e^(rate * softplus(forget + bias)), rate negative; with a floor below 0, which no logarithm passes:
  // e^(floor * sigmoid(-rate * (forget + bias))).
  void (*channel_decay)(const void* forget, const float* bias, float rate, float floor, float* out, int64_t n,
                        DType type);
  // out = norm of x, rounded to `type` before, times weight, times sigmoid(gate).
  void (*sigmoid_norm)(const float* x, const void* gate, const float* weight, void* out, int64_t n, float eps,
                       DType type);

  // out = (x + through times value) * silu(gate).
  void (*through_gate)(const float* x, const float* value, float through, const void* gate, float* out, int64_t n,
                       DType type);

  // out[j] = sum over heads of gates[h] * max(0, q[:, h] . k[j]) for `keys` keys, `stride` floats apart. q
  // [dim][heads]; heads: a multiple of kRowLanes.
  void (*token_scores)(const float* q, const float* gates, const float* k, int64_t heads, int64_t dim, int64_t stride,
                       int64_t keys, float* out);

  // Of an image's patches, computed in float and rounded once. A head of 2 * half elements, turned by cos and sin (f32
  // [half]); (x - mean) / deviation * weight + bias; GELU by tanh.
  void (*turn_head)(const void* x, const float* cos, const float* sin, int64_t half, void* out, DType type);
  void (*layer_norm)(const void* x, const void* weight, const void* bias, void* out, int64_t n, float eps, DType type);
  void (*gelu_row)(const void* x, void* out, int64_t n, DType type);

  // A ceiling of the machine. Returns something computed from all that was read, so that nothing is optimised away.
  float (*read_memory)(const void* data, int64_t bytes);  // bytes: a multiple of 1024
};

extern const DenseKernels kScalarDense;
extern const DenseKernels kAvx2Dense;
extern const DenseKernels kAvx512Dense;
extern const DenseKernels kAvx512Bf16Dense;

}  // namespace tandem
