"""GPU kernels around the recurrence of state spaces: one before it, one behind."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.mechanisms.delta_net.gpu.parts import silu, softplus
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.mechanisms.state_space.torch import SpaceInputs, SpaceWeights

PAIRS = 8  # of a row and a head, in a program


@triton.jit(do_not_specialize=["pairs"])
def _stepped(mixed, steps, decay, bias, queries, written, values, logs, pairs, steps_stride, HEADS: tl.constexpr,
             GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
             PAIRS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """The first head of a group copies what its heads share."""
    begin(OVERLAP)
    n, k, v = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, KB), tl.arange(0, VB)
    row, head, real, GROUPS = n // HEADS, n % HEADS, n < pairs, HEADS // GROUP
    step = tl.load(steps + row * steps_stride + head, real, other=0.0).to(tl.float32)
    long = softplus(step + tl.load(bias + head, real, other=0.0))
    tl.store(logs + n, long * tl.load(decay + head, real, other=0.0), real)
    mask, of_row = real[:, None] & (v < VALUES)[None, :], mixed + row * (HEADS * VALUES + 2 * GROUPS * KEYS)
    x = tl.load(of_row[:, None] + (head * VALUES)[:, None] + v[None, :], mask, other=0.0)
    tl.store(values + n[:, None] * VALUES + v[None, :], x * long[:, None], mask)
    group, mask = head // GROUP, (real & (head % GROUP == 0))[:, None] & (k < KEYS)[None, :]
    at = (of_row + HEADS * VALUES + group * KEYS)[:, None] + k[None, :]
    to = ((row * GROUPS + group) * KEYS)[:, None] + k[None, :]
    tl.store(written + to, tl.load(at, mask, other=0.0), mask)
    tl.store(queries + to, tl.load(at + GROUPS * KEYS, mask, other=0.0), mask)


@triton.jit
def _left(answers, mixed, gate, through, norm, copied, out, gate_stride, mixed_stride, eps, INNER: tl.constexpr,
          WIDTH: tl.constexpr, VALUES: tl.constexpr, WB: tl.constexpr, COPIES: tl.constexpr,
          OVERLAP: tl.constexpr):  # fmt: skip
    """WIDTH: of a group's results. COPIES: a row gives what row `copied` of it gives."""
    begin(OVERLAP)
    to, i = tl.program_id(0).to(tl.int64), tl.arange(0, WB)
    c, inside = tl.program_id(1) * WIDTH + i, i < WIDTH
    row = to
    if COPIES:
        row = tl.load(copied + to)
    y = tl.load(answers + row * INNER + c, inside, other=0.0)
    y += tl.load(mixed + row * mixed_stride + c, inside, other=0.0) * tl.load(through + c // VALUES, inside, other=0.0)
    y *= silu(tl.load(gate + row * gate_stride + c, inside, other=0.0).to(tl.float32))
    y *= tl.rsqrt(tl.sum(y * y) / WIDTH + eps) * tl.load(norm + c, inside, other=0.0)
    tl.store(out + to * INNER + c, y.to(out.dtype.element_ty), inside)


def stepped(inputs: SpaceInputs, weights: SpaceWeights) -> RecurrentTokens:
    """As `space_tokens`."""
    mixed, (rows, channels), heads, inner = inputs.mixed, inputs.mixed.shape, len(weights.decay), len(weights.norm)
    keys, width, pairs = (channels - inner) // 2 // weights.groups, inner // heads, rows * heads
    empty = mixed.new_empty
    queries, written = empty((2, rows, weights.groups, keys)).unbind()
    tokens = RecurrentTokens(queries, written, empty((rows, heads, width)), empty((rows, heads, 1)))
    _stepped[(triton.cdiv(pairs, PAIRS),)](
        mixed, inputs.steps, weights.decay, weights.bias, *tokens[:4], pairs, inputs.steps.stride(0), HEADS=heads,
        GROUP=heads // weights.groups, KEYS=keys, VALUES=width, KB=triton.next_power_of_2(keys),
        VB=triton.next_power_of_2(width), PAIRS=PAIRS, num_warps=4, **overlapped(mixed.device),
    )  # fmt: skip
    return tokens


def left(answers: Tensor, inputs: SpaceInputs, copied: Tensor | None, weights: SpaceWeights) -> Tensor:
    """As `space_result`. copied: of which row each has the result, where rows may fill up a graph."""
    rows, inner = len(answers), len(weights.norm)
    out, width = inputs.gate.new_empty((rows, inner)), inner // weights.groups
    _left[(rows, weights.groups)](
        answers, inputs.mixed, inputs.gate, weights.through, weights.norm, answers if copied is None else copied, out,
        inputs.gate.stride(0), inputs.mixed.stride(0), weights.eps, INNER=inner, WIDTH=width, VALUES=answers.shape[2],
        WB=triton.next_power_of_2(width), COPIES=copied is not None, num_warps=8 if width > 2048 else 4,
        **overlapped(answers.device),
    )  # fmt: skip
    return out
