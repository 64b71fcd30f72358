#include "ops/recurrent/fold.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "ops/recurrent/span.h"

namespace tandem {
namespace {

constexpr int64_t kChannels = 256;  // of a task of a convolution
constexpr int64_t kMostTaps = 8;

void fold_head(const DenseKernels& kernels, const Span& span, const FoldShape& shape, const FoldCall& call,
               int64_t head) {
  const int64_t size = shape.k_dim * shape.v_dim, group = head / (shape.heads / shape.groups);
  float* memory = reinterpret_cast<float*>(call.memory + span.slot * call.memory_stride) + head * size;
  if (span.known == 0) std::fill_n(memory, size, 0.0f);
  const auto step = shape.corrects ? kernels.fold_corrected : kernels.fold_added;
  for (int64_t row = span.first; row < span.first + span.count; ++row) {
    const int64_t of_head = row * shape.heads + head, of_group = (row * shape.groups + group) * shape.k_dim;
    const FoldToken token{call.asked + of_group,
                          call.written + of_group,
                          call.values + of_head * shape.v_dim,
                          call.decay + of_head * shape.decays,
                          call.out + of_head * shape.v_dim,
                          call.beta ? call.beta[of_head] : 1.0f,
                          shape.decays == 1 ? 0 : 1};
    step(memory, &token, shape.k_dim, shape.v_dim);
  }
}

// One sequence's rows of channels [first, first + n). A row goes into the ring before it is convolved from there: its
// place was that of a token that no row asks for any more.
class ChannelRun {
 public:
  ChannelRun(const DenseKernels& kernels, const Span& span, const ConvolutionCall& call, int64_t first, int64_t n)
      : kernels_(kernels),
        span_(span),
        call_(call),
        first_(first),
        n_(n),
        size_(call.type == DType::bf16 ? 2 : 4),
        ring_(static_cast<char*>(call.ring) + span.slot * call.ring_stride),
        zeros_(size_t(n * size_)),
        ones_(size_t(n * size_)) {
    const uint16_t half = 0x3f80;  // 1.0 in bfloat16, and the upper half of it in float32
    for (int64_t i = 0; i < n; ++i) std::memcpy(&ones_[size_t((i + 1) * size_ - 2)], &half, 2);
  }

  void run() {
    for (int64_t t = 0; t < span_.count; ++t) {
      keep(t);
      convolve(t);
    }
  }

 private:
  char* kept(int64_t t) const { return ring_ + ((span_.known + t) % call_.places * call_.channels + first_) * size_; }

  // Of token t of this step. gated: 0 the gate before, 1 the gate behind, 2 the values.
  const char* given(int64_t t, int64_t part) const {
    return static_cast<const char*>(call_.rows) +
           ((span_.first + t) * call_.row_stride + part * call_.channels + first_) * size_;
  }

  void keep(int64_t t) {
    if (call_.gated)
      kernels_.multiply(given(t, 0), given(t, 2), kept(t), n_, call_.type);
    else
      std::memcpy(kept(t), given(t, 0), size_t(n_ * size_));
  }

  void convolve(int64_t t) const {
    const void* rows[kMostTaps];
    for (int64_t j = 0; j < call_.taps; ++j) {
      const int64_t from = t - (call_.taps - 1) + j;
      rows[j] = span_.known + from < 0 ? zeros_.data() : kept(from);
    }
    if (call_.bias) rows[call_.taps] = ones_.data();
    const float* weights = call_.weights + first_;
    const int64_t width = call_.taps + call_.bias, at = (span_.first + t) * call_.channels + first_;
    if (call_.gated)
      kernels_.conv_gated(rows, weights, call_.channels, width, given(t, 1), static_cast<char*>(call_.out) + at * size_,
                          n_, call_.type);
    else
      kernels_.conv_silu(rows, weights, call_.channels, width, static_cast<float*>(call_.out) + at, n_, call_.type);
  }

  const DenseKernels& kernels_;
  const Span& span_;
  const ConvolutionCall& call_;
  const int64_t first_, n_, size_;
  char* ring_;
  std::vector<char> zeros_, ones_;
};

}  // namespace

void fold(const DenseOps& dense, const BatchView& batch, const FoldShape& shape, const FoldCall& call) {
  check_slots(batch, call.slots, "fold");
  check_sure(batch, "fold");
  dense.pool.for_each(batch.sequences() * shape.heads, [&](int64_t task, const Worker&) {
    fold_head(dense.kernels, Span(batch, task / shape.heads), shape, call, task % shape.heads);
  });
}

void convolve(const DenseOps& dense, const BatchView& batch, const ConvolutionCall& call) {
  check_slots(batch, call.slots, "convolve");
  if (call.taps + call.bias > kMostTaps || call.places < call.taps)
    throw std::invalid_argument("convolve: too many taps, or a ring that is too short");
  const int64_t blocks = (call.channels + kChannels - 1) / kChannels;
  dense.pool.for_each(batch.sequences() * blocks, [&](int64_t task, const Worker&) {
    const Span span(batch, task / blocks);
    const int64_t first = task % blocks * kChannels;
    ChannelRun(dense.kernels, span, call, first, std::min(kChannels, call.channels - first)).run();
  });
}

}  // namespace tandem
