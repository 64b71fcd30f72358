__device__ inline void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ inline void end_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
template <int LEFT>
__device__ inline void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(LEFT) : "memory");
}
// The compiler must not move what reads or writes these registers across.
template <int N>
__device__ inline void hold(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i]) : : "memory");
}

// Rows of 128 bytes, swizzled, in groups of 8 that lie 1024 bytes apart.
__device__ inline u64 rows_at(u32 address) { return u64(1) << 62 | u64(64) << 32 | u64(1) << 16 | address >> 4; }

// Codes and scales of this warp's panel in a stage, for this lane.
struct Staged {
  u32 codes, scales;  // addresses, of the first stage
};

__device__ inline Staged staged_of(u32 memory) {
  const int slot = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Staged at = {memory + kRowBytes + kCodeBytes * slot + LANE_BYTES * t + ROW_BYTES * g,
               memory + kRowBytes + kPanels * kCodeBytes + kScaleBytes * slot + PAIR_BYTES * g};
  asm volatile("" : "+r"(at.codes), "+r"(at.scales));
  return at;
}

__device__ inline const u8* shared_pointer(u32 address) {
  return static_cast<const u8*>(__cvta_shared_to_generic(address));
}

// Half a chunk.
__device__ inline Step staged_step(const Staged& at, u32 stage, int half) {
  return step_at(shared_pointer(at.codes + stage * kStageBytes + STEP_BYTES * half),
                 shared_pointer(at.scales + stage * kStageBytes + (kScaleSets == 2 ? GROUP_BYTES * half : 0)));
}

// One step's operands, and what their products are scaled by.
struct Operands {
  u32 upper[4], lower[4];
  Step step;
};

__device__ inline Operands decoded(const Step& step) {
  Operands made;
  made.step = step;
  decode(step, made.upper, made.lower);
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(made.upper[i]), "+r"(made.lower[i]));  // not after the next wait
  return made;
}

// to = or += 32 k of this warp's panel times N rows.
template <int N>
__device__ inline void multiply_step(float (&to)[N / 2], const Operands& a, u64 rows, int adds) {
  hold(to);
  begin_wgmma();
  wgmma(to, a.upper[0], a.lower[0], a.upper[1], a.lower[1], rows, adds);
  wgmma(to, a.upper[2], a.lower[2], a.upper[3], a.lower[3], rows + 2, 1);
  end_wgmma();
  hold(to);
}

template <int COUNT>
__device__ inline void add_scaled(float* sums, float (&part)[COUNT], const Step& step) {
  hold(part);
  const float scales[2] = {scale_of(step, 0), scale_of(step, 1)};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    sums[i] += part[i] * scales[i % 4 / 2];
    asm volatile("" : "+f"(sums[i]));  // not after the next wait
  }
}

__device__ inline void release(const Ring& ring) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(ring.empty());
}

