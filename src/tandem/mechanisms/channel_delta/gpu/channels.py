"""GPU kernels around the recurrence of delta nets with a decay for each channel: one before it, one behind.

A program has some pairs of a row and a head, in the order in which they lie.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.mechanisms.channel_delta.torch import ChannelGates, ChannelWeights
from tandem.mechanisms.delta_net.gpu.parts import softplus
from tandem.mechanisms.delta_net.torch import UNIT_EPS
from tandem.mechanisms.recurrence.tokens import RecurrentTokens

PAIRS = 8  # of a program


@triton.jit
def _unit(x, scale, unit_eps):
    return x * (tl.rsqrt(tl.sum(x * x, 1) + unit_eps) * scale)[:, None]


@triton.jit(do_not_specialize=["pairs"])
def _keyed(mixed, forget, beta, decay, bias, queries, written, values, logs, betas, pairs, beta_stride, scale, unit_eps,
           floor, HEADS: tl.constexpr, DIM: tl.constexpr, DB: tl.constexpr, PAIRS: tl.constexpr,
           BOUNDED: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """BOUNDED: no logarithm of a decay is below `floor`."""
    begin(OVERLAP)
    n, c = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, DB)
    row, head, real = n // HEADS, n % HEADS, n < pairs
    mask, to = real[:, None] & (c < DIM)[None, :], n[:, None] * DIM + c[None, :]
    at = mixed + ((row * 3 * HEADS + head) * DIM)[:, None] + c[None, :]
    q = tl.load(at, mask, other=0.0)
    k = tl.load(at + HEADS * DIM, mask, other=0.0)
    tl.store(values + to, tl.load(at + 2 * HEADS * DIM, mask, other=0.0), mask)
    tl.store(queries + to, _unit(q, scale, unit_eps), mask)
    tl.store(written + to, _unit(k, 1.0, unit_eps), mask)
    x = tl.load(forget + to, mask, other=0.0).to(tl.float32)
    x += tl.load(bias + (head * DIM)[:, None] + c[None, :], mask, other=0.0)
    rate = tl.load(decay + head, real, other=0.0)[:, None]
    tl.store(logs + to, floor * tl.sigmoid(-rate * x) if BOUNDED else softplus(x) * rate, mask)
    b = tl.load(beta + row * beta_stride + head, real, other=0.0)
    tl.store(betas + n, tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32), real)


@triton.jit(do_not_specialize=["pairs"])
def _normed(answers, behind, norm, copied, out, pairs, eps, HEADS: tl.constexpr, DIM: tl.constexpr, DB: tl.constexpr,
            PAIRS: tl.constexpr, COPIES: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """COPIES: a row gives what row `copied` of it gives."""
    begin(OVERLAP)
    n, c = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, DB)
    real, head, row = n < pairs, n % HEADS, n // HEADS
    if COPIES:
        row = tl.load(copied + row, real, other=0)
    mask, at = real[:, None] & (c < DIM)[None, :], ((row * HEADS + head) * DIM)[:, None] + c[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    y = tl.load(answers + at, mask, other=0.0).to(kind).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 1) / DIM + eps)[:, None] * tl.load(norm + c, c < DIM, other=0.0)[None, :]
    gate = tl.sigmoid(tl.load(behind + at, mask, other=0.0).to(tl.float32))
    tl.store(out + n[:, None] * DIM + c[None, :], (y * gate).to(kind), mask)


def keyed(mixed: Tensor, gates: ChannelGates, weights: ChannelWeights) -> RecurrentTokens:
    """As `channel_tokens`."""
    rows, heads, dim = len(mixed), len(weights.decay), len(weights.norm)
    queries, written, values, decay = mixed.new_empty((4, rows, heads, dim)).unbind()
    tokens, pairs = RecurrentTokens(queries, written, values, decay, mixed.new_empty((rows, heads))), rows * heads
    _keyed[(triton.cdiv(pairs, PAIRS),)](
        mixed.contiguous(), gates.forget.contiguous(), gates.beta, weights.decay, weights.bias, *tokens, pairs,
        gates.beta.stride(0), dim**-0.5, UNIT_EPS, weights.floor, HEADS=heads, DIM=dim, DB=triton.next_power_of_2(dim),
        PAIRS=PAIRS, BOUNDED=weights.floor < 0, num_warps=4, **overlapped(mixed.device),
    )  # fmt: skip
    return tokens


def normed(answers: Tensor, behind: Tensor, copied: Tensor | None, weights: ChannelWeights) -> Tensor:
    """As `channel_result`. copied: of which row each has the result, where rows may fill up a graph."""
    rows, heads, dim = answers.shape
    out, pairs = behind.new_empty((rows, heads * dim)), rows * heads
    _normed[(triton.cdiv(pairs, PAIRS),)](
        answers, behind.contiguous(), weights.norm, answers if copied is None else copied, out, pairs, weights.eps,
        HEADS=heads, DIM=dim, DB=triton.next_power_of_2(dim), PAIRS=PAIRS, COPIES=copied is not None, num_warps=4,
        **overlapped(answers.device),
    )  # fmt: skip
    return out
