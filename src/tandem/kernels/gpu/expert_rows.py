"""Few rows: every (token, expert) pair streams its expert's weights once and multiplies them in float32.

Three kernels: gate and up with the activation, down, and the sum over a token's experts. A pair whose slot is below 0
lives elsewhere and is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.gpu.mlp import activated, activation_constants, relu2
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
from tandem.kernels.ops import ExpertBiases, Routing
from tandem.spec.activation import SILU, Activation


@triton.jit
def dot_panel(x, words, scales, depth, blocks, FMT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
              SCALED: tl.constexpr, STEP: tl.constexpr, zeros=None, ZERO_AT: tl.constexpr = 0,
              SHIFT_AT: tl.constexpr = 0):  # fmt: skip
    """x (bfloat16 pairs, [depth / 2]) times one panel: float32 [16]. With ZERO_AT `zeros` points at its zero points,
    of a codebook at its table; with SHIFT_AT its offsets lie so far behind its scales."""
    r, b = tl.arange(0, 16), tl.arange(0, STEP)
    acc = tl.zeros([STEP, 16], tl.float32)
    for start in range(0, blocks, STEP):
        at = start + b
        inside = (at < blocks)[:, None]
        word, upper = block_words(words, at[:, None], r[None, :], inside, FMT, zeros)
        part = tl.zeros([STEP, 16], tl.float32)
        total = tl.zeros([STEP], tl.float32)  # of x: an offset is added to every weight of its group
        zero = 0.0
        if ZERO_AT:
            zero = tl.load(zeros + (at // GROUP)[:, None] * 16 + r[None, :], inside, other=0).to(tl.float32)
        for pair in tl.static_range(CODES // 2):
            k = at * (CODES // 2) + pair
            even, odd = halves(tl.load(x + k, k < depth // 2, other=0))
            part += even[:, None] * (plane(word, upper, 2 * pair, FMT) - zero)
            part += odd[:, None] * (plane(word, upper, 2 * pair + 1, FMT) - zero)
            if SHIFT_AT:
                total += even + odd
        if SCALED and GROUP:
            part *= group_values(scales, (at // GROUP)[:, None], r[None, :], inside, SCALED)
        if SHIFT_AT:
            shift = group_offsets(scales + SHIFT_AT, (at // GROUP)[:, None], r[None, :], inside, SCALED)
            part += total[:, None] * shift
        acc += part
    y = tl.sum(acc, 0)
    if SCALED and not GROUP:
        y *= scale_value(tl.load(scales + r), SCALED)
    if SCALED == 3:
        y *= row_factor(scales, r)
    return y


@triton.jit
def _gate_up(x, words, scales, zeros, slots, ids, biases, hidden, depth, blocks, width, word_stride, scale_stride,
             TOP_K: tl.constexpr, FMT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr,
             PANEL: tl.constexpr, SCALE_PANEL: tl.constexpr, SCALE_AT: tl.constexpr, STEP: tl.constexpr,
             KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
             ZERO_AT: tl.constexpr, SHIFT_AT: tl.constexpr, WORD: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    pair, panel = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + pair).to(tl.int64)
    if slot < 0:
        return
    row = x + pair // TOP_K * (depth // 2)
    words += slot * word_stride + 2 * panel * PANEL
    scales += slot * scale_stride + 2 * panel * SCALE_PANEL + SCALE_AT
    up_zeros = zeros
    if ZERO_AT:
        zeros += (slot * word_stride + 2 * panel * PANEL) * WORD + ZERO_AT
        up_zeros = zeros + PANEL * WORD
    gate = dot_panel(row, words, scales, depth, blocks, FMT, CODES, GROUP, SCALED, STEP, zeros, ZERO_AT, SHIFT_AT)
    up = dot_panel(row, words + PANEL, scales + SCALE_PANEL, depth, blocks, FMT, CODES, GROUP, SCALED, STEP,
                   up_zeros, ZERO_AT, SHIFT_AT)  # fmt: skip
    column = panel * 16 + tl.arange(0, 16)
    inside = column < width
    if BIASED:
        bias = biases + tl.load(ids + pair).to(tl.int64) * 2 * width + column
        gate += tl.load(bias, inside, other=0.0)
        up += tl.load(bias + width, inside, other=0.0)
    if GATED:
        y = activated(gate, up, KIND, ALPHA, LIMIT)
        tl.store(hidden + pair * width + column, y.to(tl.bfloat16), inside)
    else:
        tl.store(hidden + pair * 2 * width + column, relu2(gate).to(tl.bfloat16), inside)
        tl.store(hidden + (pair * 2 + 1) * width + column, relu2(up).to(tl.bfloat16), inside)


@triton.jit
def _down(hidden, words, scales, zeros, slots, ids, biases, weights, partial, depth, blocks, columns, word_stride,
          scale_stride, FMT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr,
          PANEL: tl.constexpr, SCALE_PANEL: tl.constexpr, SCALE_AT: tl.constexpr, STEP: tl.constexpr,
          BIASED: tl.constexpr, ZERO_AT: tl.constexpr, SHIFT_AT: tl.constexpr, WORD: tl.constexpr,
          OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    pair, panel = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + pair).to(tl.int64)
    if slot < 0:
        return
    words += slot * word_stride + panel * PANEL
    scales += slot * scale_stride + panel * SCALE_PANEL + SCALE_AT
    if ZERO_AT:
        zeros += (slot * word_stride + panel * PANEL) * WORD + ZERO_AT
    row = hidden + pair * (depth // 2)
    y = dot_panel(row, words, scales, depth, blocks, FMT, CODES, GROUP, SCALED, STEP, zeros, ZERO_AT, SHIFT_AT)
    column = panel * 16 + tl.arange(0, 16)
    if BIASED:
        y += tl.load(biases + tl.load(ids + pair).to(tl.int64) * columns + column, column < columns, other=0.0)
    tl.store(partial + pair * columns + column, y * tl.load(weights + pair), column < columns)


@triton.jit
def _combine(partial, slots, addend, out, columns, TOP_K: tl.constexpr, PAIRS: tl.constexpr, HAS_MORE: tl.constexpr,
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
        total += tl.load(addend + t * columns + column, inside, other=0.0)
    tl.store(out + t * columns + column, total.to(out.dtype.element_ty), inside)


def row_step(panels: Panels) -> int:
    """Words along k per step, whose loads are in flight together. Of 32 to 256, a quarter of them was best or near it
    on an H200 (1 and 8 tokens, bf16 and int4, Qwen3-30B-A3B's shapes)."""
    return min(256, max(32, int(triton.next_power_of_2(panels.blocks // 4))))


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """Activation between an expert's products, and the biases that are added to them. These are float32 gate_up
    [E, 2 rows] and down [E, columns], of all experts, wherever they lie; None: nothing."""

    width: int  # of the intermediate activations
    activation: Activation = SILU
    gate_up: Tensor | None = None
    down: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of gate, and of up; without a gate halves of up."""
        return self.width if self.activation.gated else self.width // 2

    def biased(self, biases: ExpertBiases, device: torch.device) -> ExpertActivation:
        """With these, of all experts, on the device."""
        gate_up = torch.cat((biases.gate, biases.up), 1)
        return replace(self, gate_up=gate_up.to(device), down=biases.down.to(device))

    def constants(self) -> dict[str, float]:
        how = self.activation
        return {**activation_constants(how), "GATED": how.gated, "BIASED": self.gate_up is not None}


def slots_of(routing: Routing) -> Tensor:
    """Where the chosen experts lie, which GPU kernels always ask for."""
    assert routing.slots is not None
    return routing.slots


def gate_up(
    x: Tensor, pool: Tensor, panels: Panels, stride: int, routing: Routing, between: ExpertActivation
) -> Tensor:
    """The activation of every pair: x bfloat16 [T, depth], slots [T, k] -> bfloat16 [T * k, width]."""
    views = expert_views(pool, 0, panels)
    slots, bias = slots_of(routing), between.gate_up
    hidden = x.new_empty((slots.numel(), between.width))
    _gate_up[(slots.numel(), panels.panels // 2)](
        x.view(torch.int32), *views, slots, routing.ids,
        hidden if bias is None else bias, hidden, panels.depth, panels.blocks, between.rows,
        stride // panels.word_bytes, stride // panels.scale_bytes, TOP_K=slots.shape[1], **panels.expert_constants(),
        STEP=row_step(panels), **between.constants(), num_warps=4, **overlapped(x.device),
    )  # fmt: skip
    return hidden


def down(
    hidden: Tensor, pool: Tensor, offset: int, panels: Panels, stride: int, routing: Routing, bias: Tensor | None
) -> Tensor:
    """weight * down of every pair: float32 [T * k, columns], unwritten where the slot is below 0."""
    views = expert_views(pool, offset, panels)
    slots = slots_of(routing)
    partial = hidden.new_empty((slots.numel(), panels.columns), dtype=torch.float32)
    _down[(slots.numel(), panels.panels)](
        hidden.view(torch.int32), *views, slots, routing.ids,
        partial if bias is None else bias,
        routing.weights, partial, panels.depth, panels.blocks, panels.columns,
        stride // panels.word_bytes, stride // panels.scale_bytes, **panels.expert_constants(), STEP=row_step(panels),
        BIASED=bias is not None, num_warps=4, **overlapped(hidden.device),
    )  # fmt: skip
    return partial


def combine(partial: Tensor, slots: Tensor | None, out: Tensor, addend: Tensor | None = None) -> Tensor:
    """The sum of a token's pairs, or what is one already, plus `addend` (float32 [T, columns]), into out
    [T, columns]."""
    rows, columns = out.shape
    _combine[(rows, triton.cdiv(columns, 1024))](
        partial, partial if slots is None else slots, partial if addend is None else addend, out, columns,
        TOP_K=1 if slots is None else slots.shape[1], PAIRS=slots is not None, HAS_MORE=addend is not None,
        BLOCK=1024, num_warps=4, **overlapped(out.device),
    )  # fmt: skip
    return out
