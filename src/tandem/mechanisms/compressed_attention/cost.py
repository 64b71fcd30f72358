"""Planner costs of compressed attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.mechanisms import cost
from tandem.mechanisms.compressed_attention.shape import CompressedAttention
from tandem.mechanisms.cost import KeyShape, Limit, Output
from tandem.spec.gpu_scratch import StepSize
from tandem.spec.rope import Rope
from tandem.spec.stored import StoredFormats

COMPRESSED_KEY_BYTES = 1 << 26  # of keys that are gathered at a time, and as many of an index's products


class Cost(cost.Cost[CompressedAttention]):
    """Cost of a window of last tokens, and of entries that stand for many."""

    own_kernels = "keys that are values, too, have kernels of their own"
    depends_on_others = (
        "DeepSeek-V4's attention is PyTorch's products, whose sums depend on how many keys lie beside a row's"
    )
    kernels = 30
    launches = 165  # by PyTorch's operations

    @property
    def keys(self) -> KeyShape:
        s = self.shape
        return KeyShape(s.heads, 1, s.dim, s.dim, s.scale, s.window, sinks=True)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (self.shape.rope,)

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        return compressed_scratch_bytes(self.shape, step)

    @property
    def number_params(self) -> int:
        return self.shape.head_params

    def unread(self, context: int) -> int:
        return self.shape.unseen(context) * self.shape.dim

    def flops(self, rows: int, before: int, per_head: bool) -> float:
        """As of the middle row."""
        middle = before + rows // 2
        products = 2.0 * self.shape.keys_seen(middle) * self.shape.heads * self.shape.dim
        return 2.0 * rows * (products + self.shape.scored_products(middle))

    def cut(self, ranks: int) -> CompressedAttention:
        s = self.shape
        return replace(s, heads=s.heads // ranks, out_groups=s.out_groups // ranks)

    def limits(self, expert_unit: int, stored: StoredFormats) -> Iterator[Limit]:
        yield Limit(f"{self.shape.out_groups} groups of the output", self.shape.out_groups)

    @property
    def output(self) -> Output:
        return Output("o_b_proj", self.shape.out_groups * self.shape.out_rank)


def compressed_scratch_bytes(shape: CompressedAttention, step: StepSize) -> int:
    """Gathered keys twice in bfloat16 and in float32, an index's products three times. Of each row: queries as
    projected and normed, results, and what turns of them in float32. What grows with the context comes beside."""
    row = 2 * 3 * shape.heads * shape.dim + 4 * 4 * shape.heads * shape.rope.dims
    return 9 * COMPRESSED_KEY_BYTES + step.rows * row + _entry_bytes(shape, step)


def _entry_bytes(shape: CompressedAttention, step: StepSize) -> int:
    """Scratch bytes of entries. For each sequence: the places of all its entries, in three arrays of int64. For each
    row: the order of its keys, in two. One row's products with an index count three times, where they are more than
    what is taken at a time."""
    if shape.compression is None:
        return 0
    entries, index = step.context // shape.compression.stride, shape.compression.index
    visible = entries if index is None else min(entries, index.budget)
    one = 0 if index is None else 4 * entries * (index.heads + index.dim)
    order = 2 * 8 * step.rows * (shape.window + visible)
    return 3 * 8 * step.sequences * entries + order + 3 * max(0, one - COMPRESSED_KEY_BYTES)
