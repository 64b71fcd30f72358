// One matrix of a packed expert (kernels/gpu/panels.py): sizes in bytes, steps of 32 k, 2^group_shift steps per scale.
struct Matrix {
  u64 panel_bytes, scale_at;
  int depth, steps, group_shift, columns;
};

// Adds 32 k of a panel: sums of rows 2 g and 2 g + 1, in the lanes with t = 0. x: 8 of the row's numbers, where g = 0.
__device__ inline void add_step(float (&sums)[2], const Step& s, const uint4& x) {
  u32 a[4], b[4];
  decode(s, a, b);
  float c[4] = {0, 0, 0, 0};
  mma(c, a[0], b[0], a[1], b[1], x.x, x.y);
  mma(c, a[2], b[2], a[3], b[3], x.z, x.w);
  sums[0] += GROUPED ? c[0] * scale_of(s, 0) : c[0];
  sums[1] += GROUPED ? c[2] * scale_of(s, 1) : c[2];
}

// Where a row has one scale: times those of rows 2 g and 2 g + 1.
__device__ inline void scale_rows(float (&sums)[2], const u8* panel, const Matrix& m) {
  if (GROUPED) return;
  Step s = {};
  read_scales(s, panel + m.scale_at, threadIdx.x % 32 / 4);
  for (int r = 0; r < 2; ++r) sums[r] *= scale_of(s, r);
}

// AHEAD steps from `begin` on, in flight together; zeros from `last` on.
template <int PANELS, int AHEAD>
__device__ inline void load_steps(Step (&words)[PANELS][AHEAD], const u8* panel, const Matrix& m, int begin, int last) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
      words[p][i] =
          begin + i < last ? step_of(panel + p * m.panel_bytes, m.scale_at, m.group_shift, begin + i, g, t) : Step{};
}

// Adds these steps, times a row that lies in shared memory from their first k on, in units of 8 numbers: lanes with
// g = 0 take them.
template <int PANELS, int AHEAD>
__device__ inline void add_steps(float (&sums)[PANELS][2], const Step (&words)[PANELS][AHEAD], const uint4* row,
                                 int steps) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    const uint4 x = i < steps && lane < 4 ? row[4 * i + lane] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int p = 0; p < PANELS; ++p) add_step(sums[p], words[p][i], x);
  }
}

// COUNT units of 8 numbers of a row, zeros past those given, by THREADS of which this is number `thread`.
template <int COUNT, int THREADS>
__device__ inline void copy_row(uint4* to, const uint4* from, int given, int thread) {
  uint4 units[(COUNT + THREADS - 1) / THREADS];
#pragma unroll
  for (int i = 0; i * THREADS < COUNT; ++i) {
    const int unit = i * THREADS + thread;
    units[i] = unit < given ? from[unit] : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i * THREADS < COUNT; ++i)
    if (i * THREADS + thread < COUNT) to[i * THREADS + thread] = units[i];
}

