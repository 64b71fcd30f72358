// Bytes that kernels will read soon, into the GPU's second-level cache. Nobody waits for them.
constexpr u64 PART = 16384;  // bytes of a request

// ranges: address and bytes of each, multiples of 16. What is fetched depends on no kernel. It waits in the end, so
// that who waits for it waits for all before (kernels/gpu/overlap.py).
extern "C" __global__ void ahead(const u64* ranges, int count) {
  start_next();
#if __CUDA_ARCH__ >= 900
  const u64 mine = u64(blockIdx.x * blockDim.x + threadIdx.x) * PART, all = u64(gridDim.x * blockDim.x) * PART;
  for (int r = 0; r < count; ++r) {
    const u64 from = ranges[2 * r], bytes = ranges[2 * r + 1];
    for (u64 at = mine; at < bytes; at += all) {
      const u32 size = u32(bytes - at < PART ? bytes - at : PART);
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(from + at), "r"(size) : "memory");
    }
  }
#endif
  wait_for_previous();
}
