"""Few rows through one matrix of codes on tensor cores: what `code_tiles` does, where unpacking in Triton takes longer
than reading the weights.

Codes become pairs of bfloat16 in registers, exactly, as operands of `mma.m16n8k16`: a panel's 16 columns are its rows,
up to 8 rows of x its columns. Products are exact and sums float32; the sum over 32 k is scaled on its own, so scaled
weights are not rounded. Warps share K and are added up in their order: a row has the same bits beside any others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.gpu.mma_source import COMMON
from tandem.kernels.gpu.nvrtc import available, compiled, launch
from tandem.kernels.gpu.overlap import can_overlap
from tandem.kernels.gpu.panels import Panels

MOST_ROWS = 16
TILE_ROWS = 8  # of one mma
STEP = 32  # k of two mma
GROUPS = (0, 32, 64, 128, 256)  # k per scale
WARPS = 8
IN_FLIGHT = 8  # panels x tiles of rows x steps that a warp has in flight together, or nearly
PANELS_EACH = (4, 2, 1)  # of a block: more of them share rows of x, fewer fill the GPU
FORMATS = {"int8": 0, "int4": 1, "fp8": 2, "fp4": 3}
SCALES = {"f32": 0, "bf16": 1, "f16": 2, "e8m0": 3}

SOURCE = r"""
enum { kWarps = WARPS, kInFlight = IN_FLIGHT };

// 32 k of rows 2 g and 2 g + 1 of a panel as they lie there, 8 k of each for lane t, and both rows' scale.
struct Step {
#if FORMAT == 1 || FORMAT == 3
  uint2 codes;
#else
  u32 codes[4];
#endif
#if SCALE == 0
  uint2 scales;
#else
  u32 scales;
#endif
};

// Of a pair of bfloat16 and a pair of powers of two.
__device__ inline u32 times(u32 pair, u32 factors) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(pair), "r"(factors), "r"(0x80008000u));
  return d;
}
__device__ inline float of_half(u32 bits) {
  float f;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(bits));
  return f;
}

// k 2 i and 2 i + 1 of a word of nibbles, as a pair of bfloat16.
__device__ inline u32 pair_of_nibbles(u32 word, int i) {
#if FORMAT == 1  // their bits under the exponent of 128 are 128 + code + 8
  return minus_136(((word ^ 0x88888888u) >> 4 * i & 0x000f000fu) | 0x43004300u);
#else  // the bits of numbers 2^126 times smaller
  const u32 codes = word >> 4 * i;
  return times((codes & 0x00070007u) << 6 | (codes & 0x00080008u) << 12, 0x7e807e80u);
#endif
}

// Bytes FIRST and FIRST + 1, likewise.
template <int FIRST>
__device__ inline u32 pair_of_bytes(u32 word) {
#if FORMAT == 0  // 2^23 + code + 128 in the mantissa of a float; the number needs no more bits than bfloat16 has
  const u32 codes = word ^ 0x80808080u;
  const float low = __uint_as_float(__byte_perm(codes, 0x4b000000u, 0x7650 + FIRST)) - 8388736.0f;
  const float high = __uint_as_float(__byte_perm(codes, 0x4b000000u, 0x7651 + FIRST)) - 8388736.0f;
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
#else  // the bits of numbers 2^120 times smaller
  const u32 codes = __byte_perm(word, 0, FIRST ? 0x3424 : 0x1404);
  return times((codes >> 4 & 0x07f007f0u) | (codes & 0x80008000u), 0x7b807b80u);
#endif
}

// Pairs 0 to 3 of row 2 g and of row 2 g + 1.
__device__ inline void decode(const Step& s, u32 (&upper)[4], u32 (&lower)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if FORMAT == 1 || FORMAT == 3
    upper[i] = pair_of_nibbles(s.codes.x, i);
    lower[i] = pair_of_nibbles(s.codes.y, i);
#else
    upper[i] = pair_of_bytes<0>(s.codes[i]);
    lower[i] = pair_of_bytes<2>(s.codes[i]);
#endif
  }
}

__device__ inline float scale_of(const Step& s, int row) {
#if SCALE == 0
  return __uint_as_float(row ? s.scales.y : s.scales.x);
#elif SCALE == 1
  return row ? high_half(s.scales) : low_half(s.scales);
#elif SCALE == 2
  return of_half(s.scales >> 16 * row);
#else  // 0 is a subnormal, 255 NaN
  const u32 byte = s.scales >> 8 * row & 255;
  return __uint_as_float(byte << 23 | (byte == 0 || byte == 255 ? 0x400000u : 0u));
#endif
}

