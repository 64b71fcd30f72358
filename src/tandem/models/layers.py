"""Decoder layers, built from their configuration: blocks of a norm and a mechanism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tandem.architectures.names import Names
from tandem.config.layers import Block
from tandem.config.model_config import layer_of
from tandem.config.norm import Norm
from tandem.config.ranks.cut import divided
from tandem.config.state import State
from tandem.kernels.joined import AfterNorm
from tandem.kernels.ops import MLP, SureRead
from tandem.kernels.ranks.group import Group
from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Moe
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.latent.shape import Latent
from tandem.mechanisms.shared_kv.shape import SharedKv
from tandem.mechanisms.short_conv.shape import ShortConv
from tandem.mechanisms.state_space.shape import StateSpace
from tandem.models.attention import Attention
from tandem.models.builder import Builder
from tandem.models.channel_delta import ChannelDeltaNet
from tandem.models.delta_net import DeltaNet
from tandem.models.latent_attention import LatentAttention
from tandem.models.moe import ExpertsBeside, MoEBlock, dense_mlp, moe_block
from tandem.models.passing import Pass, States
from tandem.models.residual import Residual, residual_of, scale_of
from tandem.models.shared_kv import SharedKvAttention
from tandem.models.short_conv import ShortConvolution
from tandem.models.state_space import StateSpaceBlock


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
    post: Callable[[Tensor], Tensor] | None = None  # of the operator's result: ranks' sum, a norm

    @property
    def first(self) -> AfterNorm | None:
        """What a router takes may be normed with its product (`Pass.product`)."""
        return self.operator.first if isinstance(self.operator, MoEBlock) else None

    def leave(self, y: Tensor) -> Tensor:
        """What the stream is given of the operator's result."""
        return y if self.post is None else self.post(y)

    def enter(self, p: Pass) -> Tensor:
        """Adds what is pending to the stream; the normed rows that the operator takes."""
        return self.residual.enter(p, self.norm, self.eps, self.first)

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
    return DecoderLayer(tuple(_block(b, index, at, names) for at in range(len(layer_of(b.config, index).blocks))))


def _block(b: Builder, index: int, at: int, names: Names) -> BuiltBlock:
    """The at-th of a layer."""
    layer, block = names.at(index), layer_of(b.config, index).blocks[at]
    operator = _operator(b, index, names, block)
    weight = b.norm(f"{layer}{names.norms[at]}.weight", block.norm, b.config.hidden)
    before = index - 1 if at == 0 else None  # the layer that ends here
    residual = residual_of(b, block.hyper, layer + names.streams[at], scale_of(b, before, names))
    post = _post(b, layer + names.post_norms[at], block.post)
    if b.ops.group is not None and divided(block.body) and not isinstance(operator, ExpertsBeside):
        post = _summed(b.ops.group, post)
    return BuiltBlock(weight, block.norm.eps, operator, block.body.states(), residual, post)


def _post(b: Builder, name: str, norm: Norm | None) -> Callable[[Tensor], Tensor] | None:
    if norm is None:
        return None
    weight, eps, ops = b.norm(f"{name}.weight", norm, b.config.hidden), norm.eps, b.ops
    return lambda y: ops.rms_norm(y, weight, eps)


def _summed(group: Group, norm: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor]:
    """What becomes of one rank's summands."""
    return group.sum if norm is None else lambda rows: norm(group.sum(rows))


def _operator(b: Builder, index: int, names: Names, block: Block) -> Operator:
    layer, body = names.at(index), block.body
    if isinstance(body, Gqa):
        return Attention(b, body, layer + names.attention, layer + names.own_gate)
    if isinstance(body, Latent):
        return LatentAttention(b, body, layer + names.attention, index)
    if isinstance(body, SharedKv):
        return SharedKvAttention(b, body, layer + names.attention)
    if isinstance(body, DeltaRule):
        return DeltaNet(b, body, layer + names.recurrent)
    if isinstance(body, ChannelDelta):
        return ChannelDeltaNet(b, body, layer + names.recurrent)
    if isinstance(body, ShortConv):
        return ShortConvolution(b, body, layer + names.recurrent)
    if isinstance(body, StateSpace):
        return StateSpaceBlock(b, body, layer + names.recurrent)
    if isinstance(body, Dense):
        return DenseBlock(dense_mlp(b, layer + names.dense, body))
    assert isinstance(body, Moe), "this layer is not ours"
    return moe_block(b, index, body, names)
