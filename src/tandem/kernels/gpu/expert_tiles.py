"""Many rows: rows are sorted by expert, and a tile of them is multiplied by a tile of unpacked weights on the tensor
cores. Scaled weights are rounded to bfloat16 once more, as the AMX tiles of the CPU do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.expert_rows import ExpertActivation
from tandem.kernels.gpu.mlp import activated, relu2
from tandem.kernels.gpu.panels import (
    Panels,
    block_words,
    expert_views,
    group_offsets,
    group_values,
    halves,
    plane,
    row_factor,
    scale_value,
)
from tandem.kernels.ops import Routing

ROWS = 64  # of a tile
COLUMNS = 64
INTERPRETED = tl.constexpr(
    bool(triton.knobs.runtime.interpret)
)  # where bfloat16 is multiplied as if it were integers


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Pairs sorted by slot and cut into tiles of at most ROWS pairs of one slot; made without asking the GPU back."""

    order: Tensor  # int64 [P]: pairs by slot, those with slot -1 first
    slots: Tensor  # int32 [tiles]: -1 past the last
    first: Tensor  # int64 [tiles]: in `order`
    end: Tensor  # int64 [tiles]


def row_tiles(slots: Tensor, num_slots: int) -> RowTiles:
    """slots int32 [T, k]."""
    by_slot, order = slots.flatten().sort(stable=True)
    edges = torch.searchsorted(by_slot, torch.arange(num_slots + 1, device=slots.device, dtype=slots.dtype))
    counts = edges[1:] - edges[:-1]
    tiles_of = (counts + ROWS - 1) // ROWS
    ends = tiles_of.cumsum(0)
    tile = torch.arange(slots.numel() // ROWS + min(num_slots, slots.numel()), device=slots.device)
    slot = torch.searchsorted(ends, tile, right=True)
    real = slot < num_slots
    slot = slot.clamp(max=num_slots - 1)
    first = edges[slot] + (tile - (ends[slot] - tiles_of[slot])) * ROWS
    return RowTiles(order, torch.where(real, slot, -1).int(), first, edges[slot + 1])


@triton.jit
def _scaled(word, upper, scales, lane, zeros, at, blocks, j: tl.constexpr, FMT: tl.constexpr, GROUP: tl.constexpr,
            SCALED: tl.constexpr, ZERO_AT: tl.constexpr, SHIFT_AT: tl.constexpr):  # fmt: skip
    """Plane j as bfloat16 [STEP, COLUMNS]; `scales` points at the table of each column's panel, `lane` is its row."""
    value, inside = plane(word, upper, j, FMT), (at < blocks)[:, None]
    if ZERO_AT:
        value -= tl.load(zeros[None, :] + (at // GROUP)[:, None] * 16, inside, other=0).to(tl.float32)
    if SCALED and GROUP:
        value *= group_values(scales[None, :], (at // GROUP)[:, None], lane[None, :], inside, SCALED)
    if SHIFT_AT:
        value += group_offsets(scales[None, :] + SHIFT_AT, (at // GROUP)[:, None], lane[None, :], inside, SCALED)
    return value.to(tl.bfloat16)


@triton.jit
def _dot(x, weights, acc):
    """acc + x times weights; x has float32 numbers that are bfloat16's."""
    if INTERPRETED:
        acc = tl.dot(x, weights.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(x.to(tl.bfloat16), weights, acc)
    return acc


@triton.jit
def multiply_tile(acc, x, real, words, scales, lane, depth, blocks, FMT: tl.constexpr, CODES: tl.constexpr,
                  GROUP: tl.constexpr, SCALED: tl.constexpr, STEP: tl.constexpr, zeros=None,
                  ZERO_AT: tl.constexpr = 0, SHIFT_AT: tl.constexpr = 0):  # fmt: skip
    """acc += rows x (pointers to bfloat16 pairs, [ROWS]) times columns: of each `words` points at its first word,
    `scales` at its panel's table; lane: column % 16."""
    b = tl.arange(0, STEP)
    for start in range(0, blocks, STEP):
        at = start + b
        if FMT == 8 or FMT >= 10:  # rows share the bytes of a block, so the row has to be known
            inside, own = (at < blocks)[:, None], (words - lane)[None, :]
            word, upper = block_words(own, at[:, None], lane[None, :], inside, FMT, zeros)
        else:
            word, upper = block_words(words[None, :], at[:, None], 0, (at < blocks)[:, None], FMT)
        for pair in tl.static_range(CODES // 2):
            k = at * (CODES // 2) + pair
            even, odd = halves(
                tl.load(x[:, None] + k[None, :], real[:, None] & (k < depth // 2)[None, :], other=0)
            )
            evens = _scaled(word, upper, scales, lane, zeros, at, blocks, 2 * pair, FMT, GROUP, SCALED, ZERO_AT,
                            SHIFT_AT)  # fmt: skip
            odds = _scaled(word, upper, scales, lane, zeros, at, blocks, 2 * pair + 1, FMT, GROUP, SCALED, ZERO_AT,
                           SHIFT_AT)  # fmt: skip
            acc = _dot(odd, odds, _dot(even, evens, acc))
    if SCALED and not GROUP:
        acc *= scale_value(tl.load(scales + lane), SCALED)[None, :]
    if SCALED == 3:
        acc *= row_factor(scales, lane)[None, :]
    return acc


@triton.jit
def _expert_of(order, first, ids, tile):
    """All pairs of a tile chose it."""
    return tl.load(ids + tl.load(order + tl.load(first + tile))).to(tl.int64)


@triton.jit
def _gate_up(x, words, scales, zeros, order, slots, first, end, ids, biases, hidden, depth, blocks, width, word_stride,
             scale_stride, panels, TOP_K: tl.constexpr, FMT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
             SCALED: tl.constexpr, PANEL: tl.constexpr, SCALE_PANEL: tl.constexpr, SCALE_AT: tl.constexpr,
             STEP: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GATED: tl.constexpr,
             BIASED: tl.constexpr, ZERO_AT: tl.constexpr, SHIFT_AT: tl.constexpr, WORD: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(slots + tile).to(tl.int64)
    if slot < 0:
        return
    i = tl.load(first + tile) + tl.arange(0, BM)
    real = i < tl.load(end + tile)
    pair = tl.load(order + i, real, other=0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    panel = tl.minimum(2 * (column // 16), panels - 2)  # past the last: computed, not stored
    w = words + slot * word_stride + panel * PANEL + column % 16
    s = scales + slot * scale_stride + panel * SCALE_PANEL + SCALE_AT
    row = x + pair // TOP_K * (depth // 2)
    zero = tl.zeros([BM, BN], tl.float32)
    z = zeros
    up_z = zeros
    if ZERO_AT:
        z = zeros + (slot * word_stride + panel * PANEL) * WORD + ZERO_AT + column % 16
        up_z = z + PANEL * WORD
    gate = multiply_tile(zero, row, real, w, s, column % 16, depth, blocks, FMT, CODES, GROUP, SCALED, STEP, z,
                         ZERO_AT, SHIFT_AT)  # fmt: skip
    up = multiply_tile(zero, row, real, w + PANEL, s + SCALE_PANEL, column % 16, depth, blocks, FMT, CODES, GROUP,
                       SCALED, STEP, up_z, ZERO_AT, SHIFT_AT)  # fmt: skip
    inside = real[:, None] & (column < width)[None, :]
    if BIASED:
        bias = biases + _expert_of(order, first, ids, tile) * 2 * width + column
        gate += tl.load(bias, column < width, other=0.0)[None, :]
        up += tl.load(bias + width, column < width, other=0.0)[None, :]
    if GATED:
        y = activated(gate, up, KIND, ALPHA, LIMIT)
        tl.store(hidden + pair[:, None] * width + column[None, :], y.to(tl.bfloat16), inside)
    else:
        to = hidden + pair[:, None] * 2 * width + column[None, :]
        tl.store(to, relu2(gate).to(tl.bfloat16), inside)
        tl.store(to + width, relu2(up).to(tl.bfloat16), inside)


@triton.jit
def _down(hidden, words, scales, zeros, order, slots, first, end, ids, biases, weights, partial, depth, blocks, columns,
          word_stride, scale_stride, panels, FMT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
          SCALED: tl.constexpr, PANEL: tl.constexpr, SCALE_PANEL: tl.constexpr, SCALE_AT: tl.constexpr,
          STEP: tl.constexpr, BIASED: tl.constexpr, ZERO_AT: tl.constexpr, SHIFT_AT: tl.constexpr,
          WORD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(slots + tile).to(tl.int64)
    if slot < 0:
        return
    i = tl.load(first + tile) + tl.arange(0, BM)
    real = i < tl.load(end + tile)
    pair = tl.load(order + i, real, other=0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    panel = tl.minimum(column // 16, panels - 1)
    w = words + slot * word_stride + panel * PANEL + column % 16
    s = scales + slot * scale_stride + panel * SCALE_PANEL + SCALE_AT
    acc = tl.zeros([BM, BN], tl.float32)
    z = zeros
    if ZERO_AT:
        z = zeros + (slot * word_stride + panel * PANEL) * WORD + ZERO_AT + column % 16
    y = multiply_tile(acc, hidden + pair * (depth // 2), real, w, s, column % 16, depth, blocks, FMT, CODES, GROUP,
                      SCALED, STEP, z, ZERO_AT, SHIFT_AT)  # fmt: skip
    if BIASED:
        bias = biases + _expert_of(order, first, ids, tile) * columns + column
        y += tl.load(bias, column < columns, other=0.0)[None, :]
    y *= tl.load(weights + pair, real, other=0.0)[:, None]
    tl.store(
        partial + pair[:, None] * columns + column[None, :], y, real[:, None] & (column < columns)[None, :]
    )


def tile_step(panels: Panels) -> int:
    """Words along k that are unpacked at a time."""
    return 16 if panels.codes == 8 else 32


def gate_up(
    x: Tensor, pool: Tensor, panels: Panels, stride: int, tiles: RowTiles, routing: Routing, between: ExpertActivation
) -> Tensor:
    """As `expert_rows.gate_up`."""
    views = expert_views(pool, 0, panels)
    bias, pairs = between.gate_up, routing.ids.numel()
    hidden = x.new_empty((pairs, between.width))
    _gate_up[(len(tiles.slots), triton.cdiv(between.rows, COLUMNS))](
        x.view(torch.int32), *views, tiles.order, tiles.slots, tiles.first,
        tiles.end, routing.ids,
        hidden if bias is None else bias, hidden, panels.depth, panels.blocks, between.rows,
        stride // panels.word_bytes, stride // panels.scale_bytes, panels.panels, TOP_K=routing.ids.shape[1],
        **panels.expert_constants(), STEP=tile_step(panels), **between.constants(), BM=ROWS, BN=COLUMNS, num_warps=4,
    )  # fmt: skip
    return hidden


def down(
    hidden: Tensor,
    pool: Tensor,
    offset: int,
    panels: Panels,
    stride: int,
    tiles: RowTiles,
    routing: Routing,
    bias: Tensor | None,
) -> Tensor:
    """As `expert_rows.down`."""
    views = expert_views(pool, offset, panels)
    partial = hidden.new_empty((routing.weights.numel(), panels.columns), dtype=torch.float32)
    _down[(len(tiles.slots), triton.cdiv(panels.columns, COLUMNS))](
        hidden.view(torch.int32), *views, tiles.order, tiles.slots, tiles.first,
        tiles.end, routing.ids,
        partial if bias is None else bias, routing.weights, partial,
        panels.depth, panels.blocks, panels.columns, stride // panels.word_bytes, stride // panels.scale_bytes,
        panels.panels, **panels.expert_constants(), STEP=tile_step(panels), BIASED=bias is not None,
        BM=ROWS, BN=COLUMNS, num_warps=4,
    )  # fmt: skip
    return partial
