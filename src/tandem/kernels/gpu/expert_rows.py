"""Few rows: every (token, expert) pair streams its expert's weights once and multiplies them in float32.

Three kernels: gate and up with the activation, down, and the sum over a token's experts. A pair whose slot is below 0
lives elsewhere and is skipped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.overlap import begin, overlapped
from tandem.kernels.gpu.panels import Panels, halves, plane, row_factor, scale_value, views


@triton.jit
def dot_panel(x, words, scales, depth, blocks, FMT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
              SCALED: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """x (bfloat16 pairs, [depth / 2]) times one panel: float32 [16]."""
    r, b = tl.arange(0, 16), tl.arange(0, STEP)
    acc = tl.zeros([STEP, 16], tl.float32)
    for start in range(0, blocks, STEP):
        at = start + b
        word = tl.load(words + at[:, None] * 16 + r[None, :], (at < blocks)[:, None], other=0)
        part = tl.zeros([STEP, 16], tl.float32)
        for pair in tl.static_range(CODES // 2):
            k = at * (CODES // 2) + pair
            even, odd = halves(tl.load(x + k, k < depth // 2, other=0))
            part += even[:, None] * plane(word, 2 * pair, FMT)
            part += odd[:, None] * plane(word, 2 * pair + 1, FMT)
        if SCALED and GROUP:
            raw = tl.load(scales + (at // GROUP)[:, None] * 16 + r[None, :], (at < blocks)[:, None], other=0)
            part *= scale_value(raw, SCALED)
        acc += part
    y = tl.sum(acc, 0)
    if SCALED and not GROUP:
        y *= scale_value(tl.load(scales + r), SCALED)
    if SCALED == 3:
        y *= row_factor(scales, r)
    return y


@triton.jit
def _gate_up(x, words, scales, slots, hidden, depth, blocks, width, word_stride, scale_stride,
             TOP_K: tl.constexpr, FMT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr,
             PANEL: tl.constexpr, SCALE_PANEL: tl.constexpr, SCALE_AT: tl.constexpr, STEP: tl.constexpr,
             OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    pair, panel = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + pair).to(tl.int64)
    if slot < 0:
        return
    row = x + pair // TOP_K * (depth // 2)
    words += slot * word_stride + 2 * panel * PANEL
    scales += slot * scale_stride + 2 * panel * SCALE_PANEL + SCALE_AT
    gate = dot_panel(row, words, scales, depth, blocks, FMT, CODES, GROUP, SCALED, STEP)
    up = dot_panel(row, words + PANEL, scales + SCALE_PANEL, depth, blocks, FMT, CODES, GROUP, SCALED, STEP)
    column = panel * 16 + tl.arange(0, 16)
    y = gate * tl.sigmoid(gate) * up
    tl.store(hidden + pair * width + column, y.to(tl.bfloat16), column < width)


@triton.jit
def _down(hidden, words, scales, slots, weights, partial, depth, blocks, columns, word_stride, scale_stride,
          FMT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr,
          PANEL: tl.constexpr, SCALE_PANEL: tl.constexpr, SCALE_AT: tl.constexpr, STEP: tl.constexpr,
             OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    pair, panel = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + pair).to(tl.int64)
    if slot < 0:
        return
    words += slot * word_stride + panel * PANEL
    scales += slot * scale_stride + panel * SCALE_PANEL + SCALE_AT
    y = dot_panel(hidden + pair * (depth // 2), words, scales, depth, blocks, FMT, CODES, GROUP, SCALED, STEP)
    column = panel * 16 + tl.arange(0, 16)
    tl.store(partial + pair * columns + column, y * tl.load(weights + pair), column < columns)


@triton.jit
def _combine(partial, slots, elsewhere, out, columns, TOP_K: tl.constexpr, PAIRS: tl.constexpr, HAS_MORE: tl.constexpr,
             BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        here = inside
        if PAIRS:
            here = inside & (tl.load(slots + t * TOP_K + k) >= 0)
        total += tl.load(partial + (t * TOP_K + k) * columns + column, here, other=0.0)
    if HAS_MORE:
        total += tl.load(elsewhere + t * columns + column, inside, other=0.0)
    tl.store(out + t * columns + column, total.to(out.dtype.element_ty), inside)


def row_step(panels: Panels) -> int:
    """Words along k per step, whose loads are in flight together. Of 32 to 256, a quarter of them was best or near it
    on an H200 (1 and 8 tokens, bf16 and int4, Qwen3-30B-A3B's shapes)."""
    return min(256, max(32, int(triton.next_power_of_2(panels.blocks // 4))))


def gate_up(x: Tensor, pool: Tensor, panels: Panels, stride: int, slots: Tensor, width: int) -> Tensor:
    """silu(gate) * up of every pair: x bfloat16 [T, depth], slots [T, k] -> bfloat16 [T * k, width]."""
    words, scales = views(pool, 0, panels)
    hidden = x.new_empty((slots.numel(), width))
    _gate_up[(slots.numel(), panels.panels // 2)](
        x.view(torch.int32), words, scales, slots, hidden, panels.depth, panels.blocks, width,
        stride // panels.word_bytes, stride // panels.scale_bytes,
        TOP_K=slots.shape[1], **panels.constants(), STEP=row_step(panels), num_warps=4,
        **overlapped(x.device),
    )  # fmt: skip
    return hidden


def down(
    hidden: Tensor, pool: Tensor, offset: int, panels: Panels, stride: int, slots: Tensor, weights: Tensor
) -> Tensor:
    """weight * down of every pair: float32 [T * k, columns], unwritten where the slot is below 0."""
    words, scales = views(pool, offset, panels)
    partial = hidden.new_empty((slots.numel(), panels.columns), dtype=torch.float32)
    _down[(slots.numel(), panels.panels)](
        hidden.view(torch.int32), words, scales, slots, weights, partial, panels.depth, panels.blocks, panels.columns,
        stride // panels.word_bytes, stride // panels.scale_bytes, **panels.constants(), STEP=row_step(panels),
        num_warps=4, **overlapped(hidden.device),
    )  # fmt: skip
    return partial


def combine(partial: Tensor, slots: Tensor | None, out: Tensor, elsewhere: Tensor | None = None) -> Tensor:
    """The sum of a token's pairs, or what is one already, plus `elsewhere` (float32 [T, columns]), into out
    [T, columns]."""
    rows, columns = out.shape
    _combine[(rows, triton.cdiv(columns, 1024))](
        partial, partial if slots is None else slots, partial if elsewhere is None else elsewhere, out, columns,
        TOP_K=1 if slots is None else slots.shape[1], PAIRS=slots is not None, HAS_MORE=elsewhere is not None,
        BLOCK=1024, num_warps=4, **overlapped(out.device),
    )  # fmt: skip
    return out
