"""Parts that kernels of gated delta nets share: columns of a row, gates, the convolution's rounding, the norm."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import triton
import triton.language as tl

from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import columns_of

COLUMN_NAMES = "Q", "K", "V", "Z", "B", "A"  # B: beta; A: of the decay


@cache
def constants(shape: DeltaRule) -> Mapping[str, int]:
    """Sizes and columns of a shape, as kernels take them."""
    names = [f"{name}_{part}" for name in COLUMN_NAMES for part in ("FIRST", "STEP")]
    numbers = [number for columns in columns_of(shape) for number in columns]
    return dict(zip(names, numbers, strict=True)) | {
        "K_HEADS": shape.k_heads, "GROUP": shape.v_heads // shape.k_heads, "K_DIM": shape.k_dim, "V_DIM": shape.v_dim,
        "CONV": shape.conv, "KB": block_of(shape.k_dim), "VB": block_of(shape.v_dim),
        "SIGMOID": int(shape.gate == "sigmoid"),
    }  # fmt: skip


def block_of(dim: int) -> int:
    """Channels of a tile: the least that tensor cores multiply is 16."""
    return max(16, int(triton.next_power_of_2(dim)))


@triton.jit
def add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def softplus(x):
    """log(1 + exp(x)), accurate where it is small: decays near 1 are multiplied over whole contexts."""
    z = tl.exp(-tl.abs(x))
    w = z / (2.0 + z)  # log(1 + z) is 2 artanh(w), w <= 1/3
    square = w * w
    tail = 1.0 / 9 + square * (1.0 / 11 + square * (1.0 / 13 + square * (1.0 / 15 + square * (1.0 / 17))))
    series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * tail)))
    return tl.maximum(x, 0.0) + 2.0 * w * series


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def gates_of(gates, decay, dt_bias, row, head, inside, GROUP: tl.constexpr, GATES: tl.constexpr, B_FIRST: tl.constexpr,
             B_STEP: tl.constexpr, A_FIRST: tl.constexpr, A_STEP: tl.constexpr):  # fmt: skip
    """beta and the logarithm of the decay of rows `row` and value head `head`, float32, where `inside`."""
    own, at = head % GROUP, gates + row * GATES
    b = tl.load(at + B_FIRST + head // GROUP * B_STEP + own, inside, other=0.0).to(tl.float32)
    a = tl.load(at + A_FIRST + head // GROUP * A_STEP + own, inside, other=0.0).to(tl.float32)
    return tl.sigmoid(b), decay * softplus(a + dt_bias)


@triton.jit
def activated(summed, kind: tl.constexpr):
    """silu of the convolution's sums, rounded before and after, float32."""
    return silu(summed.to(kind).to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def normed(y, mean_square, weight, z, eps, SIGMOID: tl.constexpr, kind: tl.constexpr):
    """The norm of y, which is rounded already, gated by silu or the sigmoid of z; all float32."""
    unit = (y * tl.rsqrt(mean_square + eps)).to(kind).to(tl.float32)
    gate = tl.sigmoid(z) if SIGMOID else silu(z)
    return ((weight * unit).to(kind).to(tl.float32) * gate).to(kind)


@triton.jit
def keep_inputs(kept, q, k, v, i, j, in_k, in_v, key_head, head, own, K_HEADS: tl.constexpr, K_DIM: tl.constexpr,
          V_DIM: tl.constexpr):  # fmt: skip
    """A token's inputs into its place; the first of the value heads that share a key head keeps that one's."""
    kind: tl.constexpr = kept.dtype.element_ty
    tl.store(kept + key_head * K_DIM + i, q.to(kind), in_k & (own == 0))
    tl.store(kept + (K_HEADS + key_head) * K_DIM + i, k.to(kind), in_k & (own == 0))
    tl.store(kept + 2 * K_HEADS * K_DIM + head * V_DIM + j, v.to(kind), in_v)
