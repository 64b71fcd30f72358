#include "format/staged.h"

#include <algorithm>
#include <vector>

#include "format/codes.h"
#include "runtime/files/readable_file.h"

namespace tandem {
namespace {

constexpr int64_t kMaxStagedBytes = int64_t{4} << 20;  // beyond a cache there is nothing to gain

int64_t row_bytes(const MatrixSource& source) {
  if (source.data) return source.depth * (source.type == DType::f32 ? 4 : 2);
  return row_bytes_of(source.stored.format.format, source.depth);
}

}  // namespace

MatrixSource staged(const MatrixSource& source, int64_t first_row) {
  static thread_local std::vector<uint8_t> buffer;
  const int64_t stride = row_bytes(source), rows = std::clamp<int64_t>(source.rows - first_row, 0, kPanelRows);
  const uint8_t* all = source.data ? static_cast<const uint8_t*>(source.data) : source.stored.codes;
  if (rows == 0 || rows * stride > kMaxStagedBytes) return source;
  if (int64_t(buffer.size()) < rows * stride) buffer.resize(size_t(rows * stride));
  if (!ReadableFile::read(all + first_row * stride, rows * stride, buffer.data())) return source;
  // Where row 0 would be: rows are still counted from the matrix's first.
  const uintptr_t base = reinterpret_cast<uintptr_t>(buffer.data()) - uintptr_t(first_row * stride);
  MatrixSource moved = source;
  if (source.data)
    moved.data = reinterpret_cast<const void*>(base);
  else
    moved.stored.codes = reinterpret_cast<const uint8_t*>(base);
  return moved;
}

}  // namespace tandem
