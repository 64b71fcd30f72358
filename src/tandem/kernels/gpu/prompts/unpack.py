"""Panels of experts that lie side by side, as the bfloat16 numbers that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.code_tiles import panel_numbers
from tandem.kernels.gpu.panels import Panels, expert_views

WORDS = 128  # along k, of a program


@triton.jit(do_not_specialize=["pieces", "keys", "key", "slot"], do_not_specialize_on_alignment=["counts"])
def _unpack(words, scales, zeros, counts, out, pieces, keys, key, slot, word_stride, scale_stride, depth, blocks,
            columns, halves, FMT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr,
            PANEL: tl.constexpr, SCALE_PANEL: tl.constexpr, SCALE_AT: tl.constexpr, ZERO_AT: tl.constexpr,
            SHIFT_AT: tl.constexpr, WORD: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """halves: 2 where panels of two matrices alternate, which come one after the other in `out`."""
    expert = tl.program_id(2)
    rows = 0
    for piece in range(pieces):
        rows += tl.load(counts + piece * keys + key + expert)
    if rows == 0:
        return
    panel, lane = tl.program_id(0), tl.arange(0, 16)
    at = (slot + expert).to(tl.int64)
    if ZERO_AT:
        zeros += (at * word_stride + panel * PANEL) * WORD + ZERO_AT
    words += at * word_stride + panel * PANEL
    scales += at * scale_stride + panel * SCALE_PANEL + SCALE_AT
    value = panel_numbers(words, scales, tl.program_id(1), blocks, FMT, CODES, GROUP, SCALED, STEP, zeros,
                          ZERO_AT, SHIFT_AT)  # fmt: skip
    row = panel // halves * 16 + lane
    k = tl.program_id(1) * STEP * CODES + tl.arange(0, STEP * CODES)
    out += (expert.to(tl.int64) * halves + panel % halves) * columns * depth
    tl.store(out + row[:, None] * depth + k[None, :], value, (row < columns)[:, None] & (k < depth)[None, :])


@dataclass(frozen=True, slots=True)
class Packed:
    """Experts side by side in GPU memory: from slot `slot` of `pool`, uint8, on, `stride` bytes each."""

    pool: Tensor
    stride: int
    slot: int


def unpack(
    packed: Packed, offset: int, panels: Panels, halves: int, counts: Tensor, key: int, out: Tensor
) -> Tensor:
    """out bfloat16 [experts, halves * columns, K]: of matrices whose panels begin at byte `offset` of each expert;
    halves: 2 for gate and up, whose panels alternate. counts int32 [pieces, keys]: experts from key `key` on whose
    counts are all 0 stay unwritten."""
    words, scales, zeros = expert_views(packed.pool, offset, panels)
    grid = panels.panels, triton.cdiv(panels.blocks, WORDS), len(out)
    _unpack[grid](
        words, scales, zeros, counts, out, len(counts), counts.shape[1], key,
        packed.slot, packed.stride // panels.word_bytes, packed.stride // panels.scale_bytes, panels.depth,
        panels.blocks, out.shape[1] // halves, halves, **panels.expert_constants(), STEP=WORDS, num_warps=4,
    )  # fmt: skip
    return out
