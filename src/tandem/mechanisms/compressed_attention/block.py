"""Compressed attention, written in `Ops` only: its matrices. `CompressedHeads` computes between them."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.architectures.names import Names
from tandem.formats.cut import numbers
from tandem.kernels.ops import Linear, SureRead
from tandem.kernels.step_rows import BlockRows, StepRows
from tandem.mechanisms.compressed_attention.shape import CompressedAttention, Compression
from tandem.mechanisms.compressed_attention.torch import CompressedHeads, Projected
from tandem.mechanisms.compressed_attention.weights import CompressedWeights, CompressionWeights, own_bias
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.operator import SeesBlocks
from tandem.models.passing import ForwardState, States
from tandem.planner.ranks.cut import shard_of

COMPRESSOR, INDEX = "compressor.", "compressor.indexer."


class CompressedAttentionBlock(SeesBlocks):
    """Queries through a latent of their own, one key for all heads, inputs of entries, attention, output in groups."""

    def __init__(self, b: Builder, shape: CompressedAttention, name: str) -> None:
        """name: of the module that holds the projections."""
        self.shape, self.ops, hidden, name = shape, b.ops, b.config.hidden, name + "."
        s, share = shape, shard_of(b.config, shape).share
        self.down = b.linear([name + "q_a_proj", name + "kv_proj"], [s.q_rank, s.dim], hidden)
        self.query = b.linear([name + "q_b_proj"], [share(s.heads * s.dim)], s.q_rank)
        self.q_norm = b.float_tensor(name + "q_a_norm.weight", s.q_rank)
        self.kv_norm = b.float_tensor(name + "kv_norm.weight", s.dim)
        self.ones = b.ops.resident(torch.ones(s.dim))
        self.inputs = None if s.compression is None else _inputs(b, s, s.compression, name)
        index = None if s.compression is None else s.compression.index
        self.index_query = None
        if index is not None:
            self.index_query = b.linear([f"{name}{INDEX}q_b_proj"], [index.heads * index.dim], s.q_rank)
        self.heads: CompressedHeads = b.ops.bound(shape, _weights(b, s, name), b.dense_format)
        self.out = b.linear([name + "o_b_proj"], [hidden], share(s.out_groups * s.out_rank))

    def reads(self) -> list[SureRead]:
        optional = (m for m in (self.inputs, self.index_query) if m is not None)
        return sure_reads(self.down, self.query, *optional, self.out)

    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        (ring,), *pooled_states = states
        compressed_kv = tuple(array for arrays in pooled_states for array in arrays)
        return self.out(self.heads(self._projected(x), p.rows, ring, compressed_kv))

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
        if self.inputs is None or s.compression is None:
            return Projected(q, kv)
        inputs, width = self.inputs(x), s.compression.inputs(s.dim)
        if self.index_query is None:
            return Projected(q, kv, inputs)
        return Projected(q, kv, inputs[:, :width], self.index_query(latent), inputs[:, width:])


def _inputs(b: Builder, shape: CompressedAttention, compression: Compression, name: str) -> Linear:
    """Inputs and gates of entries, those of an index's entries, and its queries' weights: one matrix, for each is
    small."""
    modules, rows = [], []
    for prefix, width in zip((COMPRESSOR, INDEX), compression.widths(shape.dim), strict=False):
        modules += [f"{name}{prefix}kv_proj", f"{name}{prefix}gate_proj"]
        rows += [compression.series * width] * 2
    if compression.index is not None:
        modules.append(f"{name}{INDEX}scorer.weights_proj")
        rows.append(compression.index.heads)
    return b.linear(modules, rows, b.config.hidden)


def _weights(b: Builder, shape: CompressedAttention, name: str) -> CompressedWeights:
    s, rope, share = shape, b.rope(shape.rope), shard_of(b.config, shape).share
    rows = share(s.out_groups * s.out_rank)
    groups = numbers(b.checkpoint.weight(name + "o_a_proj", (rows.whole, s.group_dim), rows.cut)).to(b.dtype)
    widths = () if s.compression is None else s.compression.widths(s.dim)
    prefixes = (name + COMPRESSOR, name + INDEX)
    each = zip(prefixes, widths, strict=False)
    compressions = () if s.compression is None else tuple(_compression(b, s.compression, *one) for one in each)
    sinks = b.float_tensor(name + "sinks", share(s.heads))
    return CompressedWeights(rope.cos, rope.sin, sinks, groups.unflatten(0, (s.out_groups, s.out_rank)), compressions)


def _compression(b: Builder, compression: Compression, name: str, width: int) -> CompressionWeights:
    bias = b.float_tensor(name + "position_bias", compression.stride, compression.series * width)
    return CompressionWeights(own_bias(bias, compression.overlap), b.float_tensor(name + "kv_norm.weight", width))


def operator(b: Builder, index: int, names: Names, shape: CompressedAttention) -> CompressedAttentionBlock:
    return CompressedAttentionBlock(b, shape, names.at(index) + names.attention)