// Those of rows 2 g and 2 g + 1, from where a group's begin.
__device__ inline void read_scales(Step& s, const u8* group, int g) {
#if SCALE == 0
  s.scales = *reinterpret_cast<const uint2*>(group + 8 * g);
#elif SCALE == 3
  s.scales = *reinterpret_cast<const u16*>(group + 2 * g);
#else
  s.scales = *reinterpret_cast<const u32*>(group + 4 * g);
#endif
}

// Sizes in bytes, steps of 32 k, 2^group_shift steps per scale; group_shift < 0: one per row.
struct Matrix {
  const u8* panels;
  u64 panel_bytes, scale_at;
  int count, depth, steps, group_shift, columns;
};

__device__ inline Step step_of(const Matrix& m, const u8* panel, int step, int g, int t) {
  Step s = {};
#if FORMAT == 1 || FORMAT == 3
  s.codes = *reinterpret_cast<const uint2*>(panel + 64 * (4 * step + t) + 8 * g);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    s.codes[i] = *reinterpret_cast<const u32*>(panel + 32 * (16 * step + 4 * t + i) + 4 * g);
#endif
  if (m.group_shift >= 0) read_scales(s, panel + m.scale_at + u64(step >> m.group_shift) * GROUP_BYTES, g);
  return s;
}

// 8 numbers of a row of x: zeros for rows and numbers that are not there.
__device__ inline uint4 numbers_of(const u16* x, const Matrix& m, int rows, int row, int k) {
  if (row >= rows || k >= m.depth) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(x + u64(row) * m.depth + k);
}

// sums += 32 k of a panel times TILES x 8 rows: of rows 2 g (0, 1) and 2 g + 1 (2, 3), x's 8 tile + 2 t and + 1.
template <int TILES>
__device__ inline void add_step(float (&sums)[TILES][4], const Matrix& m, const Step& s, const uint4 (&x)[TILES]) {
  u32 a[4], b[4];
  decode(s, a, b);
  const float upper = m.group_shift < 0 ? 1.0f : scale_of(s, 0), lower = m.group_shift < 0 ? 1.0f : scale_of(s, 1);
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

// Steps [first, last) of K, as many in flight together as registers hold. The first are read before x is there.
template <int PANELS, int TILES>
__device__ inline void add_steps(float (&sums)[PANELS][TILES][4], const Matrix& m, const u16* x, int rows, int first,
                                 int last) {
  constexpr int kAhead = PANELS * TILES < 8 ? kInFlight / (PANELS * TILES) : 2;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int begin = first;; begin += kAhead) {
    Step ahead[PANELS][kAhead];
    uint4 numbers[kAhead][TILES];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int p = 0; p < PANELS; ++p) {
        const int panel = min(int(blockIdx.x) * PANELS + p, m.count - 1);
        ahead[p][i] = begin + i < last ? step_of(m, m.panels + panel * m.panel_bytes, begin + i, g, t) : Step{};
      }
    if (begin == first) wait_for_previous();
    if (begin >= last) return;
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
        numbers[i][tile] = numbers_of(x, m, begin + i < last ? rows : 0, 8 * tile + g, STEP * (begin + i) + 8 * t);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int p = 0; p < PANELS; ++p) add_step<TILES>(sums[p], m, ahead[p][i], numbers[i]);
  }
}

__device__ inline float row_scale(const Matrix& m, int column) {
  Step s = {};
  const int row = column % 16;
  read_scales(s, m.panels + column / 16 * m.panel_bytes + m.scale_at, row / 2);
  return scale_of(s, row % 2);
}

// Blocks of PANELS panels; x bf16 [rows, depth], out float32 or bf16, whose rows are out_stride numbers apart.
template <int PANELS, int TILES>
__device__ inline void multiply(const u16* x, const Matrix& m, const float* bias, void* out, int out_bf16, int rows,
                                int out_stride) {
  __shared__ float parts[kWarps][TILES * 8][PANELS * 16];
  start_next();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  float sums[PANELS][TILES][4] = {};
  add_steps<PANELS, TILES>(sums, m, x, rows, m.steps * warp / kWarps, m.steps * (warp + 1) / kWarps);
  for (int p = 0; p < PANELS; ++p)
    for (int tile = 0; tile < TILES; ++tile)
      for (int i = 0; i < 4; ++i)
        parts[warp][8 * tile + 2 * t + i % 2][16 * p + 2 * g + i / 2] = sums[p][tile][i];
  __syncthreads();
  for (int i = threadIdx.x; i < PANELS * 16 * rows; i += 32 * kWarps) {
    const int row = i / (PANELS * 16), within = i % (PANELS * 16);
    const int column = blockIdx.x * PANELS * 16 + within;
    if (column >= m.columns) continue;
    float sum = parts[0][row][within];
    for (int w = 1; w < kWarps; ++w) sum += parts[w][row][within];
    if (m.group_shift < 0) sum *= row_scale(m, column);
    if (bias) sum += bias[column];
    const u64 to = u64(row) * out_stride + column;
    if (out_bf16)
      static_cast<u16*>(out)[to] = rounded(sum);
    else
      static_cast<float*>(out)[to] = sum;
  }
}

