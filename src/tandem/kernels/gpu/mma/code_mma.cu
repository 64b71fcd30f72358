// Sizes in bytes, steps of 32 k, 2^group_shift steps per scale.
struct Matrix {
  const u8* panels;
  u64 panel_bytes, scale_at;
  int count, depth, steps, group_shift, columns;
};

// 8 numbers of a row of x: zeros for rows and numbers that are not there.
__device__ inline uint4 numbers_of(const u16* x, const Matrix& m, int rows, int row, int k) {
  if (row >= rows || k >= m.depth) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(x + u64(row) * m.depth + k);
}

// sums += 32 k of a panel times TILES x 8 rows: of rows 2 g (0, 1) and 2 g + 1 (2, 3), x's 8 tile + 2 t and + 1.
__device__ inline void add_step(float (&sums)[TILES][4], const Step& s, const uint4 (&x)[TILES]) {
  u32 a[4], b[4];
  decode(s, a, b);
  const float upper = GROUPED ? scale_of(s, 0) : 1.0f, lower = GROUPED ? scale_of(s, 1) : 1.0f;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    float c[4] = {0, 0, 0, 0};
    mma(c, a[0], b[0], a[1], b[1], x[tile].x, x[tile].y);
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

// AHEAD steps of PANELS panels from `begin` on, in flight together; zeros from `last` on.
__device__ inline void load_steps(Step (&steps)[PANELS][AHEAD], const Matrix& m, int begin, int last) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
#pragma unroll
    for (int p = 0; p < PANELS; ++p) {
      const u8* at = m.panels + panel_of(m, p) * m.panel_bytes;
      steps[p][i] = begin + i < last ? step_of(at, m.scale_at, m.group_shift, begin + i, g, t) : Step{};
    }
}

// Adds these steps, which begin at `begin`.
__device__ inline void add_loaded(float (&sums)[PANELS][TILES][4], const Step (&steps)[PANELS][AHEAD], const Matrix& m,
                                  const u16* x, int rows, int begin, int last) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint4 numbers[AHEAD][TILES];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
      numbers[i][tile] = numbers_of(x, m, begin + i < last ? rows : 0, 8 * tile + g, 32 * (begin + i) + 8 * t);
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
#pragma unroll
    for (int p = 0; p < PANELS; ++p) add_step(sums[p], steps[p][i], numbers[i]);
}

// Steps [first, last) of K, some in flight while others are added. The first are read before x is there.
__device__ inline void add_steps(float (&sums)[PANELS][TILES][4], const Matrix& m, const u16* x, int rows, int first,
                                 int last) {
  Step even[PANELS][AHEAD], odd[PANELS][AHEAD];
  load_steps(even, m, first, last);
  load_steps(odd, m, first + AHEAD, last);
  wait_for_previous();
  for (int begin = first; begin < last; begin += 2 * AHEAD) {
    add_loaded(sums, even, m, x, rows, begin, last);
    load_steps(even, m, begin + 2 * AHEAD, last);
    if (begin + AHEAD < last) add_loaded(sums, odd, m, x, rows, begin + AHEAD, last);
    load_steps(odd, m, begin + 3 * AHEAD, last);
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
// panels are PAIRED, out is bf16 [rows, columns / 2]: the activation.
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
}
