enum {
  kUnits = 4 * STEPS,    // of 16 bytes: a row's numbers of one chunk
  kStride = kUnits + 4,  // so that a quarter of a warp, which reads 64 bytes of two rows, meets each bank once
};

// A chunk of the tile's rows, zeros past its rows and past their depth.
template <int EIGHTS>
__device__ inline void fetch_rows(uint4* to, const uint4* x, const Tile& tile, int depth, int chunk) {
  const int units = depth / 8;
#pragma unroll
  for (int i = 0; i < 8 * EIGHTS * kUnits; i += 32 * WARPS) {
    const int index = i + threadIdx.x, row = index / kUnits, unit = index % kUnits, at = chunk * kUnits + unit;
    if (8 * EIGHTS * kUnits % (32 * WARPS) && index >= 8 * EIGHTS * kUnits) break;
    const bool inside = row < tile.rows && at < units;
    const uint4* from = x + u64(tile.first + (inside ? row : 0)) * units + (inside ? at : 0);
    copy_async(to + row * kStride + unit, from, inside ? 16 : 0);
  }
}

// A chunk of both panels, zeros past the last step.
__device__ inline void load_steps(Step (&words)[2][STEPS], const u8* panel, const Matrix& m, int chunk, int panels) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
#pragma unroll
    for (int p = 0; p < 2; ++p)
      words[p][i] = p < panels && chunk * STEPS + i < m.steps
                        ? step_of(panel + p * m.panel_bytes, m.scale_at, m.group_shift, chunk * STEPS + i, g, t)
                        : Step{};
}

// A chunk's products. Those that are scaled together are summed on their own, a whole number of times in a chunk.
template <int EIGHTS>
__device__ inline void add_chunk(float (&sums)[2][EIGHTS][4], const Step (&words)[2][STEPS], const uint4* rows) {
  const uint4* mine = rows + threadIdx.x % 32 / 4 * kStride + threadIdx.x % 4;
  float part[2][EIGHTS][4];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    u32 a[2][4], b[2][4];
#pragma unroll
    for (int p = 0; p < 2; ++p) decode(words[p][i], a[p], b[p]);
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
      const uint4 x = mine[8 * n * kStride + 4 * i];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        float (&to)[4] = GROUPED ? part[p][n] : sums[p][n];
        if (GROUPED && i % SCALE_STEPS == 0)
          mma_alone(to, a[p][0], b[p][0], a[p][1], b[p][1], x.x, x.y);
        else
          mma(to, a[p][0], b[p][0], a[p][1], b[p][1], x.x, x.y);
        mma(to, a[p][2], b[p][2], a[p][3], b[p][3], x.z, x.w);
        if (GROUPED && (i + 1) % SCALE_STEPS == 0)
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[p][n][j] += to[j] * scale_of(words[p][i], j / 2);
      }
    }
  }
}

// Two panels (or one) times the tile: sums[p][n] has rows 8 n + 2 t and 8 n + 2 t + 1 of x times column 2 g, then 2 g
// + 1.
template <int EIGHTS>
__device__ inline void multiply(float (&sums)[2][EIGHTS][4], uint4 (*rows)[ROWS * kStride], const uint4* x,
                                const Tile& tile, const u8* panel, const Matrix& m, int panels) {
  const int chunks = (m.steps + STEPS - 1) / STEPS;
  Step next[2][STEPS];
  load_steps(next, panel, m, 0, panels);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < chunks) fetch_rows<EIGHTS>(rows[i], x, tile, m.depth, i);
    end_copies();
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    const int ahead = chunk + STAGES - 1;
    if (ahead < chunks) fetch_rows<EIGHTS>(rows[ahead % STAGES], x, tile, m.depth, ahead);
    end_copies();
    Step words[2][STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int p = 0; p < 2; ++p) words[p][i] = next[p][i];
    load_steps(next, panel, m, chunk + 1, panels);
    add_chunk<EIGHTS>(sums, words, rows[chunk % STAGES]);
  }
  if (!GROUPED) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (p >= panels) break;
      Step s = {};
      read_scales(s, panel + p * m.panel_bytes + m.scale_at, threadIdx.x % 32 / 4);
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[p][n][i] *= scale_of(s, i / 2);
    }
  }
}