// An item's products: sums of columns 2 g (0, 1) and 2 g + 1 (2, 3) of rows 8 n + 2 t and + 1, in fours. While a step
// is multiplied, the next one's codes become operands.
#if GROUPED && SCALE_STEPS == 1
// Every step is scaled. So one half of its rows is while tensor cores have the other half, or the next step's.
template <int N>
__device__ inline void multiply(float (&sums)[N / 2], Ring& ring, const Staged& staged) {
  enum { kHalf = N / 4, kHalfRows = N / 2 * 128 / 16 };  // sums; as far apart in a description of rows
  float first[kHalf], second[kHalf];
  ring.wait_full();
  Operands even = decoded(staged_step(staged, ring.stage, 0));
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const u64 rows = rows_at(ring.bytes());
    multiply_step<N / 2>(first, even, rows, 0);
    multiply_step<N / 2>(second, even, rows + kHalfRows, 0);
    const Operands odd = decoded(staged_step(staged, ring.stage, 1));
    wait_wgmma<1>();
    add_scaled<kHalf>(sums, first, even.step);
    multiply_step<N / 2>(first, odd, rows + 4, 0);
    wait_wgmma<1>();
    add_scaled<kHalf>(sums + kHalf, second, even.step);
    multiply_step<N / 2>(second, odd, rows + 4 + kHalfRows, 0);
    const Ring ahead = ring.next();
    Step next = {};
    if (chunk + 1 < kChunks) {
      ahead.wait_full();
      next = staged_step(staged, ahead.stage, 0);
    }
    even = decoded(next);
    wait_wgmma<1>();
    add_scaled<kHalf>(sums, first, odd.step);
    wait_wgmma<0>();
    release(ring);
    add_scaled<kHalf>(sums + kHalf, second, odd.step);
    ring = ahead;
  }
}
#else
template <int N>
__device__ inline void multiply(float (&sums)[N / 2], Ring& ring, const Staged& staged) {
  float part[N / 2];
  float (&to)[N / 2] = GROUPED ? part : sums;
  ring.wait_full();
  Operands now = decoded(staged_step(staged, ring.stage, 0));
  for (int chunk = 0; chunk < kChunks; chunk += kSetChunks) {
#pragma unroll
    for (int i = 0; i < 2 * kSetChunks; ++i) {
      const bool is_last = GROUPED && (i + 1) % SCALE_STEPS == 0;
      multiply_step<N>(to, now, rows_at(ring.bytes() + 64 * (i % 2)), GROUPED && i % SCALE_STEPS == 0 ? 0 : 1);
      const Ring ahead = i % 2 ? ring.next() : ring;
      Step next = {};
      if (i % 2 == 0) {
        next = staged_step(staged, ring.stage, 1);
      } else if (i + 1 < 2 * kSetChunks || chunk + kSetChunks < kChunks) {
        ahead.wait_full();
        next = staged_step(staged, ahead.stage, 0);
      }
      const Operands following = decoded(next);
      if (i % 2 || is_last || FORMAT == 4) {  // 4: operands are loaded, which wgmma would wait for
        wait_wgmma<0>();
        hold(to);
      }
      if (i % 2) release(ring);
      ring = ahead;
      if (is_last) add_scaled<N / 2>(sums, part, now.step);
      now = following;
    }
  }
}
#endif

#if ENDS
// Where column `c` of a row is written: in the order in which the next product takes 32 k.
__device__ inline int place_of(int c) { return c / 32 * 32 + c / 2 % 4 * 8 + c / 8 % 4 * 2; }

// The first or second half of an item's rows, whose gates and ups this thread has.
template <int N, int HALF>
__device__ inline void end_rows(const float (&gates)[N / 2], const float (&ups)[N / 2], const Item& item,
                                const Matrix& m, const float* bias, u16* out) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
  const int column = 16 * (4 * item.group + warp) + 2 * g;
  if (column >= m.columns) return;
  float added[2][2] = {};
  for (int c = 0; c < 2 && bias; ++c) added[0][c] = bias[column + c], added[1][c] = bias[m.columns + column + c];
#pragma unroll
  for (int n = HALF * N / 16; n < (HALF + 1) * N / 16; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 8 * n + 2 * t + i;
      if (row >= item.tile.rows) continue;
      u16* to = out + u64(item.tile.first + row) * m.columns * (KIND == 6 ? 2 : 1);
      float gate[2], up[2];
      for (int c = 0; c < 2; ++c) {
        gate[c] = gates[4 * n + 2 * c + i] + added[0][c];
        up[c] = ups[4 * n + 2 * c + i] + added[1][c];
      }
      if (KIND == 6) {
        *reinterpret_cast<u32*>(to + place_of(column)) = pair_of(relu2(gate[0]), relu2(gate[1]));
        *reinterpret_cast<u32*>(to + place_of(m.columns + column)) = pair_of(relu2(up[0]), relu2(up[1]));
      } else {
        *reinterpret_cast<u32*>(to + place_of(column)) = pair_of(activated(gate[0], up[0]), activated(gate[1], up[1]));
      }
    }
}

__device__ inline void meet_multipliers() { asm volatile("bar.sync 1, 256;" : : : "memory"); }

