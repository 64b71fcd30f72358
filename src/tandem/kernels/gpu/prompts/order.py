"""`Order`: where each (token, expert) pair's row lies among the rows of its expert, made without asking the GPU back.

Experts have keys: consecutive numbers in the order in which they are computed. A part is a run of keys that is computed
at once, and its rows begin at 0. Two pairs of one key may have either order: each row's product is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # pairs of a program


@dataclass(frozen=True, slots=True)
class Order:
    """int32: ranks [T, k] of pairs among those of their key; first and ends [keys]: a key's rows in its part."""

    keys: Tensor
    ranks: Tensor
    first: Tensor
    ends: Tensor


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["counts"])
def _rank(keys, counts, ranks, pairs, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + i, i < pairs, other=-1)
    tl.store(ranks + i, tl.atomic_add(counts + key, 1, key >= 0, sem="relaxed"), key >= 0)


@triton.jit(do_not_specialize=["keys"], do_not_specialize_on_alignment=["counts", "first", "ends"])
def _edges(counts, heads, first, ends, keys, BLOCK: tl.constexpr):
    key = tl.arange(0, BLOCK)
    count = tl.load(counts + key, key < keys, other=0)
    begin = tl.cumsum(count, 0) - count
    begin -= tl.gather(begin, tl.load(heads + key, key < keys, other=0), 0)
    tl.store(first + key, begin, key < keys)
    tl.store(ends + key, begin + count, key < keys)


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["table"])
def _keyed(ids, slots, table, keys, pairs, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, i < pairs, other=-1)
    key = tl.load(table + tl.load(ids + i, i < pairs, other=0), i < pairs, other=-1)
    tl.store(keys + i, tl.where(slot >= 0, slot, key), i < pairs)


def keyed(ids: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    """int32 [T, k]: the slot of each pair; where that is below 0 its expert's key in `table`, or -1. ids: of experts in
    `table`."""
    keys, pairs = torch.empty_like(slots), slots.numel()
    _keyed[(triton.cdiv(pairs, BLOCK),)](ids, slots, table, keys, pairs, BLOCK=BLOCK, num_warps=4)
    return keys


def order(keys: Tensor, counts: Tensor, parts: Sequence[int]) -> Order:
    """keys int32 [T, k], below 0: nobody's. parts: how many keys each has. counts int32 [keys], zeros: becomes how many
    pairs each key has."""
    ranks = torch.empty_like(keys)
    first, ends = counts.new_empty((2, len(counts)))
    pairs = keys.numel()
    _rank[(triton.cdiv(pairs, BLOCK),)](keys, counts, ranks, pairs, BLOCK=BLOCK, num_warps=4)
    heads = _heads(tuple(parts), counts.device)
    padded = triton.next_power_of_2(len(counts))
    _edges[(1,)](counts, heads, first, ends, len(counts), BLOCK=padded, num_warps=4)
    return Order(keys, ranks, first, ends)


def _heads(parts: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [keys]: the first key of each key's part. Kept: a copy to the GPU would wait for streamed experts. What a
    graph reads is kept for good: steps of other shares would drive it out, and the graph would read freed memory."""
    heads = _recorded.get((parts, device))
    if heads is None:
        heads = _made_heads(parts, device)
        if _is_recorded(device):
            _recorded[parts, device] = heads
    return heads


@lru_cache(maxsize=256)
def _made_heads(parts: tuple[int, ...], device: torch.device) -> Tensor:
    sizes = torch.tensor(parts)
    return (sizes.cumsum(0) - sizes).repeat_interleave(sizes).int().to(device)


_recorded: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _is_recorded(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
