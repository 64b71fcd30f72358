"""Rows around the grouped products: they are brought together, gate and up become one, and a token's results are
added. Biases are added to products as they are read, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.expert_rows import ExpertActivation
from tandem.kernels.gpu.mlp import activated, relu2
from tandem.kernels.gpu.prompts.order import Order
from tandem.kernels.ops import Routing

COLUMNS = 1024
GATED_ROWS, GATED_COLUMNS = 8, 256


@triton.jit
def _places(keys, ranks, first, t, head, tail, TOP_K: tl.constexpr, PAIRS: tl.constexpr):
    """Rows of token t's pairs in the part of keys [head, tail), and which pairs are in it."""
    k = tl.arange(0, PAIRS)
    key = tl.load(keys + t * TOP_K + k, k < TOP_K, other=-1)
    here = (key >= head) & (key < tail)
    row = tl.load(first + key, here, other=0) + tl.load(ranks + t * TOP_K + k, here, other=0)
    return row.to(tl.int64), here


@triton.jit(do_not_specialize=["head", "tail"], do_not_specialize_on_alignment=["first"])
def _gather(x, keys, ranks, first, ids, out, whose, width, head, tail, TOP_K: tl.constexpr, PAIRS: tl.constexpr,
            BLOCK: tl.constexpr, BIASED: tl.constexpr, REORDERED: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    row, here = _places(keys, ranks, first, t, head, tail, TOP_K, PAIRS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = column
    if REORDERED:  # the inverse of wgmma_product.REORDERED
        source = column // 32 * 32 + column // 2 % 4 * 8 + column // 8 % 4 * 2 + column % 2
    value = tl.load(x + t * width + source, column < width)
    at = out + row[:, None] * width + column[None, :]
    tl.store(at, tl.broadcast_to(value[None, :], [PAIRS, BLOCK]), here[:, None] & (column < width)[None, :])
    if BIASED and tl.program_id(1) == 0:
        tl.store(whose + row, tl.load(ids + t * TOP_K + tl.arange(0, PAIRS), here, other=0), here)


@triton.jit(do_not_specialize_on_alignment=["last"])
def _between(gate_up, last, whose, biases, width, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
             GATED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Written where gates were: nobody else reads a program's tile."""
    begin, end = tl.program_id(0).to(tl.int64) * ROWS, tl.load(last)
    if begin >= end:
        return
    row, column = begin + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < end)[:, None] & (column < width)[None, :]
    at = gate_up + row[:, None] * 2 * width + column[None, :]
    gate = tl.load(at, inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, inside, other=0.0).to(tl.float32)
    if BIASED:
        expert = tl.load(whose + row, row < end, other=0).to(tl.int64)
        bias = biases + expert[:, None] * 2 * width + column[None, :]
        gate += tl.load(bias, inside, other=0.0)
        up += tl.load(bias + width, inside, other=0.0)
    if GATED:
        y = activated(gate, up, KIND, ALPHA, LIMIT)
        tl.store(at, y.to(tl.bfloat16), inside)
    else:
        tl.store(at, relu2(gate).to(tl.bfloat16), inside)
        tl.store(at + width, relu2(up).to(tl.bfloat16), inside)


@triton.jit(do_not_specialize=["head", "tail"], do_not_specialize_on_alignment=["first"])
def _add(down, keys, ranks, first, ids, weights, biases, sums, width, head, tail, TOP_K: tl.constexpr,
         PAIRS: tl.constexpr, NEW: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    row, here = _places(keys, ranks, first, t, head, tail, TOP_K, PAIRS)
    if (not NEW) and tl.sum(here.to(tl.int32), 0) == 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    k = tl.arange(0, PAIRS)
    weight = tl.load(weights + t * TOP_K + k, here, other=0.0)
    at = down + row[:, None] * width + column[None, :]
    value = tl.load(at, here[:, None] & inside[None, :], other=0.0).to(tl.float32)
    if BIASED:
        expert = tl.load(ids + t * TOP_K + k, here, other=0).to(tl.int64)
        bias = biases + expert[:, None] * width + column[None, :]
        value += tl.load(bias, here[:, None] & inside[None, :], other=0.0)
    total = tl.sum(value * weight[:, None], 0)
    if not NEW:
        total += tl.load(sums + t * width + column, inside, other=0.0)
    tl.store(sums + t * width + column, total, inside)


def gather(
    x: Tensor, order: Order, ids: Tensor | None, keys: range, reordered: bool = False, spare: int = 0
) -> tuple[Tensor, Tensor]:
    """x bfloat16 [T, H] -> [T * k + spare, H]: the rows of the part that `keys` are, then nothing that means anything.
    With ids int32 [T, k] also whose row each is, int32 [T * k]. reordered: as wgmma takes k
    (`wgmma_product.REORDERED`)."""
    tokens, k = order.keys.shape
    out = x.new_empty((tokens * k + spare, x.shape[1]))
    whose = order.keys if ids is None else torch.empty_like(order.keys)
    _gather[(tokens, triton.cdiv(x.shape[1], COLUMNS))](
        x, order.keys, order.ranks, order.first, order.keys if ids is None else ids, out, whose, x.shape[1],
        keys.start, keys.stop, TOP_K=k, PAIRS=triton.next_power_of_2(k), BLOCK=COLUMNS, BIASED=ids is not None,
        REORDERED=reordered, num_warps=4,
    )  # fmt: skip
    return out, whose


def activate(gate_up: Tensor, ends: Tensor, whose: Tensor, between: ExpertActivation) -> Tensor:
    """bfloat16 [rows, 2 width], gates first -> their activation, [rows, width], of the first ends[-1] rows, where the
    gates were. Without gates [rows, width] -> [rows, width]. whose int32 [rows]: read where experts have biases."""
    rows, width = gate_up.shape[0], between.rows
    biases = gate_up if between.gate_up is None else between.gate_up
    _between[triton.cdiv(rows, GATED_ROWS), triton.cdiv(width, GATED_COLUMNS)](
        gate_up, ends[-1:], whose, biases, width, **between.constants(), ROWS=GATED_ROWS, BLOCK=GATED_COLUMNS,
        num_warps=4,
    )  # fmt: skip
    return gate_up[:, : between.width]


def add(
    down: Tensor, order: Order, routing: Routing, bias: Tensor | None, sums: Tensor, keys: range, new: bool
) -> None:
    """Each token's weighted results of the part that `keys` are: to float32 [T, H]; new: written there, zeros where a
    token has none. bias: of all experts, float32 [E, H]."""
    tokens, k = order.keys.shape
    _add[(tokens, triton.cdiv(sums.shape[1], COLUMNS))](
        down, order.keys, order.ranks, order.first, routing.ids, routing.weights, down if bias is None else bias,
        sums, sums.shape[1], keys.start, keys.stop, TOP_K=k, PAIRS=triton.next_power_of_2(k), NEW=new,
        BIASED=bias is not None, BLOCK=COLUMNS, num_warps=4,
    )  # fmt: skip
