#include "ops/recurrent/spaces.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "isa/inline.h"
#include "ops/recurrent/span.h"

namespace tandem {
namespace {

constexpr int64_t kNormRows = 8;  // of a task

int64_t bytes_of(DType type) { return type == DType::bf16 ? 2 : 4; }

float element(const void* rows, int64_t at, DType type) {
  if (type == DType::f32) return static_cast<const float*>(rows)[at];
  return float_of_bf16(static_cast<const uint16_t*>(rows)[at]);
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// One sequence's rows through one head.
class SpaceRun {
 public:
  SpaceRun(const DenseKernels& kernels, const Span& span, const SpaceShape& shape, const SpaceCall& call, int64_t head)
      : kernels_(kernels), span_(span), shape_(shape), call_(call), head_(head), buffer_(size_t(2 * shape.v_dim)) {
    const int64_t size = shape.k_dim * shape.v_dim;
    memory_ = reinterpret_cast<float*>(call.memory + span.slot * call.memory_stride) + head * size;
    if (span.known == 0) std::fill_n(memory_, size, 0.0f);
  }

  void run() {
    for (int64_t row = span_.first; row < span_.first + span_.count; ++row) token(row);
  }

 private:
  void token(int64_t row) {
    const int64_t n = shape_.v_dim, group = head_ / (shape_.heads / shape_.groups);
    const float* mixed = call_.mixed + row * shape_.channels();
    const float* value = mixed + head_ * n;
    const float* written = mixed + shape_.inner() + group * shape_.k_dim;
    const float step = element(call_.steps, row * call_.steps_stride + head_, call_.type);
    const float length = softplus(step + call_.bias[head_]), kept = std::exp(length * call_.decay[head_]);
    float *added = buffer_.data(), *seen = added + n;
    for (int64_t i = 0; i < n; ++i) added[i] = value[i] * length;
    const FoldToken given{written + shape_.groups * shape_.k_dim, written, added, &kept, seen, 1.0f, 0};
    kernels_.fold_added(memory_, &given, shape_.k_dim, n);
    const char* gate =
        static_cast<const char*>(call_.gate) + (row * call_.gate_stride + head_ * n) * bytes_of(call_.type);
    float* to = call_.gated + row * shape_.inner() + head_ * n;
    kernels_.through_gate(seen, value, call_.through[head_], gate, to, n, call_.type);
  }

  const DenseKernels& kernels_;
  const Span& span_;
  const SpaceShape& shape_;
  const SpaceCall& call_;
  const int64_t head_;
  std::vector<float> buffer_;
  float* memory_;
};

// Of each group of a row.
void norm(const DenseKernels& kernels, const SpaceShape& shape, const SpaceCall& call, int64_t row) {
  const int64_t n = shape.inner() / shape.groups;
  for (int64_t first = 0; first < shape.inner(); first += n) {
    float* y = call.gated + row * shape.inner() + first;
    const float by = kernels.inverse_rms(y, n, call.eps, DType::f32);
    kernels.multiply(y, call.norm + first, y, n, DType::f32);
    char* to = static_cast<char*>(call.out) + (row * shape.inner() + first) * bytes_of(call.type);
    kernels.narrow(y, by, to, n, call.type);
  }
}

}  // namespace

void state_space(const DenseOps& dense, const BatchView& batch, const SpaceShape& shape, const SpaceCall& call) {
  check_slots(batch, call.slots, "state_space");
  check_sure(batch, "state_space");
  dense.pool.for_each(batch.sequences() * shape.heads, [&](int64_t task, const Worker&) {
    SpaceRun(dense.kernels, Span(batch, task / shape.heads), shape, call, task % shape.heads).run();
  });
  const int64_t rows = batch.rows();
  dense.pool.for_each((rows + kNormRows - 1) / kNormRows, [&](int64_t task, const Worker&) {
    for (int64_t row = task * kNormRows; row < std::min(rows, (task + 1) * kNormRows); ++row)
      norm(dense.kernels, shape, call, row);
  });
}

}  // namespace tandem
