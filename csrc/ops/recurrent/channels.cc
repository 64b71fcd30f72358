#include "ops/recurrent/channels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "isa/inline.h"
#include "ops/recurrent/span.h"

namespace tandem {
namespace {

constexpr float kUnitEps = 1e-6f;  // of the lengths of queries and keys

int64_t bytes_of(DType type) { return type == DType::bf16 ? 2 : 4; }

// One sequence's rows through one head. What a token needs lies in caches: nothing is kept of whole prompts.
class ChannelRun {
 public:
  ChannelRun(const DenseKernels& kernels, const Span& span, const ChannelCall& call, int64_t head)
      : kernels_(kernels),
        span_(span),
        call_(call),
        head_(head),
        size_(bytes_of(call.type)),
        buffer_(size_t(4 * call.dim)) {
    memory_ = reinterpret_cast<float*>(call.memory + span.slot * call.memory_stride) + head * call.dim * call.dim;
    if (span.known == 0) std::fill_n(memory_, call.dim * call.dim, 0.0f);
  }

  void run() {
    for (int64_t row = span_.first; row < span_.first + span_.count; ++row) token(row);
  }

 private:
  void token(int64_t row) {
    const int64_t dim = call_.dim, at = (row * call_.heads + head_) * dim;
    const float* q = call_.mixed + (3 * row * call_.heads + head_) * dim;
    const float *k = q + call_.heads * dim, *v = k + call_.heads * dim;
    float *asked = buffer_.data(), *written = asked + dim, *decay = written + dim, *seen = decay + dim;
    kernels_.to_unit(q, asked, dim, 1.0f / std::sqrt(float(dim)), kUnitEps);
    kernels_.to_unit(k, written, dim, 1.0f, kUnitEps);
    kernels_.channel_decay(of(call_.forget, at), call_.bias + head_ * dim, call_.decay[head_], call_.floor, decay, dim,
                           call_.type);
    const FoldToken given{asked, written, v, decay, seen, beta(row), 1};
    kernels_.fold_corrected(memory_, &given, dim, dim);
    kernels_.sigmoid_norm(seen, of(call_.behind, at), call_.norm, static_cast<char*>(call_.out) + at * size_, dim,
                          call_.eps, call_.type);
  }

  const char* of(const void* rows, int64_t at) const { return static_cast<const char*>(rows) + at * size_; }

  // Rounded as torch's sigmoid of this type.
  float beta(int64_t row) const {
    const char* from = of(call_.beta, row * call_.beta_stride + head_);
    float x;
    if (call_.type == DType::f32) {
      std::memcpy(&x, from, 4);
      return 1.0f / (1.0f + std::exp(-x));
    }
    uint16_t half;
    std::memcpy(&half, from, 2);
    return float_of_bf16(bf16_of_float(1.0f / (1.0f + std::exp(-float_of_bf16(half)))));
  }

  const DenseKernels& kernels_;
  const Span& span_;
  const ChannelCall& call_;
  const int64_t head_, size_;
  std::vector<float> buffer_;
  float* memory_;
};

}  // namespace

void channel_delta(const DenseOps& dense, const BatchView& batch, const ChannelCall& call) {
  check_slots(batch, call.slots, "channel_delta");
  check_sure(batch, "channel_delta");
  dense.pool.for_each(batch.sequences() * call.heads, [&](int64_t task, const Worker&) {
    ChannelRun(dense.kernels, Span(batch, task / call.heads), call, task % call.heads).run();
  });
}

}  // namespace tandem
