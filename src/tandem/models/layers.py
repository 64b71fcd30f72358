"""Decoder layers, built from their configuration: blocks of a norm and a mechanism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tandem.architectures.names import Names
from tandem.kernels.joined import AfterNorm
from tandem.kernels.ops import SureRead
from tandem.kernels.ranks.group import Group
from tandem.models.builder import Builder
from tandem.models.operator import Operator, Routed, TakesStreams, operator_of
from tandem.models.passing import ForwardState
from tandem.models.residual import Residual, norm_channels, residual_of, scale_of
from tandem.planner.ranks.cut import divided
from tandem.spec.model_config import layer_of
from tandem.spec.norm import Norm
from tandem.spec.state import State


@dataclass(frozen=True, slots=True)
class BuiltBlock:
    """residual + operator(norm(residual)), or what streams have in place of that."""

    norm: Tensor
    eps: float
    operator: Operator
    states: tuple[State, ...]  # what the operator keeps of a sequence
    residual: Residual
    post: Callable[[Tensor], Tensor] | None = None  # of the operator's result: ranks' sum, a norm
    first: AfterNorm | None = None  # what a router takes may be normed with its product (`ForwardState.product`)

    def leave(self, y: Tensor) -> Tensor:
        """Summand for the stream, from the operator's result."""
        return y if self.post is None else self.post(y)

    def enter(self, p: ForwardState) -> Tensor:
        """Adds what is pending to the stream; the normed rows that the operator takes."""
        return self.residual.enter(p, self.norm, self.eps, self.first)

    def peek(self, p: ForwardState) -> Tensor:
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
    def moe(self) -> Routed | None:
        operators = (block.operator for block in self.blocks)
        return next((each for each in operators if isinstance(each, Routed)), None)


def decoder_layer(b: Builder, index: int, names: Names) -> DecoderLayer:
    """Layer `index` as the configuration says, from tensors that are called `names`."""
    return DecoderLayer(tuple(_block(b, index, at, names) for at in range(len(layer_of(b.config, index).blocks))))


def _block(b: Builder, index: int, at: int, names: Names) -> BuiltBlock:
    """The at-th of a layer."""
    layer, blocks = names.at(index), layer_of(b.config, index).blocks
    block = blocks[at]
    operator = operator_of(b, index, names, block.body)
    if isinstance(operator, TakesStreams):
        weight = b.norm(operator.norm_name, block.norm, operator.norm_channels)
        return BuiltBlock(weight, block.norm.eps, operator, block.body.states(), operator.residual)
    before = index - 1 if at == 0 else None  # the layer that ends here
    at -= len(blocks) - len([each for each in blocks if each.hyper == block.hyper])  # those before have other names
    weight = b.norm(f"{layer}{names.norms[at]}.weight", block.norm, norm_channels(b, block.hyper))
    residual = residual_of(b, block.hyper, layer + names.streams[at], scale_of(b, before, names))
    post = _post(b, layer + names.post_norms[at], block.post)
    routed = operator if isinstance(operator, Routed) else None
    if b.ops.group is not None and divided(block.body) and not (routed and routed.sums_itself):
        post = _summed(b.ops.group, post)
    first = None if routed is None else routed.first
    return BuiltBlock(weight, block.norm.eps, operator, block.body.states(), residual, post, first)


def _post(b: Builder, name: str, norm: Norm | None) -> Callable[[Tensor], Tensor] | None:
    if norm is None:
        return None
    weight, eps, ops = b.norm(f"{name}.weight", norm, b.config.hidden), norm.eps, b.ops
    return lambda y: ops.rms_norm(y, weight, eps)


def _summed(group: Group, norm: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor]:
    """Function that sums one rank's summands over the ranks, and norms the sum."""
    return group.sum if norm is None else lambda rows: norm(group.sum(rows))
