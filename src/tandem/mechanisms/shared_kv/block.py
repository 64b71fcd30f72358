"""Attention over shared keys, written in `Ops` only: its matrices. What lies between them is in `kernels/shared_kv`."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.architectures.names import Names
from tandem.formats.cut import numbers
from tandem.kernels.ops import Linear, SureRead
from tandem.kernels.step_rows import BlockRows, StepRows
from tandem.mechanisms.shared_kv.shape import Pool, SharedKv
from tandem.mechanisms.shared_kv.torch import Projected, SharedKvHeads
from tandem.mechanisms.shared_kv.weights import PoolWeights, SharedKvWeights, own_bias
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.operator import SeesBlocks
from tandem.models.passing import ForwardState, States
from tandem.planner.ranks.cut import shard_of

COMPRESSOR, INDEX = "compressor.", "compressor.indexer."


class SharedKvAttention(SeesBlocks):
    """Queries through a latent of their own, one key for all heads, inputs of entries, attention, output in groups."""

    def __init__(self, b: Builder, shape: SharedKv, name: str) -> None:
        """name: of the module that holds the projections."""
        self.shape, self.ops, hidden, name = shape, b.ops, b.config.hidden, name + "."
        s, share = shape, shard_of(b.config, shape).share
        self.down = b.linear([name + "q_a_proj", name + "kv_proj"], [s.q_rank, s.dim], hidden)
        self.query = b.linear([name + "q_b_proj"], [share(s.heads * s.dim)], s.q_rank)
        self.q_norm = b.float_tensor(name + "q_a_norm.weight", s.q_rank)
        self.kv_norm = b.float_tensor(name + "kv_norm.weight", s.dim)
        self.ones = b.ops.resident(torch.ones(s.dim))
        self.inputs = None if s.pool is None else _inputs(b, s, s.pool, name)
        index = None if s.pool is None else s.pool.index
        self.index_query = None
        if index is not None:
            self.index_query = b.linear([f"{name}{INDEX}q_b_proj"], [index.heads * index.dim], s.q_rank)
        self.heads: SharedKvHeads = b.ops.bound(shape, _weights(b, s, name), b.dense_format)
        self.out = b.linear([name + "o_b_proj"], [hidden], share(s.out_groups * s.out_rank))

    def reads(self) -> list[SureRead]:
        optional = (m for m in (self.inputs, self.index_query) if m is not None)
        return sure_reads(self.down, self.query, *optional, self.out)

    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        (ring,), *pooled_states = states
        pooled = tuple(array for arrays in pooled_states for array in arrays)
        return self.out(self.heads(self._projected(x), p.rows, ring, pooled))

    def keep(self, x: Tensor, rows: StepRows, ring: Tensor) -> None:
        """Rows that others see later, and that ask for nothing."""
        self.heads.keep(self._keys(self.down(x)), rows, ring)

    def block(self, x: Tensor, at: BlockRows, ring: Tensor) -> Tensor:
        """Rows that see each other, and what was kept."""
        return self.out(self.heads.block(self._projected(x), at, ring))

    def _keys(self, down: Tensor) -> Tensor:
        return self.ops.rms_norm(down[:, self.shape.q_rank :].contiguous(), self.kv_norm, self.shape.eps)

    def _projected(self, x: Tensor) -> Projected:
        s, down = self.shape, self.down(x)
        latent = self.ops.rms_norm(down[:, : s.q_rank].contiguous(), self.q_norm, s.eps)
        q = self.ops.rms_norm(self.query(latent).view(-1, s.dim), self.ones, s.eps).view(len(x), -1)
        kv = self._keys(down)
        if self.inputs is None or s.pool is None:
            return Projected(q, kv)
        inputs, width = self.inputs(x), s.pool.inputs(s.dim)
        if self.index_query is None:
            return Projected(q, kv, inputs)
        return Projected(q, kv, inputs[:, :width], self.index_query(latent), inputs[:, width:])


def _inputs(b: Builder, shape: SharedKv, pool: Pool, name: str) -> Linear:
    """Inputs and gates of entries, those of an index's entries, and its queries' weights: one matrix, for each is
    small."""
    modules, rows = [], []
    for prefix, width in zip((COMPRESSOR, INDEX), pool.widths(shape.dim), strict=False):
        modules += [f"{name}{prefix}kv_proj", f"{name}{prefix}gate_proj"]
        rows += [pool.series * width] * 2
    if pool.index is not None:
        modules.append(f"{name}{INDEX}scorer.weights_proj")
        rows.append(pool.index.heads)
    return b.linear(modules, rows, b.config.hidden)


def _weights(b: Builder, shape: SharedKv, name: str) -> SharedKvWeights:
    s, rope, share = shape, b.rope(shape.rope), shard_of(b.config, shape).share
    rows = share(s.out_groups * s.out_rank)
    groups = numbers(b.checkpoint.weight(name + "o_a_proj", (rows.whole, s.group_dim), rows.cut)).to(b.dtype)
    widths = () if s.pool is None else s.pool.widths(s.dim)
    prefixes = (name + COMPRESSOR, name + INDEX)
    pools = tuple(_pool(b, s.pool, *each) for each in zip(prefixes, widths, strict=False) if s.pool is not None)
    sinks = b.float_tensor(name + "sinks", share(s.heads))
    return SharedKvWeights(rope.cos, rope.sin, sinks, groups.unflatten(0, (s.out_groups, s.out_rank)), pools)


def _pool(b: Builder, pool: Pool, name: str, width: int) -> PoolWeights:
    bias = b.float_tensor(name + "position_bias", pool.stride, pool.series * width)
    return PoolWeights(own_bias(bias, pool.overlap), b.float_tensor(name + "kv_norm.weight", width))


def operator(b: Builder, index: int, names: Names, shape: SharedKv) -> SharedKvAttention:
    return SharedKvAttention(b, shape, names.at(index) + names.attention)
