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
// The same of data that arrives meanwhile: arrive(n), called when the first n bytes were there, returns how
// many are there now.
using Arrival = FunctionRef<int64_t(int64_t)>;
uint64_t xxh3(const uint8_t* data, int64_t bytes, const DenseKernels& kernels, Arrival arrive);

// The checksum of each block of `block_bytes` (the last of a range may be shorter) of all ranges in turn, in one
// parallel region: XXH3, or XXH64 of short ones. In place, a mapped file's pages are mapped afterwards; else they are
// read from the file (ReadableFile), which maps none, and a file that is cut short meanwhile is an error.
std::vector<uint64_t> block_checksums(WorkerPool& pool, const std::vector<ByteRange>& ranges, int64_t block_bytes,
                                      bool in_place);

}  // namespace tandem