// The 16 sums of every panel over all warps of the block, in their order, in `parts[0]` of the first threads.
template <int PANELS>
__device__ inline void add_warps(float (*parts)[PANELS * 16], const float (&sums)[PANELS][2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (lane % 4 == 0)
    for (int p = 0; p < PANELS; ++p)
      for (int row = 0; row < 2; ++row) parts[warp][16 * p + lane / 4 * 2 + row] = sums[p][row];
  __syncthreads();
  if (threadIdx.x < PANELS * 16)
    for (int w = 1; w < warps; ++w) parts[0][threadIdx.x] += parts[w][threadIdx.x];
  __syncwarp();
}

// From L2: written by a kernel that has ended, perhaps while this block's SM was already at work.
__device__ inline int read(const int* p) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Grid (token-expert pairs, pairs of panels), warps share K: the activation, bf16 [pairs, width]. In shared memory: a
// row. biases: float [experts, 2 columns], or null; without a gate (KIND 6) width is 2 columns.
extern "C" __global__ void __launch_bounds__(128, 3)
    gate_up(const uint4* x, const u8* pool, const int* slots, const int* ids, const float* biases, u16* hidden,
            int top_k, u64 stride, u64 panel_bytes, u64 scale_at, int depth, int steps, int group_shift, int columns) {
  extern __shared__ uint4 row[];
  __shared__ float parts[4][32];
  // In this order: when blocks of `down` start, the slots have been written, and they read them before this ends.
  wait_for_previous();
  start_next();
  const Matrix m = {panel_bytes, scale_at, depth, steps, group_shift, columns};
  const int pair = blockIdx.x, panel = blockIdx.y, slot = read(slots + pair);
  if (slot < 0) return;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, units = depth / 8;
  const int first = steps * warp / warps, last = steps * (warp + 1) / warps;
  const u8* at = pool + slot * stride + 2 * panel * panel_bytes;
  Step words[2][kGateUpAhead];
  load_steps(words, at, m, first, last);
  for (int i = 0; i < 4 * steps; i += 256)
    copy_row<256, 128>(row + i, x + u64(pair / top_k) * units + i, units - i, threadIdx.x);
  __syncthreads();
  float sums[2][2] = {};
  for (int begin = first; begin < last; begin += kGateUpAhead) {
    if (begin > first) load_steps(words, at, m, begin, last);
    add_steps(sums, words, row + 4 * begin, last - begin);
  }
  for (int p = 0; p < 2; ++p) scale_rows(sums[p], at + p * panel_bytes, m);
  add_warps<2>(parts, sums);
  const int r = threadIdx.x, column = 16 * panel + r;
  if (r >= 16 || column >= columns) return;
  float gate = parts[0][r], up = parts[0][16 + r];
  if (biases) {
    const float* bias = biases + u64(read(ids + pair)) * 2 * columns + column;
    gate += bias[0];
    up += bias[columns];
  }
  if (KIND == 6) {
    hidden[u64(pair) * 2 * columns + column] = rounded(relu2(gate));
    hidden[(u64(pair) * 2 + 1) * columns + column] = rounded(relu2(up));
  } else {
    hidden[u64(pair) * columns + column] = rounded(activated(gate, up));
  }
}

// Grid (tokens, panels): the weighted sum of a token's experts, float32 or bf16 [tokens, columns]. `each` warps share
// the K of one expert. The first words are read while `gate_up` still runs. biases: float [experts, columns], or null.
extern "C" __global__ void __launch_bounds__(512)
    down(const uint4* hidden, const u8* pool, const int* slots, const int* ids, const float* biases,
         const float* weights, void* out, int out_bf16, int top_k, int each, u64 stride, u64 panel_bytes, u64 scale_at,
         int depth, int steps, int group_shift, int columns) {
  __shared__ float parts[16][16];
  __shared__ uint4 rows[16][4 * kDownAhead];
  start_next();
  const Matrix m = {panel_bytes, scale_at, depth, steps, group_shift, columns};
  const int token = blockIdx.x, panel = blockIdx.y, units = top_k * each;
  int unit = threadIdx.x / 32;
  Step words[1][kDownAhead];
  float sums[1][2] = {};
  for (bool waited = false;; unit += blockDim.x / 32) {
    const int pair = token * top_k + unit / each, part = unit % each;
    const int slot = unit < units ? read(slots + pair) : -1;
    const u8* at = pool + slot * stride + panel * panel_bytes;
    const int first = steps * part / each, last = slot < 0 ? first : steps * (part + 1) / each;
    load_steps(words, at, m, first, last);
    if (!waited) wait_for_previous();
    waited = true;
    float sum[1][2] = {};
    for (int begin = first; begin < last; begin += kDownAhead) {
      if (begin > first) load_steps(words, at, m, begin, last);
      const uint4* from = hidden + u64(pair) * (depth / 8) + 4 * begin;
      __syncwarp();
      copy_row<4 * kDownAhead, 32>(rows[threadIdx.x / 32], from, depth / 8 - 4 * begin, threadIdx.x % 32);
      __syncwarp();
      add_steps(sum, words, rows[threadIdx.x / 32], last - begin);
    }
    if (slot >= 0) {
      scale_rows(sum[0], at, m);
      if (biases && part == 0) {
        const int column = 16 * panel + threadIdx.x % 32 / 4 * 2;
        const float* bias = biases + u64(read(ids + pair)) * columns;
        for (int r = 0; r < 2; ++r)
          if (column + r < columns) sum[0][r] += bias[column + r];
      }
      for (int r = 0; r < 2; ++r) sums[0][r] += sum[0][r] * weights[pair];
    }
    if (unit + blockDim.x / 32 >= units) break;
  }
  add_warps<1>(parts, sums);
  const int r = threadIdx.x, column = 16 * panel + r;
  if (r >= 16 || column >= columns) return;
  const u64 at = u64(token) * columns + column;
  if (out_bf16)
    static_cast<u16*>(out)[at] = rounded(parts[0][r]);
  else
    static_cast<float*>(out)[at] = parts[0][r];
}
