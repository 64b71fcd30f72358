"""Few rows through int4 experts on tensor cores: what `expert_rows` does, where its arithmetic, four instructions a
weight, takes longer than reading the weights.

Two codes become a pair of bfloat16 in three instructions: their bits under the exponent of 128 are 128 + code + 8, of
which 136 is taken away. Codes, activations and the products of `mma.m16n8k16` are exact and its sums float32; the sum
over a group of k is scaled on its own. The row is one of the tile's eight columns; the others are zeros, which cost
nothing: the kernel waits for memory. An H200 takes 7.4 us where `expert_rows` takes 13.1 (gate and up of 8 of
Qwen3-30B-A3B's experts).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.gpu.nvrtc import compiled, launch
from tandem.kernels.gpu.panels import Panels

STEP = 32  # k of two mma; scales are of as many, or of a multiple

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

enum { kAhead = 8 };  // steps of 32 k whose words are in flight together

__device__ inline u32 minus_136(u32 pair) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(pair), "r"(0x3f803f80u), "r"(0xc308c308u));
  return d;
}
// a: 16 x 16, b: 16 x 8, both bf16; c: 16 x 8.
__device__ inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ inline u16 rounded(float v) {
  const u32 bits = __float_as_uint(v);
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One matrix of a packed expert (kernels/gpu/panels.py): sizes in bytes, steps of 32 k, and steps per group of a scale.
struct Matrix {
  u64 panel_bytes, scale_at;
  int depth, steps, group_steps, columns;
};

// The words of rows 2 g and 2 g + 1 of a step's block t, and the scales of both rows.
struct Words {
  uint2 codes;
  u32 scales;
};

__device__ inline Words words_of(const u8* panel, const Matrix& m, int step, int g, int t) {
  Words w;
  w.codes = *reinterpret_cast<const uint2*>(panel + 64 * (4 * step + t) + 8 * g);
  w.scales = *reinterpret_cast<const u32*>(panel + m.scale_at + 32 * (step / m.group_steps) + 4 * g);
  return w;
}

// Adds 32 k of a panel: sums of rows 2 g and 2 g + 1, in the lanes with t = 0. x: 8 of the row's numbers, where g = 0.
__device__ inline void add_step(float (&sums)[2], const Words& w, const uint4& x) {
  const u32 upper = w.codes.x ^ 0x88888888u, lower = w.codes.y ^ 0x88888888u;
  u32 a[4], b[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    a[j] = minus_136((upper >> 4 * j & 0x000f000fu) | 0x43004300u);
    b[j] = minus_136((lower >> 4 * j & 0x000f000fu) | 0x43004300u);
  }
  float c[4] = {0, 0, 0, 0};
  mma(c, a[0], b[0], a[1], b[1], x.x, x.y);
  mma(c, a[2], b[2], a[3], b[3], x.z, x.w);
  sums[0] += c[0] * low_half(w.scales);
  sums[1] += c[2] * high_half(w.scales);
}

// This warp's part of K, times one row.
template <int PANELS, int WARPS>
__device__ inline void dot_panels(const u8* panel, const Matrix& m, const u16* row, float (&sums)[PANELS][2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int first = m.steps * warp / WARPS, last = m.steps * (warp + 1) / WARPS;
  for (int begin = first; begin < last; begin += kAhead) {
    Words words[PANELS][kAhead];
    uint4 x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int step = begin + i, k = 32 * step + 8 * t;
      x[i] = make_uint4(0, 0, 0, 0);
      if (step < last && g == 0 && k < m.depth) x[i] = *reinterpret_cast<const uint4*>(row + k);
#pragma unroll
      for (int p = 0; p < PANELS; ++p)
        words[p][i] = step < last ? words_of(panel + p * m.panel_bytes, m, step, g, t) : Words{{0, 0}, 0};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int p = 0; p < PANELS; ++p) add_step(sums[p], words[p][i], x[i]);
  }
}

// The 16 sums of every panel over all warps, in `parts[0]`; in the order of the warps.
template <int PANELS, int WARPS>
__device__ inline void add_warps(float (&parts)[WARPS][PANELS * 16], const float (&sums)[PANELS][2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane % 4 == 0)
    for (int p = 0; p < PANELS; ++p)
      for (int row = 0; row < 2; ++row) parts[warp][16 * p + lane / 4 * 2 + row] = sums[p][row];
  __syncthreads();
  if (threadIdx.x < PANELS * 16)
    for (int w = 1; w < WARPS; ++w) parts[0][threadIdx.x] += parts[w][threadIdx.x];
  __syncwarp();
}

// Grid (token-expert pairs, pairs of panels): silu(gate) * up, bf16 [pairs, width].
template <int WARPS>
__device__ inline void gate_up(const u16* x, const u8* pool, const int* slots, u16* hidden, const Matrix& m, int top_k,
                               u64 stride) {
  __shared__ float parts[WARPS][32];
  const int pair = blockIdx.x, panel = blockIdx.y, slot = slots[pair];
  if (slot < 0) return;
  float sums[2][2] = {};
  dot_panels<2, WARPS>(pool + slot * stride + 2 * panel * m.panel_bytes, m, x + u64(pair / top_k) * m.depth, sums);
  add_warps<2, WARPS>(parts, sums);
  const int row = threadIdx.x, column = 16 * panel + row;
  if (row >= 16 || column >= m.columns) return;
  const float gate = parts[0][row], up = parts[0][16 + row];
  hidden[u64(pair) * m.columns + column] = rounded(gate / (1.0f + expf(-gate)) * up);
}

// Grid (token-expert pairs, panels): weight * result, float32 [pairs, columns].
template <int WARPS>
__device__ inline void down(const u16* hidden, const u8* pool, const int* slots, const float* weights, float* partial,
                            const Matrix& m, u64 stride) {
  __shared__ float parts[WARPS][16];
  const int pair = blockIdx.x, panel = blockIdx.y, slot = slots[pair];
  if (slot < 0) return;
  float sums[1][2] = {};
  dot_panels<1, WARPS>(pool + slot * stride + panel * m.panel_bytes, m, hidden + u64(pair) * m.depth, sums);
  add_warps<1, WARPS>(parts, sums);
  const int row = threadIdx.x, column = 16 * panel + row;
  if (row < 16 && column < m.columns) partial[u64(pair) * m.columns + column] = parts[0][row] * weights[pair];
}

#define KERNELS(WARPS)                                                                                               \
  extern "C" __global__ void gate_up_##WARPS(const u16* x, const u8* pool, const int* slots, u16* hidden, int top_k, \
                                             u64 stride, u64 panel_bytes, u64 scale_at, int depth, int steps,        \
                                             int group_steps, int columns) {                                         \
    gate_up<WARPS>(x, pool, slots, hidden, {panel_bytes, scale_at, depth, steps, group_steps, columns}, top_k,       \
                   stride);                                                                                          \
  }                                                                                                                  \
  extern "C" __global__ void down_##WARPS(const u16* hidden, const u8* pool, const int* slots, const float* weights, \
                                          float* partial, u64 stride, u64 panel_bytes, u64 scale_at, int depth,      \
                                          int steps, int group_steps, int columns) {                                 \
    down<WARPS>(hidden, pool, slots, weights, partial, {panel_bytes, scale_at, depth, steps, group_steps, columns},  \
                stride);                                                                                             \
  }
KERNELS(4)
KERNELS(8)
"""


