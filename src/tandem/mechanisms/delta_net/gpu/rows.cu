// One token of each sequence for heads of 128 x 128 numbers, as step.py's: a block of eight warps has one value head.
//
// A warp has 16 of the columns of the memory: a thread four of them, and every eighth row. So sums over rows stay
// within a warp. All warps convolve the head's q and k; only gates and the norm need sums over warps.
enum { DIM = 128, WARPS = 8, ROWS = 16, LANE_GROUPS = 8, CHUNKS = (HIDDEN + 2047) / 2048 };

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float silu(float x) { return x * sigmoid(x); }
__device__ inline float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// Four neighbours.
__device__ inline float4 four(uint2 bits) {
  return make_float4(low_half(bits.x), high_half(bits.x), low_half(bits.y), high_half(bits.y));
}
__device__ inline uint2 packed(float4 v) { return make_uint2(rounded_pair(v.x, v.y), rounded_pair(v.z, v.w)); }
__device__ inline uint2 read(const u16* at) { return *reinterpret_cast<const uint2*>(at); }
__device__ inline float4 read(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ inline void add(float4& to, float4 a, float4 b) {
  to.x = fmaf(a.x, b.x, to.x);
  to.y = fmaf(a.y, b.y, to.y);
  to.z = fmaf(a.z, b.z, to.z);
  to.w = fmaf(a.w, b.w, to.w);
}
__device__ inline float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w); }
template <int FROM, int TO>
__device__ inline float over_lanes(float v) {
#pragma unroll
  for (int lane = FROM; lane < TO; lane *= 2) v += __shfl_xor_sync(~0u, v, lane);
  return v;
}

// Of four channels: what the inputs before add to the convolution, and the new one's weights.
struct Past {
  float4 sums, weights;
};
__device__ inline Past past(const u16* ring, const float* conv, int channel, int known) {
  Past p = {make_float4(0, 0, 0, 0), read(conv + (CONV - 1) * CHANNELS + channel)};
#pragma unroll
  for (int back = CONV - 1; back > 0; --back)
    if (back <= known)
      add(p.sums, four(read(ring + (known + PLACES - back) % PLACES * CHANNELS + channel)),
          read(conv + (CONV - 1 - back) * CHANNELS + channel));
  return p;
}
__device__ inline float activated(float sum) { return as_bf16(silu(as_bf16(sum))); }
__device__ inline float4 activated(Past p, uint2 bits) {
  add(p.sums, four(bits), p.weights);
  return make_float4(activated(p.sums.x), activated(p.sums.y), activated(p.sums.z), activated(p.sums.w));
}

__device__ inline float product(uint4 a, uint4 b) {
  const float lower = dot(four(make_uint2(a.x, a.y)), four(make_uint2(b.x, b.y)));
  return lower + dot(four(make_uint2(a.z, a.w)), four(make_uint2(b.z, b.w)));
}
__device__ inline uint4 eight(const u16* row, int chunk) {
  const int at = 8 * (threadIdx.x + 256 * chunk);
  return at < HIDDEN ? *reinterpret_cast<const uint4*>(row + at) : make_uint4(0, 0, 0, 0);
}

__device__ inline float normed(float y, float scale, float weight, float z) {
  return as_bf16(weight * as_bf16(y * scale)) * (SIGMOID ? sigmoid(z) : silu(z));
}

