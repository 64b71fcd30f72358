// One matrix of packed experts (kernels/gpu/panels.py): sizes in bytes, steps of 32 k, 2^group_shift steps per scale.
struct Matrix {
  u64 panel_bytes, scale_at;
  int depth, steps, group_shift, columns, panels;
};

// Rows [first, first + rows) of x, all of one expert; nobody's where rows is 0.
struct Tile {
  int expert, first, rows;
};

enum { kLooked = 8 };  // experts that a lane looks at together

__device__ inline int shuffled(int value, int lane) { return __shfl_sync(~0u, value, lane); }

// The tile-th of all experts, whose rows end at ends[0], ends[1], ...: an expert's are of nearly equal size. By a warp.
__device__ inline Tile find_tile(const int* ends, int experts, int tile) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int head = 0; head < experts; head += 32 * kLooked) {
    int begin[kLooked], end[kLooked];
#pragma unroll
    for (int i = 0; i < kLooked; ++i) {
      const int e = head + 32 * i + lane;
      begin[i] = e < experts && e > 0 ? ends[e - 1] : 0;
      end[i] = e < experts ? ends[e] : begin[i];
    }
#pragma unroll
    for (int i = 0; i < kLooked; ++i) {
      const int tiles = (end[i] - begin[i] + ROWS - 1) / ROWS;
      int after = tiles;
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, after, d);
        after += lane >= d ? other : 0;
      }
      const unsigned found = __ballot_sync(~0u, before + after > tile);
      if (found) {
        const int who = __ffs(found) - 1, first = shuffled(begin[i], who), count = shuffled(end[i], who) - first;
        const int own = shuffled(tiles, who), index = tile - before - shuffled(after, who) + own;
        const int each = ((count + own - 1) / own + 7) / 8 * 8, done = index * each;
        return {head + 32 * i + who, first + done, min(each, count - done)};
      }
      before += shuffled(after, 31);
    }
  }
  return {0, 0, 0};
}

__device__ inline void copy_async(uint4* to, const uint4* from, int bytes) {
  const u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int LEFT>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory");
}

__device__ inline u32 pair_of(float low, float high) { return rounded(low) | u32(rounded(high)) << 16; }
