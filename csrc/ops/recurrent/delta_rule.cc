#include "ops/recurrent/delta_rule.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/recurrent/span.h"

namespace tandem {
namespace {

constexpr float kUnitEps = 1e-6f;  // of the norms of q and k
constexpr int kLanes = 16;

int64_t bytes_of(DType type) { return type == DType::bf16 ? 2 : 4; }

float element(const void* row, int64_t i, DType type) {
  if (type == DType::f32) return static_cast<const float*>(row)[i];
  const uint32_t bits = uint32_t(static_cast<const uint16_t*>(row)[i]) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

void to_unit_length(float* x, int64_t n, float scale) {
  float squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
  const float factor = scale / std::sqrt(squares + kUnitEps);
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// One sequence's rows through one key head and the value heads that share it.
class HeadRun {
 public:
  HeadRun(const DenseOps& dense, const BatchView& batch, const DeltaShape& shape, const DeltaCall& call, int64_t s,
          int64_t head)
      : kernels_(dense.kernels), shape_(shape), call_(call), head_(head), size_(bytes_of(call.type)) {
    const int64_t slot = batch.slots[size_t(s)];
    first_row_ = batch.query_starts[size_t(s)];
    rows_ = batch.query_starts[size_t(s) + 1] - first_row_;
    known_ = batch.seq_lens[size_t(s)] - rows_;
    state_len_ = batch.state_lens.empty() ? known_ : batch.state_lens[size_t(s)];
    num_verified_ = batch.num_verified.empty() ? rows_ : batch.num_verified[size_t(s)];
    inputs_ = call.state.inputs + slot * call.state.inputs_stride;
    gates_ = call.state.gates + slot * call.state.gates_stride;
    memory_ = reinterpret_cast<float*>(call.state.memory + slot * call.state.memory_stride) +
              head * shape.group() * shape.k_dim * shape.v_dim;
    buffer_.resize(size_t(2 * shape.k_dim + 2 * shape.group() * shape.v_dim + 4 * kLanes));
    zeros_.resize(size_t(std::max(shape.k_dim, shape.group() * shape.v_dim) * size_));
  }

  void run() {
    const int64_t size = shape_.group() * shape_.k_dim * shape_.v_dim;
    if (state_len_ == 0) std::fill_n(memory_, size, 0.0f);
    for (int64_t t = state_len_ - known_; t < num_verified_; ++t) row(t);
    if (num_verified_ < rows_) {
      const std::vector<float> settled(memory_, memory_ + size);
      for (int64_t t = num_verified_; t < rows_; ++t) row(t);
      std::copy(settled.begin(), settled.end(), memory_);
    }
    keep(shape_.q, q_channel(), shape_.k_dim);
    keep(shape_.k, k_channel(), shape_.k_dim);
    keep(shape_.v, v_channel(), shape_.group() * shape_.v_dim);
    keep_gates(shape_.beta);
    keep_gates(shape_.decay);
  }

 private:
  // Row t of this step, or the token at -t before it, of which only the memory learns.
  void row(int64_t t) {
    float *q = buffer_.data(), *k = q + shape_.k_dim, *v = k + shape_.k_dim;
    float* out = v + shape_.group() * shape_.v_dim;
    convolve(t, shape_.q, q_channel(), shape_.k_dim, q);
    convolve(t, shape_.k, k_channel(), shape_.k_dim, k);
    convolve(t, shape_.v, v_channel(), shape_.group() * shape_.v_dim, v);
    to_unit_length(q, shape_.k_dim, 1.0f / std::sqrt(float(shape_.k_dim)));
    to_unit_length(k, shape_.k_dim, 1.0f);
    for (int64_t j = 0; j < shape_.group(); ++j) token(t, j, q, k, v + j * shape_.v_dim, out);
  }

  int64_t place(int64_t t) const { return (known_ + t) % call_.state.places; }

  int64_t q_channel() const { return head_ * shape_.k_dim; }
  int64_t k_channel() const { return (shape_.k_heads + head_) * shape_.k_dim; }
  int64_t v_channel() const { return 2 * shape_.k_heads * shape_.k_dim + head_ * shape_.group() * shape_.v_dim; }

  const char* projected(int64_t t, const DeltaShape::Columns& c) const {
    return static_cast<const char*>(call_.projected) +
           ((first_row_ + t) * shape_.projected + c.first + head_ * c.step) * size_;
  }

  // The input of token `t` of this step, or of one before it; zeros before the sequence began.
  const void* input(int64_t t, const DeltaShape::Columns& c, int64_t channel) const {
    if (t >= 0) return projected(t, c);
    if (known_ + t < 0) return zeros_.data();
    return inputs_ + (place(t) * shape_.channels() + channel) * size_;
  }

  void convolve(int64_t t, const DeltaShape::Columns& c, int64_t channel, int64_t n, float* out) const {
    const void* rows[8];
    for (int64_t j = 0; j < shape_.conv_width; ++j) rows[j] = input(t - (shape_.conv_width - 1) + j, c, channel);
    kernels_.conv_silu(rows, call_.conv + channel, shape_.channels(), shape_.conv_width, out, n, call_.type);
  }

  void token(int64_t t, int64_t j, const float* q, const float* k, const float* v, float* out) const {
    const int64_t row = first_row_ + t, value_head = head_ * shape_.group() + j;
    const char* gates = t < 0 ? gates_ + place(t) * shape_.gates * size_
                              : static_cast<const char*>(call_.gates) + row * shape_.gates * size_;
    const float b = element(gates, shape_.beta.first + head_ * shape_.beta.step + j, call_.type);
    const float a = element(gates, shape_.decay.first + head_ * shape_.decay.step + j, call_.type);
    const float decay = std::exp(call_.decay[value_head] * softplus(a + call_.dt_bias[value_head]));
    const DeltaToken token{q, k, v, out, decay, sigmoid(b)};
    kernels_.delta_step(memory_ + j * shape_.k_dim * shape_.v_dim, &token, shape_.k_dim, shape_.v_dim);
    if (t < 0) return;
    const char* gate = projected(t, shape_.z) + j * shape_.v_dim * size_;
    char* to = static_cast<char*>(call_.out) + (row * shape_.v_heads + value_head) * shape_.v_dim * size_;
    kernels_.gated_norm(out, gate, call_.norm, to, shape_.v_dim, call_.eps, shape_.sigmoid, call_.type);
  }

  // The last inputs, after all that read the ones that they replace.
  void keep(const DeltaShape::Columns& c, int64_t channel, int64_t n) {
    for (int64_t t = first_kept(); t < rows_; ++t)
      std::memcpy(inputs_ + (place(t) * shape_.channels() + channel) * size_, projected(t, c), size_t(n * size_));
  }

  void keep_gates(const DeltaShape::Columns& c) {
    const int64_t first = c.first + head_ * c.step;
    for (int64_t t = first_kept(); t < rows_; ++t)
      std::memcpy(gates_ + (place(t) * shape_.gates + first) * size_,
                  static_cast<const char*>(call_.gates) + ((first_row_ + t) * shape_.gates + first) * size_,
                  size_t(shape_.group() * size_));
  }

  int64_t first_kept() const { return std::max<int64_t>(0, rows_ - call_.state.places); }

  const DenseKernels& kernels_;
  const DeltaShape& shape_;
  const DeltaCall& call_;
  const int64_t head_, size_;
  int64_t first_row_, rows_, known_, state_len_, num_verified_;
  char *inputs_, *gates_;
  float* memory_;
  std::vector<float> buffer_;
  std::vector<char> zeros_;
};

}  // namespace

void delta_rule(const DenseOps& dense, const BatchView& batch, const DeltaShape& shape, const DeltaCall& call) {
  check_slots(batch, call.state.slots, "delta_rule");
  check_places(batch, call.state.places, "delta_rule", shape.conv_width - 1);
  const int64_t tasks = batch.sequences() * shape.k_heads;
  dense.pool.for_each(tasks, [&](int64_t task, const Worker&) {
    HeadRun(dense, batch, shape, call, task / shape.k_heads, task % shape.k_heads).run();
  });
}

}  // namespace tandem