// gates: of each row, or where HIDDEN is not 0 the matrix that makes them of x.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    step(const u16* projected, const u16* gates, const u16* x, const float* conv, const float* decay,
         const float* dt_bias, const u16* norm, const int* lens, const int* slots, u16* inputs, float* memory, u16* out,
         int rows, u64 inputs_stride, u64 memory_stride, float scale, float unit_eps, float eps) {
  __shared__ float2 both[WARPS][DIM];  // each warp's q and k
  __shared__ float gate_parts[2][WARPS], square_parts[WARPS];
  start_next();
  const int s = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key_head = head / GROUP, own = head % GROUP, first = lane / 4, column = 16 * warp + 4 * (lane % 4);
  const int slot = slots[s], known = lens[s] - 1, following = s + 1 < rows ? slots[s + 1] : 1;
  float* held = memory + slot * memory_stride + (head * DIM + first) * DIM + column;
  float4 state[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    state[r] = known > 0 && slot > 0 ? read(held + r * LANE_GROUPS * DIM) : make_float4(0, 0, 0, 0);
  u16* ring = inputs + slot * inputs_stride;
  const int q_channel = key_head * DIM + 4 * lane, k_channel = (K_HEADS + key_head) * DIM + 4 * lane;
  const int v_channel = (2 * K_HEADS + head) * DIM + column;
  const Past q_past = past(ring, conv, q_channel, known), k_past = past(ring, conv, k_channel, known);
  const Past v_past = past(ring, conv, v_channel, known);
  const float4 weight = four(read(norm + column));
  const float own_decay = decay[head], own_bias = dt_bias[head];
  const int b_at = B_FIRST + key_head * B_STEP + own, a_at = A_FIRST + key_head * A_STEP + own;
#if HIDDEN
  uint4 of_b[CHUNKS], of_a[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    of_b[i] = eight(gates + b_at * HIDDEN, i);
    of_a[i] = eight(gates + a_at * HIDDEN, i);
  }
#endif
  wait_for_previous();
  u16* to = out + (u64(s) * V_HEADS + head) * DIM + column;
  if (slot == 0) {  // a copy; zeros where there is no real row at all
    if (slots[0] == 0 && first == 0) *reinterpret_cast<uint2*>(to) = make_uint2(0, 0);
    return;
  }
  const u16* row = projected + u64(s) * PROJECTED;
  const uint2 new_q = read(row + Q_FIRST + key_head * Q_STEP + 4 * lane);
  const uint2 new_k = read(row + K_FIRST + key_head * K_STEP + 4 * lane);
  const uint2 new_v = read(row + V_FIRST + key_head * V_STEP + own * DIM + column);
  const float4 z = four(read(row + Z_FIRST + key_head * Z_STEP + own * DIM + column));
#if HIDDEN
  float b = 0, a = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const uint4 numbers = eight(x + u64(s) * HIDDEN, i);
    b += product(numbers, of_b[i]);
    a += product(numbers, of_a[i]);
  }
  b = over_lanes<1, 32>(b);
  a = over_lanes<1, 32>(a);
  if (lane == 0) gate_parts[0][warp] = b, gate_parts[1][warp] = a;
#endif
  const float4 q = activated(q_past, new_q), k = activated(k_past, new_k), v = activated(v_past, new_v);
  float2* mine = both[warp];
  mine[4 * lane] = make_float2(q.x, k.x);
  mine[4 * lane + 1] = make_float2(q.y, k.y);
  mine[4 * lane + 2] = make_float2(q.z, k.z);
  mine[4 * lane + 3] = make_float2(q.w, k.w);
  const float q_square = over_lanes<1, 32>(dot(q, q)), k_square = over_lanes<1, 32>(dot(k, k));
  const float q_k = over_lanes<1, 32>(dot(q, k));
  __syncthreads();
#if HIDDEN
  b = a = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) b += gate_parts[0][w], a += gate_parts[1][w];
  b = as_bf16(b);
  a = as_bf16(a);
#else
  const float b = low_half(gates[u64(s) * 2 * V_HEADS + b_at]), a = low_half(gates[u64(s) * 2 * V_HEADS + a_at]);
#endif
  const float beta = sigmoid(b), shrink = expf(own_decay * softplus(a + own_bias));
  float4 of_q = make_float4(0, 0, 0, 0), of_k = of_q;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float2 each = mine[first + r * LANE_GROUPS];
    add(of_q, state[r], make_float4(each.x, each.x, each.x, each.x));
    add(of_k, state[r], make_float4(each.y, each.y, each.y, each.y));
  }
  const float q_unit = rsqrtf(q_square + unit_eps) * scale, k_unit = rsqrtf(k_square + unit_eps);
  const auto learn = [&](float of_k, float v) { return beta * (v - shrink * k_unit * over_lanes<4, 32>(of_k)); };
  const float4 learnt = make_float4(learn(of_k.x, v.x), learn(of_k.y, v.y), learn(of_k.z, v.z), learn(of_k.w, v.w));
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float unit = mine[first + r * LANE_GROUPS].y * k_unit;
    *reinterpret_cast<float4*>(held + r * LANE_GROUPS * DIM) =
        make_float4(fmaf(unit, learnt.x, shrink * state[r].x), fmaf(unit, learnt.y, shrink * state[r].y),
                    fmaf(unit, learnt.z, shrink * state[r].z), fmaf(unit, learnt.w, shrink * state[r].w));
  }
  const auto query_scores = [&](float of_q, float learnt) {
    return as_bf16(q_unit * (shrink * over_lanes<4, 32>(of_q) + k_unit * q_k * learnt));
  };
  const float4 y = make_float4(query_scores(of_q.x, learnt.x), query_scores(of_q.y, learnt.y),
                               query_scores(of_q.z, learnt.z), query_scores(of_q.w, learnt.w));
  const float squares = over_lanes<1, 4>(dot(y, y));
  if (lane == 0) square_parts[warp] = squares;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) total += square_parts[w];
  const float unit = rsqrtf(total / DIM + eps);
  if (first == 0) {
    const uint2 result = packed(make_float4(normed(y.x, unit, weight.x, z.x), normed(y.y, unit, weight.y, z.y),
                                            normed(y.z, unit, weight.z, z.z), normed(y.w, unit, weight.w, z.w)));
    *reinterpret_cast<uint2*>(to) = result;
    for (int copy = s + 1; following == 0 && copy < rows; ++copy)
      *reinterpret_cast<uint2*>(to + u64(copy - s) * V_HEADS * DIM) = result;
  }
  u16* kept = ring + known % PLACES * CHANNELS;
  if (own == 0 && warp == 0) {
    *reinterpret_cast<uint2*>(kept + q_channel) = new_q;
    *reinterpret_cast<uint2*>(kept + k_channel) = new_k;
  }
  if (first == 0) *reinterpret_cast<uint2*>(kept + v_channel) = new_v;
}
