// Checksums of large memory at the speed of memory.
#pragma once

#include <cstdint>
#include <vector>

#include "abi/dense_kernels.h"
#include "runtime/worker_pool.h"

namespace tandem {

// XXH64 and XXH3 (64 bits) with seed 0, as github.com/Cyan4973/xxHash doc/xxhash_spec.md defines them: they find every
// damage that is not made on purpose. XXH3 runs faster than cores read memory; of it only what is meant for more than
// 240 bytes is here: xxh3 throws std::invalid_argument for less.
constexpr int64_t kXxh3Least = 241;
uint64_t xxh64(const uint8_t* data, int64_t bytes);
uint64_t xxh3(const uint8_t* data, int64_t bytes, const DenseKernels& kernels);

// The checksum of each block of `block_bytes` (the last may be shorter), in parallel: XXH3, or XXH64 of short ones.
std::vector<uint64_t> block_checksums(WorkerPool& pool, const uint8_t* data, int64_t bytes, int64_t block_bytes);

}  // namespace tandem
