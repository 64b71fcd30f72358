// Sizes in bytes, steps of 32 k, 2^group_shift steps per scale.
struct Matrix {
  const u8* panels;
  u64 panel_bytes, scale_at;
  int count, depth, steps, group_shift, columns;
};

// Where a lane reads. Without the asm the compiler works all of it out again for every step, in a third of all
// instructions, for registers are few.
struct Lane {
  const u8 *codes[PANELS], *scales[PANELS];
};
template <class T>
__device__ inline T* kept(T* pointer) {
  asm volatile("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// 8 numbers of a row of x: zeros for rows and numbers that are not there.
__device__ inline uint4 numbers_of(const u16* x, bool there) {
  if (!there) return make_uint4(0, 0, 0, 0);
  const uint4* at = reinterpret_cast<const uint4*>(x);
  return READY ? __ldcg(at) : *at;
}

// sums += 32 k of a panel times TILES x 8 rows: of rows 2 g (0, 1) and 2 g + 1 (2, 3), x's 8 tile + 2 t and + 1.
__device__ inline void add_step(float (&sums)[TILES][4], const Step& s, const uint4 (&x)[TILES]) {
  u32 a[4], b[4];
  decode(s, a, b);
  const float upper = GROUPED ? scale_of(s, 0) : 1.0f, lower = GROUPED ? scale_of(s, 1) : 1.0f;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    float c[4];
    mma_alone(c, a[0], b[0], a[1], b[1], x[tile].x, x[tile].y);
    mma(c, a[2], b[2], a[3], b[3], x[tile].z, x[tile].w);
    sums[tile][0] += c[0] * upper;
    sums[tile][1] += c[1] * upper;
    sums[tile][2] += c[2] * lower;
    sums[tile][3] += c[3] * lower;
  }
}

// Number of the block's panel p.
__device__ inline int panel_of(const Matrix& m, int p) {
  return PAIRED ? blockIdx.x + p * (m.count / 2) : min(int(blockIdx.x) * PANELS + p, m.count - 1);
}

__device__ inline Lane lane_of(const Matrix& m) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Lane made;
#pragma unroll
  for (int p = 0; p < PANELS; ++p) {
    const u8* panel = m.panels + panel_of(m, p) * m.panel_bytes;
    made.codes[p] = kept(panel + LANE_BYTES * t + ROW_BYTES * g);
    made.scales[p] = GROUPED ? kept(panel + m.scale_at + PAIR_BYTES * g) : nullptr;
  }
  return made;
}

// AHEAD steps of PANELS panels from `begin` on, in flight together; zeros from `last` on.
__device__ inline void load_steps(Step (&steps)[PANELS][AHEAD], const Lane& lane, int group_shift, int begin,
                                  int last) {
#pragma unroll
  for (int p = 0; p < PANELS; ++p) {
    const u8* codes = lane.codes[p] + begin * STEP_BYTES;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const u8* scales = lane.scales[p] + ((begin + i) >> group_shift) * GROUP_BYTES;
      steps[p][i] = begin + i < last ? step_at(codes + i * STEP_BYTES, scales) : Step{};
    }
  }
}

// Adds these steps, which begin at `begin`. x: from where this lane reads; from `last` on, numbers are zeros.
__device__ inline void add_loaded(float (&sums)[PANELS][TILES][4], const Step (&steps)[PANELS][AHEAD],
                                  const u16* const (&x)[TILES], const int (&last)[TILES], int begin) {
  uint4 numbers[AHEAD][TILES];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
      numbers[i][tile] = numbers_of(x[tile] + 32 * (begin + i), begin + i < last[tile]);
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
#pragma unroll
    for (int p = 0; p < PANELS; ++p) add_step(sums[p], steps[p][i], numbers[i]);
}

