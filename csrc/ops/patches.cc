#include "ops/patches.h"

#include <algorithm>

#include "ops/row_tasks.h"

namespace tandem {
namespace {

constexpr int64_t kGeluWork = 4;  // elements that are copied in the time of one

constexpr int64_t bytes_of(DType type) { return type == DType::bf16 ? 2 : 4; }

const char* at(const void* data, int64_t bytes) { return static_cast<const char*>(data) + bytes; }
char* at(void* data, int64_t bytes) { return static_cast<char*>(data) + bytes; }

}  // namespace

void PatchOps::split(const Split& c) const {
  const int64_t head = 2 * c.half * bytes_of(c.type), part = c.heads * head;
  for_rows(pool, c.rows, 3 * c.heads * 2 * c.half, [&](int64_t row) {
    const char* q = at(c.qkv, row * 3 * part);
    const float *cos = c.cos + (c.first + row) * c.half, *sin = c.sin + (c.first + row) * c.half;
    for (int64_t h = 0; h < c.heads; ++h) {
      const int64_t own = (h * c.patches + c.first + row) * head;
      kernels.turn_head(q + h * head, cos, sin, c.half, at(c.q, (h * c.rows + row) * head), c.type);
      kernels.turn_head(q + part + h * head, cos, sin, c.half, at(c.k, own), c.type);
      std::copy_n(q + 2 * part + h * head, head, at(c.v, own));
    }
  });
}

void PatchOps::layer_norm(const void* x, const void* weight, const void* bias, void* out, int64_t rows, int64_t n,
                          float eps, DType type) const {
  const int64_t stride = n * bytes_of(type);
  for_rows(pool, rows, n, [&](int64_t row) {
    kernels.layer_norm(at(x, row * stride), weight, bias, at(out, row * stride), n, eps, type);
  });
}

void PatchOps::gelu(const void* x, void* out, int64_t rows, int64_t n, DType type) const {
  const int64_t stride = n * bytes_of(type);
  for_rows(pool, rows, kGeluWork * n,
           [&](int64_t row) { kernels.gelu_row(at(x, row * stride), at(out, row * stride), n, type); });
}

}  // namespace tandem
