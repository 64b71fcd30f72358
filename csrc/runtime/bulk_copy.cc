#include "runtime/bulk_copy.h"

#include <algorithm>
#include <cstring>

#include "runtime/files/readable_file.h"

namespace tandem {

void copy_out(const uint8_t* from, int64_t bytes, uint8_t* to) {
  if (!ReadableFile::read(from, bytes, to)) std::memcpy(to, from, size_t(bytes));
}

void copy_out(WorkerPool& pool, const uint8_t* from, int64_t bytes, uint8_t* to) {
  pool.for_each((bytes + kCopyBytes - 1) / kCopyBytes, [&](int64_t i, const Worker&) {
    const int64_t at = i * kCopyBytes;
    copy_out(from + at, std::min(kCopyBytes, bytes - at), to + at);
  });
}

}  // namespace tandem
