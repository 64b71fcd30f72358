"""Layers of a model: a tuple of layers, each a tuple of blocks, each a mechanism with its own sizes.

Mechanisms have no family names. A family is data over them (`architectures/`); a new kind of layer is a new type here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.mechanisms.compressed_attention.shape import CompressedAttention
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Moe
from tandem.mechanisms.foreign.shape import Foreign
from tandem.mechanisms.gated_streams.shape import GatedStreams
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.latent.shape import Latent
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.mechanisms.short_conv.shape import ShortConv
from tandem.mechanisms.state_space.shape import StateSpace
from tandem.mechanisms.streams.shape import Hyper
from tandem.spec.norm import Norm
from tandem.spec.state import State

Attention = Gqa | Latent | CompressedAttention
Mixer = Attention | DeltaRule | ChannelDelta | ShortConv | StateSpace
Body = Mixer | Dense | Moe | Ngram | Foreign
ResidualStreams = Hyper | GatedStreams
"""Streams that stand for one residual."""


class Mechanism(Protocol):
    """Questions that every body answers for itself."""

    def params(self, hidden: int) -> int:
        """Weights that every token uses."""
        ...

    def states(self) -> tuple[State, ...]:
        """States of a sequence, kept between steps."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """residual + body(norm(residual)); hyper: what stands for the residual and the sum; post: a norm of the body's
    result."""

    body: Body
    norm: Norm
    hyper: ResidualStreams | None = None
    post: Norm | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Blocks in the order in which they run. scaled: in the end the residual is multiplied with a stored number."""

    blocks: tuple[Block, ...]
    scaled: bool = False

    @property
    def hyper(self) -> ResidualStreams | None:
        """Residual streams between its blocks, all alike but for blocks that take all streams; None: one residual."""
        return self.blocks[-1].hyper

    @property
    def moe(self) -> Moe | None:
        return next((block.body for block in self.blocks if isinstance(block.body, Moe)), None)

    @property
    def mixer(self) -> Mixer | None:
        return next((block.body for block in self.blocks if isinstance(block.body, Mixer)), None)


def pre_norm(mixer: Mixer, feed_forward: Dense | Moe, norm: Norm, hyper: Hyper | None = None) -> Layer:
    """The usual decoder layer: attention, then a feed-forward, each behind a norm of its own."""
    return Layer((Block(mixer, norm, hyper), Block(feed_forward, norm, hyper)))
