"""One packed matrix times rows (`dense_codes.py`), and its numbers: what `expert_rows` and `expert_tiles` do, without
experts to choose. Scaled weights of tiles are rounded to bfloat16, as decoded ones are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.gpu.expert_rows import dot_panel, row_step
from tandem.kernels.gpu.expert_tiles import multiply_tile, tile_step
from tandem.kernels.gpu.panels import (
    Panels,
    block_words,
    group_offsets,
    group_values,
    plane,
    row_factor,
    views,
)

PANEL = 16  # columns
TILE_ROWS, TILE_COLUMNS = 16, 32
UNPACKED_WORDS = 128  # along k, by one program


@triton.jit
def _row(x, words, scales, bias, out, depth, blocks, columns, FMT: tl.constexpr, CODES: tl.constexpr,
         GROUP: tl.constexpr, SCALED: tl.constexpr, PANEL: tl.constexpr, SCALE_PANEL: tl.constexpr,
         SCALE_AT: tl.constexpr, STEP: tl.constexpr, BIAS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    panel = tl.program_id(0).to(tl.int64)
    words += panel * PANEL
    scales += panel * SCALE_PANEL + SCALE_AT
    y = dot_panel(x, words, scales, depth, blocks, FMT, CODES, GROUP, SCALED, STEP)
    column = panel * 16 + tl.arange(0, 16)
    if BIAS:
        y += tl.load(bias + column, column < columns, other=0.0)
    tl.store(out + column, y.to(out.dtype.element_ty), column < columns)


@triton.jit(do_not_specialize=["rows"])
def _tile(x, words, scales, bias, out, rows, depth, blocks, columns, panels, out_stride, FMT: tl.constexpr,
          CODES: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, PANEL: tl.constexpr,
          SCALE_PANEL: tl.constexpr, SCALE_AT: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
          BIAS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    panel = tl.minimum(column // 16, panels - 1).to(tl.int64)  # past the last: computed, not stored
    w = words + panel * PANEL + column % 16
    s = scales + panel * SCALE_PANEL + SCALE_AT
    y = multiply_tile(tl.zeros([BM, BN], tl.float32), x + row * (depth // 2), row < rows, w, s, column % 16, depth,
                      blocks, FMT, CODES, GROUP, SCALED, STEP)  # fmt: skip
    if BIAS:
        y += tl.load(bias + column, column < columns, other=0.0)[None, :]
    at = out + row[:, None] * out_stride + column[None, :]
    tl.store(at, y.to(out.dtype.element_ty), (row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def _number(word, upper, scale, zero, shift, j: tl.constexpr, FMT: tl.constexpr, ZERO_AT: tl.constexpr,
            SHIFT_AT: tl.constexpr):  # fmt: skip
    value = plane(word, upper, j, FMT)
    if ZERO_AT:
        value -= zero
    value *= scale
    if SHIFT_AT:
        value += shift
    return value.to(tl.bfloat16)


@triton.jit
def panel_numbers(words, scales, part, blocks, FMT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
                  SCALED: tl.constexpr, STEP: tl.constexpr, zeros=None, ZERO_AT: tl.constexpr = 0,
                  SHIFT_AT: tl.constexpr = 0):  # fmt: skip
    """Numbers of the panel at `words`, with scales from `scales` on: bfloat16 [16, STEP * CODES], its part-th piece.
    With ZERO_AT `zeros` points at its zero points, of a codebook at its table; with SHIFT_AT its offsets lie so far
    behind its scales."""
    r, at = tl.arange(0, 16), part * STEP + tl.arange(0, STEP)
    inside = (at < blocks)[None, :] & (r >= 0)[:, None]
    word, upper = block_words(words, at[None, :], r[:, None], inside, FMT, zeros)
    scale = tl.full([16, STEP], 1.0, tl.float32)
    zero = scale
    shift = scale
    group = (at // GROUP if GROUP else at * 0)[None, :]
    if ZERO_AT:
        zero = tl.load(zeros + group * 16 + r[:, None], inside, other=0).to(tl.float32)
    if SCALED:
        scale = group_values(scales, group, r[:, None], inside, SCALED)
    if SHIFT_AT:
        shift = group_offsets(scales + SHIFT_AT, group, r[:, None], inside, SCALED)
    if SCALED == 3:
        scale *= row_factor(scales, r)[:, None]
    if CODES == 8:  # k of a word side by side: 0, 2, 4, 6 and 1, 3, 5, 7, interleaved
        a = tl.interleave(_number(word, upper, scale, zero, shift, 0, FMT, ZERO_AT, SHIFT_AT),
                          _number(word, upper, scale, zero, shift, 4, FMT, ZERO_AT, SHIFT_AT))  # fmt: skip
        b = tl.interleave(_number(word, upper, scale, zero, shift, 2, FMT, ZERO_AT, SHIFT_AT),
                          _number(word, upper, scale, zero, shift, 6, FMT, ZERO_AT, SHIFT_AT))  # fmt: skip
        c = tl.interleave(_number(word, upper, scale, zero, shift, 1, FMT, ZERO_AT, SHIFT_AT),
                          _number(word, upper, scale, zero, shift, 5, FMT, ZERO_AT, SHIFT_AT))  # fmt: skip
        d = tl.interleave(_number(word, upper, scale, zero, shift, 3, FMT, ZERO_AT, SHIFT_AT),
                          _number(word, upper, scale, zero, shift, 7, FMT, ZERO_AT, SHIFT_AT))  # fmt: skip
        value = tl.interleave(tl.interleave(a, b), tl.interleave(c, d))
    else:
        value = tl.interleave(_number(word, upper, scale, zero, shift, 0, FMT, ZERO_AT, SHIFT_AT),
                              _number(word, upper, scale, zero, shift, 1, FMT, ZERO_AT, SHIFT_AT))  # fmt: skip
    return value


@triton.jit
def _unpack(words, scales, out, first_panel, depth, blocks, columns, FMT: tl.constexpr, CODES: tl.constexpr,
            GROUP: tl.constexpr, SCALED: tl.constexpr, PANEL: tl.constexpr, SCALE_PANEL: tl.constexpr,
            SCALE_AT: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    panel, part = first_panel + tl.program_id(0).to(tl.int64), tl.program_id(1)
    words += panel * PANEL
    scales += panel * SCALE_PANEL + SCALE_AT
    value = panel_numbers(words, scales, part, blocks, FMT, CODES, GROUP, SCALED, STEP)
    row = tl.program_id(0).to(tl.int64) * 16 + tl.arange(0, 16)
    k = part * STEP * CODES + tl.arange(0, STEP * CODES)
    tl.store(out + row[:, None] * depth + k[None, :], value, (row < columns)[:, None] & (k < depth)[None, :])


def multiply(x: Tensor, pool: Tensor, panels: Panels, bias: Tensor | None, out: Tensor) -> Tensor:
    """x bfloat16 [T, K] times the matrix in `pool`, plus bias float32 [N], to out [T, N], whose rows may lie apart.
    From two rows on a row has the same bits beside any others."""
    words, scales = views(pool, 0, panels)
    tensors = x.view(torch.int32), words, scales, words if bias is None else bias, out
    if len(x) == 1:
        _row[(triton.cdiv(panels.columns, PANEL),)](
            *tensors, panels.depth, panels.blocks, panels.columns, **panels.constants(), STEP=row_step(panels),
            BIAS=bias is not None, num_warps=4, **overlapped(x.device),
        )  # fmt: skip
        return out
    _tile[(triton.cdiv(len(x), TILE_ROWS), triton.cdiv(panels.columns, TILE_COLUMNS))](
        *tensors, len(x), panels.depth, panels.blocks, panels.columns, panels.panels, out.stride(0),
        **panels.constants(), STEP=tile_step(panels), BM=TILE_ROWS, BN=TILE_COLUMNS,
        BIAS=bias is not None, num_warps=4, **overlapped(x.device),
    )  # fmt: skip
    return out


def unpack(pool: Tensor, panels: Panels, first: int, out: Tensor) -> Tensor:
    """The numbers of columns [first, first + len(out)), bfloat16 [.., K]; first: a panel's."""
    words, scales = views(pool, 0, panels)
    _unpack[(triton.cdiv(len(out), PANEL), triton.cdiv(panels.blocks, UNPACKED_WORDS))](
        words, scales, out, first // PANEL, panels.depth, panels.blocks, len(out), **panels.constants(),
        STEP=UNPACKED_WORDS, num_warps=4,
    )  # fmt: skip
    return out