// Both groups exchange half of their rows and end the activation of the others.
template <int N>
__device__ inline void end_in_activation(const float (&sums)[N / 2], float* exchange, const Item& item, const Matrix& m,
                                         const float* bias, u16* out) {
  const int thread = threadIdx.x % kThreads;
  const bool has_gates = threadIdx.x < kThreads;
  float* sent = exchange + (has_gates ? 0 : N / 4 * kThreads);
  const float* received = exchange + (has_gates ? N / 4 * kThreads : 0);
#pragma unroll
  for (int i = 0; i < N / 4; ++i) sent[i * kThreads + thread] = has_gates ? sums[N / 4 + i] : sums[i];
  meet_multipliers();
  float other[N / 2];
  if (has_gates) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) other[i] = received[i * kThreads + thread];
    end_rows<N, 0>(sums, other, item, m, bias, out);
  } else {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) other[N / 4 + i] = received[i * kThreads + thread];
    end_rows<N, 1>(other, sums, item, m, bias, out);
  }
  meet_multipliers();
}
#else
template <int N>
__device__ inline void store(const float (&sums)[N / 2], const Item& item, const Matrix& m, u16* out) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int column = 16 * panel_of(item.group, threadIdx.x / 32) + 2 * g;
  if (column >= m.columns) return;
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 8 * n + 2 * t + i;
      if (row < item.tile.rows)
        *reinterpret_cast<u32*>(out + u64(item.tile.first + row) * m.columns + column) =
            pair_of(sums[4 * n + i], sums[4 * n + 2 + i]);
    }
}
#endif

template <int N>
__device__ inline void take(const Source& s, Ring& ring, const Staged& staged, const Item& item, float* exchange,
                            const float* bias, u16* out) {
  float sums[N / 2] = {};
  multiply<N>(sums, ring, staged);
  const int panel = panel_of(item.group, threadIdx.x / 32);
  if (!GROUPED && panel < s.m.panels) {
    Step last = {};
    read_scales(last, s.pool + item.tile.expert * s.stride + u64(panel) * PANEL_BYTES + s.m.scale_at,
                threadIdx.x % 32 / 4);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] *= scale_of(last, i % 4 / 2);
  }
#if ENDS
  end_in_activation<N>(sums, exchange, item, s.m, bias, out);
#else
  store<N>(sums, item, s.m, out);
#endif
}

// Rows of x, bf16 [R, DEPTH], whose every 32 k lie in the order of wgmma, times the matrix of their expert, bf16 [R,
// columns]. ROWS rows behind the last may be read. Everything else is as multiply_codes has it. In shared memory:
// STAGES stages and the exchange.
extern "C" __global__ void __launch_bounds__(3 * kThreads, 1)
    multiply_by_warpgroups(const u8* x, const u8* pool, const int* ends, const int* whose, const float* biases,
                           u16* out, int experts, u64 stride, u64 scale_at, int columns, int panels) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ u64 barriers[2 * STAGES];
  Ring ring = {shared_address(barriers), shared_address(memory), 0, 0};
  if (ring.memory % 1024) __trap();  // swizzles count from there
  const Source s = {x,
                    pool,
                    ends,
                    experts,
                    (panels + kPanels - 1) / kPanels,
                    stride,
                    {PANEL_BYTES, scale_at, DEPTH, DEPTH / 32, 0, columns, panels}};
  if (threadIdx.x < STAGES) {
    make_barrier(ring.barriers + 8 * threadIdx.x, kThreads);
    make_barrier(ring.barriers + 8 * (STAGES + threadIdx.x), 8);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  __syncthreads();
  if (threadIdx.x >= 2 * kThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    bring(s, ring);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  float* exchange = reinterpret_cast<float*>(memory + STAGES * kStageBytes);
  const Staged staged = staged_of(ring.memory);
  for (int number = blockIdx.x;; number += gridDim.x) {
    const Item item = find_item(s, number);
    if (item.tile.rows == 0) return;
    const float* bias = biases ? biases + u64(whose[item.tile.first]) * 2 * columns : nullptr;
    // clang-format off
    switch (blocks_of(item.tile.rows)) {
#define OF(BLOCKS) case BLOCKS: take<16 * BLOCKS>(s, ring, staged, item, exchange, bias, out); break;
      OF(2) OF(3) OF(4) OF(6) OF(8)
#if ROWS > 128
      OF(ROWS / 16)
#endif
    }
    // clang-format on
  }
}
