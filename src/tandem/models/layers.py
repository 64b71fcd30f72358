"""Decoder layers, built from their configuration: blocks of a norm and a mechanism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tandem.architectures.names import Names
from tandem.config.layers import Block, DeltaRule, Dense, Gqa, Latent, Moe
from tandem.config.mechanisms.shared_kv import SharedKv
from tandem.config.state import State
from tandem.kernels.ops import MLP, SureRead
from tandem.models.attention import Attention
from tandem.models.builder import Builder
from tandem.models.delta_net import DeltaNet
from tandem.models.latent_attention import LatentAttention
from tandem.models.moe import MoEBlock, dense_mlp
from tandem.models.passing import Pass, States
from tandem.models.residual import Residual, residual_of
from tandem.models.shared_kv import SharedKvAttention


class Operator(Protocol):
    """A mechanism bound to its shape, weights and operations."""

    def reads(self) -> list[SureRead]:
        """Weights in the order in which a call reads them."""
        ...

    def __call__(self, x: Tensor, p: Pass, states: States) -> Tensor:
        """x [T, hidden], normed -> [T, hidden], which the caller adds to the stream. Writes into `states`."""
        ...


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """A dense feed-forward as an operator."""

    mlp: MLP

    def reads(self) -> list[SureRead]:
        return self.mlp.reads()

    def __call__(self, x: Tensor, p: Pass, states: States) -> Tensor:
        return self.mlp(x)


@dataclass(frozen=True, slots=True)
class BuiltBlock:
    """residual + operator(norm(residual)), or what streams have in place of that."""

    norm: Tensor
    eps: float
    operator: Operator
    states: tuple[State, ...]  # what the operator keeps of a sequence
    residual: Residual

    def enter(self, p: Pass) -> Tensor:
        """Adds what is pending to the stream; the normed rows that the operator takes."""
        return self.residual.enter(p, self.norm, self.eps)

    def peek(self, p: Pass) -> Tensor:
        """About what `enter` will give, before the stream is complete."""
        return self.residual.peek(p.residual, self.norm, self.eps)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Blocks in the order in which they run."""

    blocks: tuple[BuiltBlock, ...]

    def reads(self) -> list[SureRead]:
        """Weights in the order in which a step reads them."""
        return [read for block in self.blocks for read in block.operator.reads()]

    @property
    def moe(self) -> MoEBlock | None:
        found = (block.operator for block in self.blocks)
        return next((each for each in found if isinstance(each, MoEBlock)), None)


def decoder_layer(b: Builder, index: int, names: Names) -> DecoderLayer:
    """Layer `index` as the configuration says, from tensors that are called `names`."""
    blocks = zip(b.config.layers[index].blocks, names.norms, names.streams, strict=True)
    return DecoderLayer(tuple(_block(b, index, names, *block) for block in blocks))


def _block(b: Builder, index: int, names: Names, block: Block, norm: str, streams: str) -> BuiltBlock:
    layer, operator = f"model.layers.{index}.", _operator(b, index, names, block)
    weight = b.norm(f"{layer}{norm}.weight", block.norm, b.config.hidden)
    residual = residual_of(b, block.hyper, layer + streams)
    return BuiltBlock(weight, block.norm.eps, operator, block.body.states(), residual)


def _operator(b: Builder, index: int, names: Names, block: Block) -> Operator:
    layer, body = f"model.layers.{index}.", block.body
    if isinstance(body, Gqa):
        return Attention(b, body, layer + names.attention)
    if isinstance(body, Latent):
        return LatentAttention(b, body, layer + names.attention, index)
    if isinstance(body, SharedKv):
        return SharedKvAttention(b, body, layer + names.attention)
    if isinstance(body, DeltaRule):
        return DeltaNet(b, body, layer + names.recurrent)
    if isinstance(body, Dense):
        return DenseBlock(dense_mlp(b, layer + names.dense, body))
    assert isinstance(body, Moe), "this layer is not ours"
    return MoEBlock(b, index, body, names)
