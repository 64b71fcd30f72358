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

// What the memory learns of a token.
struct Given {
  const float* mixed;  // [3, heads, dim], from this head's query on
  const char *forget, *beta;
};

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
  }

  // state_lens: tokens that the memory holds; num_verified: the first rows, which are no draft tokens.
  void run(int64_t state_lens, int64_t num_verified) {
    const int64_t size = call_.dim * call_.dim;
    if (state_lens == 0) std::fill_n(memory_, size, 0.0f);
    for (int64_t t = state_lens - span_.known; t < 0; ++t) take_in(kept(t));
    for (int64_t t = 0; t < num_verified; ++t) row(t);
    if (num_verified == span_.count) return;
    const std::vector<float> settled(memory_, memory_ + size);
    for (int64_t t = num_verified; t < span_.count; ++t) {
      row(t);
      keep(t);
    }
    std::copy(settled.begin(), settled.end(), memory_);
  }

 private:
  void row(int64_t t) {
    take_in(given(t));
    const int64_t at = ((span_.first + t) * call_.heads + head_) * call_.dim;
    kernels_.sigmoid_norm(answer(), of(call_.behind, at), call_.norm, static_cast<char*>(call_.out) + at * size_,
                          call_.dim, call_.eps, call_.type);
  }

  void take_in(const Given& token) {
    const int64_t dim = call_.dim;
    const float *q = token.mixed, *k = q + call_.heads * dim, *v = k + call_.heads * dim;
    float *asked = buffer_.data(), *written = asked + dim, *decay = written + dim;
    kernels_.to_unit(q, asked, dim, 1.0f / std::sqrt(float(dim)), kUnitEps);
    kernels_.to_unit(k, written, dim, 1.0f, kUnitEps);
    kernels_.channel_decay(token.forget, call_.bias + head_ * dim, call_.decay[head_], call_.floor, decay, dim,
                           call_.type);
    const FoldToken fold{asked, written, v, decay, answer(), beta(token.beta), 1};
    kernels_.fold_corrected(memory_, &fold, dim, dim);
  }

  float* answer() { return buffer_.data() + 3 * call_.dim; }

  // Row t of this step.
  Given given(int64_t t) const {
    const int64_t row = span_.first + t;
    return {call_.mixed + (3 * row * call_.heads + head_) * call_.dim,
            of(call_.forget, (row * call_.heads + head_) * call_.dim), of(call_.beta, row * call_.beta_stride + head_)};
  }

  // The place of token t of this step, or of one before it.
  Given kept(int64_t t) const {
    const ChannelInputs& in = call_.inputs;
    const int64_t place = (span_.known + t) % in.places, at = place * call_.heads + head_;
    const float* mixed = reinterpret_cast<const float*>(in.mixed + span_.slot * in.mixed_stride);
    return {mixed + (3 * place * call_.heads + head_) * call_.dim,
            in.forget + span_.slot * in.forget_stride + at * call_.dim * size_,
            in.beta + span_.slot * in.beta_stride + at * size_};
  }

  void keep(int64_t t) {
    const Given from = given(t), to = kept(t);
    for (int64_t part = 0; part < 3; ++part)
      std::copy_n(from.mixed + part * call_.heads * call_.dim, call_.dim,
                  const_cast<float*>(to.mixed) + part * call_.heads * call_.dim);
    std::memcpy(const_cast<char*>(to.forget), from.forget, size_t(call_.dim * size_));
    std::memcpy(const_cast<char*>(to.beta), from.beta, size_t(size_));
  }

  const char* of(const void* rows, int64_t at) const { return static_cast<const char*>(rows) + at * size_; }

  // Rounded as torch's sigmoid of this type.
  float beta(const char* from) const {
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
  check_places(batch, call.inputs.places, "channel_delta");
  dense.pool.for_each(batch.sequences() * call.heads, [&](int64_t task, const Worker&) {
    const size_t s = size_t(task / call.heads);
    const Span span(batch, int64_t(s));
    ChannelRun(dense.kernels, span, call, task % call.heads)
        .run(batch.state_lens.empty() ? span.known : batch.state_lens[s],
             batch.num_verified.empty() ? span.count : batch.num_verified[s]);
  });
}

}  // namespace tandem