def reads(panels: Panels, device: torch.device) -> bool:
    """Whether these kernels read such a matrix on this device: int4 with bf16 scales, rows of 16-byte units."""
    wanted = panels.fmt == "int4" and panels.scale == "bf16" and panels.scale_offset > 0
    sizes = (
        panels.group > 0 and panels.group % STEP == 0 and panels.padded_depth % STEP == panels.depth % 8 == 0
    )
    return wanted and sizes and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def kernels(device_index: int | None) -> dict[str, Any]:
    """By name, compiled on first use."""
    names = [f"{kind}_{warps}" for kind in ("gate_up", "down") for warps in (4, 8)]
    return dict(zip(names, compiled(SOURCE, names, device_index), strict=True))


def gate_up(x: Tensor, pool: Tensor, panels: Panels, stride: int, slots: Tensor, width: int) -> Tensor:
    """As `expert_rows.gate_up`."""
    hidden = x.new_empty((slots.numel(), width))
    launch(
        _kernel("gate_up", panels, x.device), (slots.numel(), panels.panels // 2), 32 * _warps(panels), _stream(x),
        x.data_ptr(), pool.data_ptr(), slots.data_ptr(), hidden.data_ptr(), np.int32(slots.shape[1]),
        np.uint64(stride), *_matrix(panels, width),
    )  # fmt: skip
    return hidden


def down(
    hidden: Tensor, pool: Tensor, offset: int, panels: Panels, stride: int, slots: Tensor, weights: Tensor
) -> Tensor:
    """As `expert_rows.down`."""
    partial = hidden.new_empty((slots.numel(), panels.columns), dtype=torch.float32)
    launch(
        _kernel("down", panels, hidden.device), (slots.numel(), panels.panels), 32 * _warps(panels), _stream(hidden),
        hidden.data_ptr(), pool.data_ptr() + offset, slots.data_ptr(), weights.data_ptr(), partial.data_ptr(),
        np.uint64(stride), *_matrix(panels, panels.columns),
    )  # fmt: skip
    return partial


def _warps(panels: Panels) -> int:
    """They share K; so many that each has about one round of loads."""
    return 8 if panels.padded_depth >= 8 * 4 * STEP else 4


def _kernel(kind: str, panels: Panels, device: torch.device) -> Any:
    return kernels(device.index)[f"{kind}_{_warps(panels)}"]


def _matrix(panels: Panels, columns: int) -> tuple[Any, ...]:
    sizes = panels.depth, panels.padded_depth // STEP, panels.group // STEP, columns
    return np.uint64(panels.panel_bytes), np.uint64(panels.scale_offset), *map(np.int32, sizes)


def _stream(tensor: Tensor) -> int:
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)
