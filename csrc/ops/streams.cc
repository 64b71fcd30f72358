#include "ops/streams.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/row_tasks.h"

namespace tandem {
namespace {

constexpr int64_t kChannels = 512;  // of each stream at a time: float32 of 4 streams and a sum in an L1 cache

int64_t bytes_of(DType type) { return type == DType::bf16 ? 2 : 4; }

// Memory of the calling thread, which it keeps.
float* scratch(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats) memory.resize(floats);
  return memory.data();
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Entries of each column add up to about 1.
void norm_columns(float* mixing, int64_t n, float eps) {
  for (int64_t k = 0; k < n; ++k) {
    float sum = 0.0f;
    for (int64_t j = 0; j < n; ++j) sum += mixing[j * n + k];
    for (int64_t j = 0; j < n; ++j) mixing[j * n + k] /= sum + eps;
  }
}

void norm_rows(float* mixing, int64_t n, float eps) {
  for (int64_t j = 0; j < n; ++j) {
    float sum = 0.0f;
    for (int64_t k = 0; k < n; ++k) sum += mixing[j * n + k];
    for (int64_t k = 0; k < n; ++k) mixing[j * n + k] /= sum + eps;
  }
}

// Softmax by rows, then norms by rows and columns in turn (Sinkhorn and Knopp).
void balance(const StreamsShape& shape, float* mixing) {
  const int64_t n = shape.streams;
  for (int64_t j = 0; j < n; ++j) {
    float* row = mixing + j * n;
    const float most = *std::max_element(row, row + n);
    float sum = 0.0f;
    for (int64_t k = 0; k < n; ++k) sum += row[k] = std::exp(row[k] - most);
    for (int64_t k = 0; k < n; ++k) row[k] = row[k] / sum + shape.eps;
  }
  norm_columns(mixing, n, shape.eps);
  for (int64_t i = 1; i < shape.iterations; ++i) {
    norm_rows(mixing, n, shape.eps);
    norm_columns(mixing, n, shape.eps);
  }
}

}  // namespace

void widen_streams(const DenseOps& dense, const StreamsShape& shape, const void* x, int64_t rows, float* wide,
                   float* norms, DType type) {
  const int64_t n = shape.row();
  for_rows(dense.pool, rows, n, [&](int64_t r) {
    const char* row = static_cast<const char*>(x) + r * n * bytes_of(type);
    float* run = scratch(kChannels);  // whole vectors are stored, and rows need not consist of them
    for (int64_t c = 0; c < n; c += kChannels) {
      const int64_t m = std::min(kChannels, n - c);
      dense.kernels.widen(row + c * bytes_of(type), 0, 1, 1.0f, run, m, kChannels, type);
      std::copy_n(run, m, wide + r * n + c);
    }
    norms[r] = dense.kernels.inverse_rms(row, n, shape.norm_eps, type);
  });
}

void enter_streams(const DenseOps& dense, const StreamsShape& shape, const void* x, int64_t rows,
                   const StreamsMade& made, void* out, float* share, float* mixing, DType type) {
  const int64_t n = shape.streams, hidden = shape.hidden, size = bytes_of(type);
  for_rows(dense.pool, rows, shape.row() + 4096, [&](int64_t r) {
    float* weights = scratch(shape.weights() + 2 * kChannels);
    float *total = weights + shape.weights(), *own = total + kChannels;
    const int64_t count = share ? shape.weights() : n;
    for (int64_t i = 0; i < count; ++i)
      weights[i] = made.sums[r * made.columns + i] * made.norms[r] * made.scale[i] + made.base[i];
    for (int64_t i = 0; i < n; ++i) weights[i] = sigmoid(weights[i]) + shape.eps;
    if (share) {
      for (int64_t i = 0; i < n; ++i) share[r * n + i] = 2.0f * sigmoid(weights[n + i]);
      std::copy_n(weights + 2 * n, n * n, mixing + r * n * n);
      balance(shape, mixing + r * n * n);
    }
    for (int64_t c = 0; c < hidden; c += kChannels) {
      const int64_t m = std::min(kChannels, hidden - c);
      std::fill_n(total, m, 0.0f);
      for (int64_t s = 0; s < n; ++s) {
        const char* from = static_cast<const char*>(x) + ((r * n + s) * hidden + c) * size;
        dense.kernels.widen(from, 0, 1, weights[s], own, m, kChannels, type);
        for (int64_t i = 0; i < m; ++i) total[i] += own[i];
      }
      dense.kernels.narrow(total, 1.0f, static_cast<char*>(out) + (r * hidden + c) * size, m, type);
    }
  });
}

void leave_streams(const DenseOps& dense, const StreamsShape& shape, const void* x, const void* y, int64_t rows,
                   const float* share, const float* mixing, void* out, DType type) {
  const int64_t n = shape.streams, hidden = shape.hidden, size = bytes_of(type);
  for_rows(dense.pool, rows, shape.row(), [&](int64_t r) {
    float* wide = scratch((n + 2) * kChannels);
    float *result = wide + n * kChannels, *total = result + kChannels;
    for (int64_t c = 0; c < hidden; c += kChannels) {
      const int64_t m = std::min(kChannels, hidden - c);
      dense.kernels.widen(static_cast<const char*>(y) + (r * hidden + c) * size, 0, 1, 1.0f, result, m, kChannels,
                          type);
      dense.kernels.widen(static_cast<const char*>(x) + (r * n * hidden + c) * size, hidden * size, n, 1.0f, wide, m,
                          kChannels, type);
      for (int64_t k = 0; k < n; ++k) {
        const float own = share[r * n + k];
        for (int64_t i = 0; i < m; ++i) total[i] = own * result[i];
        for (int64_t j = 0; j < n; ++j) {
          const float weight = mixing[(r * n + j) * n + k], *from = wide + j * kChannels;
          for (int64_t i = 0; i < m; ++i) total[i] += weight * from[i];
        }
        dense.kernels.narrow(total, 1.0f, static_cast<char*>(out) + ((r * n + k) * hidden + c) * size, m, type);
      }
    }
  });
}

}  // namespace tandem
