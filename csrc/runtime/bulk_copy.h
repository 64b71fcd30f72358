// Copies of many bytes out of mapped files or memory.
#pragma once

#include <cstdint>

#include "runtime/worker_pool.h"

namespace tandem {

constexpr int64_t kCopyBytes = int64_t{256} << 10;  // at a time: stays in a core's cache between the read and the write

// Read from the file that the bytes are mapped from, where one is known (ReadableFile): that leaves no pages mapped,
// and costs no page faults. Throws UnreadableFile.
void copy_out(const uint8_t* from, int64_t bytes, uint8_t* to);

// The same on all workers.
void copy_out(WorkerPool& pool, const uint8_t* from, int64_t bytes, uint8_t* to);

}  // namespace tandem
