"""Few rows through one matrix of codes on tensor cores: what `code_tiles` does, where unpacking in Triton takes longer
than reading the weights.

Codes are taken as `mma_source.py` says, so scaled weights are not rounded. Warps share K and are added up in their
order: a row has the same bits beside any others.

A matrix of gate and up may end in the activation: then a block takes the panel of a gate and that of its up.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.config.layers import Activation
from tandem.kernels.gpu.code_tiles import PANEL
from tandem.kernels.gpu.mma_source import (
    STEP,
    Kind,
    activation_steps,
    code_steps,
    group_shift,
    has_steps,
    kind_of,
)
from tandem.kernels.gpu.nvrtc import available, compiled, launch
from tandem.kernels.gpu.overlap import can_overlap
from tandem.kernels.gpu.panels import Panels

MOST_ROWS = 32
MOST_PAIRED_ROWS = 16  # the sums of two panels' warps lie in shared memory
TILE_ROWS = 8  # of one mma

SOURCE = r"""
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
      for (int i = 0; i < 4; ++i)
        parts[warp][8 * tile + 2 * t + i % 2][16 * p + 2 * g + i / 2] = sums[p][tile][i];
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
"""


def reads(panels: Panels, device: torch.device) -> bool:
    """Whether these kernels read such a matrix on this device."""
    if not has_steps(panels) or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and available()


class Blocks(NamedTuple):
    """How a kernel divides a matrix."""

    panels: int  # of a block
    tiles: int  # of TILE_ROWS rows of x
    warps: int  # of a block, which share K
    ahead: int  # steps that a warp loads together, while it adds as many others
    resident: int  # blocks of a processor, at least: limits registers


@cache
def kernel(kind: Kind, blocks: Blocks, device_index: int | None, ending: Activation | None) -> Any:
    """Compiled on first use. ending: the activation that panels of gate and up end in."""
    (made,) = compiled(source(kind, blocks, ending), ("multiply",), device_index)
    return made


def source(kind: Kind, blocks: Blocks, ending: Activation | None = None) -> str:
    sizes = ", ".join(f"{name.upper()} = {value}" for name, value in blocks._asdict().items())
    paired = "#define PAIRED 0\n" if ending is None else "#define PAIRED 1\n" + activation_steps(ending)
    return code_steps(kind) + paired + f"enum {{ {sizes} }};\n" + SOURCE


def blocks_of(panels: Panels, rows: int, processors: int) -> Blocks:
    """Every block reads the rows of x anew and adds up its warps. So a block takes two panels where all processors have
    blocks and registers hold the steps of both. Where a processor has only one block, more warps read for it; where
    it has more, they would take a third longer."""
    tiles = 1 if rows <= TILE_ROWS else 2 if rows <= 2 * TILE_ROWS else 4
    two = tiles == 2 or (tiles == 1 and panels.codes == 8)
    each = 2 if two and panels.panels // 2 >= processors else 1
    alone = panels.panels <= processors
    return Blocks(each, tiles, 16 if alone else 8, 4 if tiles == 1 else 2, 1 if alone else 2)


def pairs_of(panels: Panels, rows: int, processors: int) -> Blocks:
    """As `blocks_of`, of a gate's panel and an up's: as many steps in flight as one panel has of twice the length."""
    alone = panels.panels // 2 <= processors
    ahead = 4 if panels.codes == 8 and rows <= TILE_ROWS else 2
    return Blocks(2, 1 if rows <= TILE_ROWS else 2, 16 if alone else 8, ahead, 1 if alone else 2)


def pairs(panels: Panels, how: Activation) -> bool:
    """Whether a gate's panels and an up's are as many, and none has columns of both."""
    return how.gated and panels.columns % (2 * PANEL) == 0


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def prepare(panels: Panels, device: torch.device) -> None:
    """Compiles what any step of up to MOST_ROWS rows needs: the first one may be one that is captured."""
    for rows in (1, TILE_ROWS, 2 * TILE_ROWS, MOST_ROWS):
        kernel(kind_of(panels), blocks_of(panels, rows, _processors(device)), device.index, None)


def prepare_pairs(panels: Panels, how: Activation, device: torch.device) -> None:
    """As `prepare`, for `activate`."""
    for rows in (1, MOST_PAIRED_ROWS):
        kernel(kind_of(panels), pairs_of(panels, rows, _processors(device)), device.index, how)


def activate(x: Tensor, pool: Tensor, panels: Panels, how: Activation) -> Tensor:
    """The activation of a product with gate and up, of up to MOST_ROWS rows, in x's type."""
    out = x.new_empty((len(x), panels.columns // 2))
    for some, to in zip(x.split(MOST_PAIRED_ROWS), out.split(MOST_PAIRED_ROWS), strict=True):
        multiply(some, pool, panels, None, to, how)
    return out


def multiply(
    x: Tensor, pool: Tensor, panels: Panels, bias: Tensor | None, out: Tensor, ending: Activation | None = None
) -> Tensor:
    """As `code_tiles.multiply`, of up to MOST_ROWS rows. ending: as `activate`, of up to MOST_PAIRED_ROWS."""
    division = blocks_of if ending is None else pairs_of
    blocks = division(panels, len(x), _processors(x.device))
    sizes = panels.panels, panels.depth, panels.padded_depth // STEP, group_shift(panels), panels.columns
    launch(
        kernel(kind_of(panels), blocks, x.device.index, ending), -(-panels.panels // blocks.panels), 32 * blocks.warps,
        int(torch.cuda.current_stream(x.device).cuda_stream),
        x.data_ptr(), pool.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        *map(np.int32, (out.dtype is torch.bfloat16, len(x), out.stride(0))),
        np.uint64(panels.panel_bytes), np.uint64(panels.scale_offset), *map(np.int32, sizes),
        overlap=can_overlap(x.device),
    )  # fmt: skip
    return out
