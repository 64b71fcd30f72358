// Checksums of large memory at the speed of memory.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/worker_pool.h"

namespace tandem {

// XXH64 with seed 0, as github.com/Cyan4973/xxHash doc/xxhash_spec.md defines it: finds every damage that is not made
// on purpose, and runs faster than a core reads memory.
uint64_t xxh64(const uint8_t* data, int64_t bytes);

// xxh64 of each block of `block_bytes` (the last may be shorter), in parallel.
std::vector<uint64_t> block_checksums(WorkerPool& pool, const uint8_t* data, int64_t bytes, int64_t block_bytes);

}  // namespace tandem