// Gate and up end in the activation where ENDS says so; else both panels' sums are written. bias: the expert's, of gate
// and then of up, or null; without a gate (KIND 6) both are halves of up.
template <int EIGHTS>
__device__ inline void run(uint4 (*rows)[ROWS * kStride], const uint4* x, const Tile& tile, const u8* pool,
                           const Matrix& m, const float* bias, u16* out) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int pair = blockIdx.x * WARPS + threadIdx.x / 32, panels = max(0, min(2, m.panels - 2 * pair));
  float sums[2][EIGHTS][4] = {};
  multiply<EIGHTS>(sums, rows, x, tile, pool + u64(2 * pair) * m.panel_bytes, m, panels);
#pragma unroll
  for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 8 * n + 2 * t + i;
      if (row >= tile.rows) continue;
      u16* to = out + u64(tile.first + row) * m.columns * (KIND == 6 ? 2 : 1);
#if ENDS
      const int column = 16 * pair + 2 * g;
      if (panels && column < m.columns) {
        float gate[2], up[2];
        for (int c = 0; c < 2; ++c) {
          gate[c] = sums[0][n][2 * c + i] + (bias ? bias[column + c] : 0.0f);
          up[c] = sums[1][n][2 * c + i] + (bias ? bias[m.columns + column + c] : 0.0f);
        }
        if (KIND == 6) {
          *reinterpret_cast<u32*>(to + column) = pair_of(relu2(gate[0]), relu2(gate[1]));
          *reinterpret_cast<u32*>(to + m.columns + column) = pair_of(relu2(up[0]), relu2(up[1]));
        } else {
          *reinterpret_cast<u32*>(to + column) = pair_of(activated(gate[0], up[0]), activated(gate[1], up[1]));
        }
      }
#else
      for (int p = 0; p < 2; ++p) {
        const int column = 32 * pair + 16 * p + 2 * g;
        if (p < panels && column < m.columns)
          *reinterpret_cast<u32*>(to + column) = pair_of(sums[p][n][i], sums[p][n][2 + i]);
      }
#endif
    }
}

// Grid (groups of WARPS pairs of panels, tiles): rows of x, bf16 [R, depth], times the matrix of their expert, bf16
// [R, columns]. ends [experts]: rows behind each expert's last. columns even, depth a multiple of 8. biases: those of
// the expert with number whose[r] begin at 2 columns times that; null: none.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    multiply_codes(const uint4* x, const u8* pool, const int* ends, const int* whose, const float* biases, u16* out,
                   int experts, u64 stride, u64 panel_bytes, u64 scale_at, int depth, int steps, int group_shift,
                   int columns, int panels) {
  __shared__ uint4 rows[STAGES][ROWS * kStride];
  const Tile tile = find_tile(ends, experts, blockIdx.y);
  if (tile.rows == 0) return;
  const Matrix m = {panel_bytes, scale_at, depth, steps, group_shift, columns, panels};
  const u8* own = pool + tile.expert * stride;
  const float* bias = biases ? biases + u64(whose[tile.first]) * 2 * columns : nullptr;
  // clang-format off
  switch ((tile.rows + 7) / 8) {
#define OF(EIGHTS) case EIGHTS: return run<EIGHTS>(rows, x, tile, own, m, bias, out);
    OF(1)
#if ROWS >= 16
    OF(2)
#endif
#if ROWS >= 32
    OF(3) OF(4)
#endif
#if ROWS >= 64
    case 5: OF(6)
    case 7: OF(8)
#endif
  }
  // clang-format on
}