// Steps [first, last) of K, some in flight while others are added. The first are read before x is there, unless it is
// READY.
__device__ inline void add_steps(float (&sums)[PANELS][TILES][4], const Matrix& m, const u16* x, int rows, int first,
                                 int last) {
  Step even[PANELS][AHEAD], odd[PANELS][AHEAD];
  const Lane lane = lane_of(m);
  load_steps(even, lane, m.group_shift, first, last);
  load_steps(odd, lane, m.group_shift, first + AHEAD, last);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const u16* from[TILES];
  int ends[TILES];  // a lane's numbers begin at 8 t of a step
  if (!READY) wait_for_previous();
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const int row = 8 * tile + g;
    from[tile] = kept(x + u64(row) * m.depth + 8 * t);
    ends[tile] = row < rows ? min(last, (m.depth - 8 * t + 31) / 32) : 0;
  }
  for (int begin = first; begin < last; begin += 2 * AHEAD) {
    add_loaded(sums, even, from, ends, begin);
    load_steps(even, lane, m.group_shift, begin + 2 * AHEAD, last);
    if (begin + AHEAD < last) add_loaded(sums, odd, from, ends, begin + AHEAD);
    load_steps(odd, lane, m.group_shift, begin + 3 * AHEAD, last);
  }
}

__device__ inline float row_scale(const Matrix& m, int column) {
  Step s = {};
  const int row = column % 16;
  read_scales(s, m.panels + column / 16 * m.panel_bytes + m.scale_at, row / 2);
  return scale_of(s, row % 2);
}

__device__ inline void store(void* out, u64 to, int out_bf16, float value) {
  if (out_bf16)
    static_cast<u16*>(out)[to] = rounded(value);
  else
    static_cast<float*>(out)[to] = value;
}

// Column `within` of the block's panels, over all warps in their order.
__device__ inline float whole(const float (&parts)[WARPS][TILES * 8][PANELS * 16], const Matrix& m, int row,
                              int within) {
  float sum = parts[0][row][within];
  for (int w = 1; w < WARPS; ++w) sum += parts[w][row][within];
  return GROUPED ? sum : sum * row_scale(m, 16 * panel_of(m, within / 16) + within % 16);
}

// Blocks of PANELS panels; x bf16 [rows, depth], out float32 or bf16, whose rows are out_stride numbers apart. Where
// panels are PAIRED, out is bf16 [rows, columns / 2]: the activation. Where x is READY, the kernel before still runs:
// whoever waits for this one waits for both.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    multiply(const u16* x, const u8* panels, const float* bias, void* out, int out_bf16, int rows, int out_stride,
             u64 panel_bytes, u64 scale_at, int count, int depth, int steps, int group_shift, int columns) {
  const Matrix m = {panels, panel_bytes, scale_at, count, depth, steps, group_shift, columns};
  __shared__ float parts[WARPS][TILES * 8][PANELS * 16];
  start_next();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  float sums[PANELS][TILES][4] = {};
  add_steps(sums, m, x, rows, m.steps * warp / WARPS, m.steps * (warp + 1) / WARPS);
  for (int p = 0; p < PANELS; ++p)
    for (int tile = 0; tile < TILES; ++tile)
      for (int i = 0; i < 4; ++i) parts[warp][8 * tile + 2 * t + i % 2][16 * p + 2 * g + i / 2] = sums[p][tile][i];
  __syncthreads();
#if PAIRED
  for (int i = threadIdx.x; i < 16 * rows; i += 32 * WARPS) {
    const int row = i / 16, within = i % 16;
    const float value = activated(whole(parts, m, row, within), whole(parts, m, row, 16 + within));
    static_cast<u16*>(out)[u64(row) * out_stride + blockIdx.x * 16 + within] = rounded(value);
  }
#else
  for (int i = threadIdx.x; i < PANELS * 16 * rows; i += 32 * WARPS) {
    const int row = i / (PANELS * 16), within = i % (PANELS * 16);
    const int column = blockIdx.x * PANELS * 16 + within;
    if (column >= m.columns) continue;
    const float sum = whole(parts, m, row, within);
    store(out, u64(row) * out_stride + column, out_bf16, bias ? sum + bias[column] : sum);
  }
#endif
  if (READY) wait_for_previous();
}