#define KERNEL(PANELS, TILES)                                                                                        \
  extern "C" __global__ void __launch_bounds__(32 * kWarps, 2)                                                       \
      multiply_##PANELS##_##TILES(const u16* x, const u8* panels, const float* bias, void* out, int out_bf16,        \
                                  int rows, int out_stride, u64 panel_bytes, u64 scale_at, int count, int depth,     \
                                  int steps, int group_shift, int columns) {                                         \
    const Matrix m = {panels, panel_bytes, scale_at, count, depth, steps, group_shift, columns};                     \
    multiply<PANELS, TILES>(x, m, bias, out, out_bf16, rows, out_stride);                                            \
  }
KERNEL(1, 1) KERNEL(2, 1) KERNEL(4, 1) KERNEL(1, 2) KERNEL(2, 2) KERNEL(4, 2)
"""


def reads(panels: Panels, device: torch.device) -> bool:
    """Whether these kernels read such a matrix on this device: whole groups of 32 k, rows of 16-byte units."""
    if panels.fmt not in FORMATS or panels.scale not in SCALES or not panels.scale_offset:
        return False
    if panels.group not in GROUPS or panels.padded_depth % STEP or panels.depth % 8 or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and available()


def source(fmt: str, scale: str) -> str:
    """Of the kernels for one format and type of scales."""
    scale_bytes = {"f32": 4, "e8m0": 1}.get(scale, 2)
    constants = {
        "FORMAT": FORMATS[fmt], "SCALE": SCALES[scale], "GROUP_BYTES": 16 * scale_bytes, "STEP": STEP,
        "WARPS": WARPS, "IN_FLIGHT": IN_FLIGHT,
    }  # fmt: skip
    return "".join(f"#define {name} {value}\n" for name, value in constants.items()) + COMMON + SOURCE


@cache
def kernels(fmt: str, scale: str, device_index: int | None) -> dict[tuple[int, int], Any]:
    """By panels of a block and tiles of rows; compiled on first use."""
    shapes = [(panels, tiles) for panels in PANELS_EACH for tiles in (1, 2)]
    names = [f"multiply_{panels}_{tiles}" for panels, tiles in shapes]
    return dict(zip(shapes, compiled(source(fmt, scale), names, device_index), strict=True))


def panels_each(panels: int, rows: int, processors: int) -> int:
    """Of a block. One row is as fast from anywhere, so that as many blocks as possible read; several are read anew by
    every block, which several panels of weights should be worth."""
    wanted = 1 if rows == 1 else 2 if rows <= TILE_ROWS else 4
    return next(
        each for each in PANELS_EACH if each <= wanted and (panels // each >= processors or each == 1)
    )


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def multiply(x: Tensor, pool: Tensor, panels: Panels, bias: Tensor | None, out: Tensor) -> Tensor:
    """As `code_tiles.multiply`, of up to MOST_ROWS rows."""
    each = panels_each(panels.panels, len(x), _processors(x.device))
    kernel = kernels(panels.fmt, panels.scale, x.device.index)[each, 1 if len(x) <= TILE_ROWS else 2]
    group_shift = (panels.group // STEP).bit_length() - 1  # -1: one scale per row
    sizes = panels.panels, panels.depth, panels.padded_depth // STEP, group_shift, panels.columns
    launch(
        kernel, -(-panels.panels // each), 32 * WARPS, int(torch.cuda.current_stream(x.device).cuda_stream),
        x.data_ptr(), pool.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        *map(np.int32, (out.dtype is torch.bfloat16, len(x), out.stride(0))),
        np.uint64(panels.panel_bytes), np.uint64(panels.scale_offset), *map(np.int32, sizes),
        overlap=can_overlap(x.device),
    )  # fmt: skip
    return out
