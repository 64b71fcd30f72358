// Few tokens through int4 experts on tensor cores: a candidate for kernels/gpu/expert_rows.py, whose arithmetic (four
// instructions a weight) takes longer than reading the weights. Codes become bf16 pairs in 1.5 instructions a weight and
// are multiplied by mma.m16n8k16: exact, since codes and activations are bf16 and sums float32; every 32 k are scaled on
// their own. Checks itself against double and prints microseconds.
//   nvcc -O3 -std=c++17 -arch=sm_90 expert_mma.cu -o expert_mma && ./expert_mma
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

constexpr int kWarps = 4, kAhead = 8;  // warps of a block share K; steps of 32 k whose words are in flight together

// The words of two rows (2 g and 2 g + 1) of block t of a step, and the scales of both rows.
struct Step {
  uint2 words;
  u32 scales;
};

#ifdef __CUDACC__
__device__ inline u32 minus_136(u32 pair) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(pair), "r"(0x3f803f80u), "r"(0xc308c308u));
  return d;
}
// a: 16 x 16, b: 16 x 8, both bf16; c: 16 x 8, from zero when `first`.
__device__ inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

__device__ inline float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// sums[panel][row 2 g + row]: in the lanes with t = 0, of this warp's part of K. x: bf16 pairs of one row.
template <int PANELS, int STEPS_PER_GROUP>
__device__ inline void dot_panels(const u8* panel, u64 panel_bytes, u64 scale_at, const u32* x, int depth, int steps,
                                  float (&sums)[PANELS][2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int first = steps * warp / kWarps, last = steps * (warp + 1) / kWarps;
  for (int begin = first; begin < last; begin += kAhead) {
    Step here[PANELS][kAhead];
    uint4 xs[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int step = begin + i;
      const bool inside = step < last;
      const int k = 32 * step + 8 * t;
      xs[i] = make_uint4(0, 0, 0, 0);
      if (inside && g == 0 && k < depth) xs[i] = *reinterpret_cast<const uint4*>(x + k / 2);
#pragma unroll
      for (int p = 0; p < PANELS; ++p) {
        here[p][i].words = make_uint2(0, 0);
        here[p][i].scales = 0;
        if (!inside) continue;
        const u8* at = panel + p * panel_bytes;
        here[p][i].words = *reinterpret_cast<const uint2*>(at + 64 * (4 * step + t) + 8 * g);
        here[p][i].scales = *reinterpret_cast<const u32*>(at + scale_at + 32 * (step / STEPS_PER_GROUP) + 4 * g);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int p = 0; p < PANELS; ++p) {
        const u32 upper = here[p][i].words.x ^ 0x88888888u, lower = here[p][i].words.y ^ 0x88888888u;
        u32 a[4], b[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          a[j] = minus_136((upper >> 4 * j & 0x000f000fu) | 0x43004300u);
          b[j] = minus_136((lower >> 4 * j & 0x000f000fu) | 0x43004300u);
        }
        float c[4] = {0, 0, 0, 0};
        mma(c, a[0], b[0], a[1], b[1], xs[i].x, xs[i].y);
        mma(c, a[2], b[2], a[3], b[3], xs[i].z, xs[i].w);
        sums[p][0] += c[0] * low_half(here[p][i].scales);
        sums[p][1] += c[2] * high_half(here[p][i].scales);
      }
  }
}

template <int PANELS>
__device__ inline float total(float (&parts)[kWarps][PANELS][16], int p, int row) {
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += parts[w][p][row];
  return sum;
}

template <int PANELS>
__device__ inline void put(float (&parts)[kWarps][PANELS][16], const float (&sums)[PANELS][2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane % 4 == 0)
    for (int p = 0; p < PANELS; ++p)
      for (int row = 0; row < 2; ++row) parts[warp][p][lane / 4 * 2 + row] = sums[p][row];
  __syncthreads();
}

__device__ inline u16 rounded(float v) {
  const u32 bits = __float_as_uint(v);
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Grid (token-expert pairs, pairs of panels), kWarps warps. hidden bf16 [pairs, width].
__global__ void gate_up(const u32* x, const u8* pool, const int* slots, u16* hidden, int depth, int steps, int width,
                        int top_k, u64 stride, u64 panel_bytes, u64 scale_at) {
  __shared__ float parts[kWarps][2][16];
  const int pair = blockIdx.x, panel = blockIdx.y, slot = slots[pair];
  if (slot < 0) return;
  float sums[2][2] = {};
  dot_panels<2, 1>(pool + slot * stride + 2 * panel * panel_bytes, panel_bytes, scale_at,
                   x + u64(pair / top_k) * (depth / 2), depth, steps, sums);
  put<2>(parts, sums);
  const int row = threadIdx.x, column = 16 * panel + row;
  if (row >= 16 || column >= width) return;
  const float gate = total<2>(parts, 0, row), up = total<2>(parts, 1, row);
  hidden[u64(pair) * width + column] = rounded(gate / (1.0f + expf(-gate)) * up);
}

// Grid (token-expert pairs, panels). partial float32 [pairs, columns].
__global__ void down(const u32* hidden, const u8* pool, const int* slots, const float* weights, float* partial,
                     int depth, int steps, int columns, u64 stride, u64 panel_bytes, u64 scale_at) {
  __shared__ float parts[kWarps][1][16];
  const int pair = blockIdx.x, panel = blockIdx.y, slot = slots[pair];
  if (slot < 0) return;
  float sums[1][2] = {};
  dot_panels<1, 1>(pool + slot * stride + panel * panel_bytes, panel_bytes, scale_at, hidden + u64(pair) * (depth / 2),
                   depth, steps, sums);
  put<1>(parts, sums);
  const int row = threadIdx.x, column = 16 * panel + row;
  if (row < 16 && column < columns) partial[u64(pair) * columns + column] = total<1>(parts, 0, row) * weights[pair];
}

// ---- host: random experts packed as csrc/format packs them (int4, group 32, bf16 scales) ----

static u32 dice = 1;
static u32 next() { return dice = dice * 1664525u + 1013904223u; }
static float unit() { return float(int(next() >> 8) - (1 << 23)) / (1 << 23); }
static float of_bf16(u16 b) {
  u32 v = u32(b) << 16;
  float f;
  memcpy(&f, &v, 4);
  return f;
}
static u16 to_bf16(float f) {
  u32 v;
  memcpy(&v, &f, 4);
  return u16((v + 0x7fff + (v >> 16 & 1)) >> 16);
}

struct Matrix {
  int rows, depth, padded, panels;
  u64 panel_bytes, scale_at;
  Matrix(int r, int d) : rows(r), depth(d), padded((d + 31) / 32 * 32), panels((r + 31) / 32 * 2) {
    scale_at = u64(padded) * 8;
    panel_bytes = (scale_at + padded / 32 * 32 + 63) / 64 * 64;
  }
  u64 bytes() const { return panels * panel_bytes; }
  void fill(u8* to) const {
    for (u64 p = 0; p < u64(panels); ++p)
      for (int k = 0; k < padded; ++k)
        for (int r = 0; r < 16; ++r) {
          u8* panel = to + p * panel_bytes;
          if (k % 32 == 0) {
            const u16 s = to_bf16(0.01f * (1.5f + unit()));
            memcpy(panel + scale_at + k / 32 * 32 + 2 * r, &s, 2);
          }
          u32 code = k < depth && int(p * 16 + r) < rows * 2 ? next() >> 20 & 15 : 0;
          u32 word;
          memcpy(&word, panel + 64 * (k / 8) + 4 * r, 4);
          word |= code << (16 * (k % 2) + 4 * (k % 8 / 2));
          memcpy(panel + 64 * (k / 8) + 4 * r, &word, 4);
        }
  }
  double weight(const u8* from, int row, int k) const {
    const u8* panel = from + row / 16 * panel_bytes;
    u32 word;
    memcpy(&word, panel + 64 * (k / 8) + 4 * (row % 16), 4);
    const int code = word >> (16 * (k % 2) + 4 * (k % 8 / 2)) & 15;
    u16 s;
    memcpy(&s, panel + scale_at + k / 32 * 32 + 2 * (row % 16), 2);
    return double((code ^ 8) - 8) * of_bf16(s);
  }
};

struct Problem {
  int tokens, top_k, experts, hidden, width;
  Matrix gate_up_, down_;
  u64 stride;
  std::vector<u8> pool;
  std::vector<u16> x;
  std::vector<int> slots;
  std::vector<float> weights;
  Problem(int t, int k, int e, int h, int w)
      : tokens(t), top_k(k), experts(e), hidden(h), width(w), gate_up_(2 * ((w + 15) / 16 * 16), h), down_(h, w),
        stride(gate_up_.bytes() + down_.bytes()), pool(stride * e), x(t * h), slots(t * k), weights(t * k) {
    for (int i = 0; i < e; ++i) gate_up_.fill(pool.data() + i * stride), down_.fill(pool.data() + i * stride + gate_up_.bytes());
    for (auto& v : x) v = to_bf16(unit());
    for (auto& s : slots) s = int(next() >> 8) % (e + 1) - 1;
    for (auto& v : weights) v = 0.5f + 0.5f * unit();
  }
  int pairs() const { return tokens * top_k; }

  // Largest error of both phases relative to the sum of magnitudes; phase 2 from the kernel's own bf16 activations.
  double error(const std::vector<u16>& h, const std::vector<float>& partial) const {
    double worst = 0;
    for (int p = 0; p < pairs(); ++p) {
      if (slots[p] < 0) continue;
      const u8* e = pool.data() + slots[p] * stride;
      for (int c = 0; c < width; ++c) {
        double s[2] = {0, 0}, m[2] = {0, 0};
        for (int k = 0; k < hidden; ++k)
          for (int q = 0; q < 2; ++q) {
            const double v = gate_up_.weight(e, (c / 16 * 2 + q) * 16 + c % 16, k) * of_bf16(x[p / top_k * hidden + k]);
            s[q] += v, m[q] += std::fabs(v);
          }
        const double y = s[0] / (1 + std::exp(-s[0])) * s[1];
        worst = std::fmax(worst, std::fabs(of_bf16(h[u64(p) * width + c]) - y) / (std::fabs(y) + 1e-3 * m[0] * m[1]));
      }
      for (int c = 0; c < hidden; ++c) {
        double s = 0, m = 0;
        for (int k = 0; k < width; ++k) {
          const double v = down_.weight(e + gate_up_.bytes(), c, k) * of_bf16(h[u64(p) * width + k]);
          s += v, m += std::fabs(v);
        }
        worst = std::fmax(worst, std::fabs(partial[u64(p) * hidden + c] - s * weights[p]) / (m * std::fabs(weights[p]) + 1e-30));
      }
    }
    return worst;
  }
};

#ifdef __CUDACC__
template <class T>
static T* there(const std::vector<T>& v) {
  T* p;
  cudaMalloc(&p, v.size() * sizeof(T));
  cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice);
  return p;
}

static void run(Problem& q, int repeats) {
  auto* pool = there(q.pool);
  auto* x = there(q.x);
  auto* slots = there(q.slots);
  auto* weights = there(q.weights);
  std::vector<u16> h(u64(q.pairs()) * q.width);
  std::vector<float> partial(u64(q.pairs()) * q.hidden);
  auto* dh = there(h);
  auto* dp = there(partial);
  const dim3 g1(q.pairs(), q.gate_up_.panels / 2), g2(q.pairs(), q.down_.panels);
  const auto both = [&](cudaStream_t s) {
    gate_up<<<g1, 32 * kWarps, 0, s>>>(reinterpret_cast<u32*>(x), pool, slots, dh, q.hidden, q.gate_up_.padded / 32, q.width,
                                       q.top_k, q.stride, q.gate_up_.panel_bytes, q.gate_up_.scale_at);
    down<<<g2, 32 * kWarps, 0, s>>>(reinterpret_cast<u32*>(dh), pool + q.gate_up_.bytes(), slots, weights, dp, q.width,
                                    q.down_.padded / 32, q.hidden, q.stride, q.down_.panel_bytes, q.down_.scale_at);
  };
  both(nullptr);
  cudaMemcpy(h.data(), dh, h.size() * 2, cudaMemcpyDeviceToHost);
  cudaMemcpy(partial.data(), dp, partial.size() * 4, cudaMemcpyDeviceToHost);
  printf("%d tokens x %d of %d experts, %d x %d: largest error %.2e (bf16 rounding 3.9e-3), %s\n", q.tokens, q.top_k,
         q.experts, q.hidden, q.width, q.error(h, partial), cudaGetErrorString(cudaGetLastError()));
  if (!repeats) return;
  // In a graph, other experts every time, so that they come from HBM.
  std::vector<int> many(q.slots.size() * repeats);
  for (auto& s : many) s = int(next() >> 8) % q.experts;
  auto* all = there(many);
  cudaStream_t s;
  cudaStreamCreate(&s);
  for (int part = 0; part < 3; ++part) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    for (int i = 0; i < repeats; ++i) {
      const int* now = all + i * q.slots.size();
      if (part != 1)
        gate_up<<<g1, 32 * kWarps, 0, s>>>(reinterpret_cast<u32*>(x), pool, now, dh, q.hidden, q.gate_up_.padded / 32, q.width,
                                           q.top_k, q.stride, q.gate_up_.panel_bytes, q.gate_up_.scale_at);
      if (part != 0)
        down<<<g2, 32 * kWarps, 0, s>>>(reinterpret_cast<u32*>(dh), pool + q.gate_up_.bytes(), now, weights, dp, q.width,
                                        q.down_.padded / 32, q.hidden, q.stride, q.down_.panel_bytes, q.down_.scale_at);
    }
    cudaStreamEndCapture(s, &graph);
    cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphLaunch(exec, s);
    cudaStreamSynchronize(s);
    cudaEvent_t a, b;
    cudaEventCreate(&a), cudaEventCreate(&b);
    cudaEventRecord(a, s);
    for (int i = 0; i < 5; ++i) cudaGraphLaunch(exec, s);
    cudaEventRecord(b, s);
    cudaEventSynchronize(b);
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    const double bytes = double(q.pairs()) * ((part != 1) * q.gate_up_.bytes() + (part != 0) * q.down_.bytes());
    const double us = 1e3 * ms / 5 / repeats;
    printf("  %s: %.2f us, %.0f GB/s\n", part == 0 ? "gate_up" : part == 1 ? "down" : "both", us, bytes / us / 1e3);
  }
}

int main() {
  Problem odd(3, 4, 5, 160, 72), q3(1, 8, 128, 2048, 768), q3_8(8, 8, 128, 2048, 768);
  run(odd, 0);
  run(q3, 48);
  run(q3_8, 48);
}
#endif
