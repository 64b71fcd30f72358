"""`Drafts`: a layer behind the last one that drafts the token after next (DeepSeek-V3, arXiv 2412.19437, 2.2); or
several that draft a block of tokens (DSpark, github.com/deepseek-ai/DeepSpec)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.spec.layers import Layer
from tandem.spec.norm import Norm
from tandem.spec.state import Array, Pages, State, WindowRing


@dataclass(frozen=True, slots=True)
class DraftBlockShape:
    """`size` tokens are drafted at once by `layers` layers, one behind the other.

    Rows of the block are the last token and, for those behind it, the token `unknown`. They see each other, and a
    window of keys. A key is made of what the model's layers `reads` leave at a position: the means of their streams,
    side by side, through one projection. Each draft token's logits are moved by the token before it, through `rank`
    channels.
    """

    size: int
    layers: int
    unknown: int
    reads: tuple[int, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """It takes a token's embedding beside what the model's last norm made of the token before, each normed once more.
    A norm of its own and the model's head follow. What that norm makes stands for the model's when it drafts on.

    Where the layer has several streams, all of the model's streams are taken instead, before that norm, each normed
    once more. What they are after the layer stands for them then. mean: the layer has one stream, and takes the mean of
    the model's before that norm; what it leaves before its own norm stands for that then.

    Row p of its state is of the hidden state at p and of the token at p + 1; with a block of the hidden state alone.
    """

    layer: Layer
    norm: Norm
    vocab: int = 0  # tokens that it can draft, of the model's; 0: all
    mean: bool = False
    block: DraftBlockShape | None = None  # None: one token is drafted after the other

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All are alike."""
        return (self.layer,) * (1 if self.block is None else self.block.layers)

    def params(self, hidden: int) -> int:
        """Weights that every draft token uses; the head counts where it has rows of its own."""
        blocks = [block for layer in self.layers for block in layer.blocks]
        bodies = sum(block.body.params(hidden) for block in blocks)
        if self.block is not None:
            around = (len(self.block.reads) * hidden + 3) * hidden
            return bodies + len(blocks) * hidden + around + self.block.rank
        return bodies + (self.vocab + 2 * hidden + len(blocks) + 3) * hidden

    def pair_params(self, vocab: int) -> int:
        """Weights of the two matrices that say which token follows which."""
        return 0 if self.block is None else 2 * vocab * self.block.rank

    def states(self, hidden: int) -> tuple[State, ...]:
        """States of a sequence: the layers', then the model's hidden states, so that rows can be made up for at any
        time."""
        own = tuple(state for layer in self.layers for block in layer.blocks for state in block.body.states())
        hidden_states, last = Array("hidden", (self._row_channels(hidden),)), window_of(own)
        return (*own, WindowRing(hidden_states, last) if last else Pages((hidden_states,)))

    def _row_channels(self, hidden: int) -> int:
        """Channels of the model that a row is made of."""
        if self.block is not None:
            return len(self.block.reads) * hidden
        hyper = self.layer.hyper
        return hidden if hyper is None else hyper.streams * hidden


def window_of(states: Iterable[State]) -> int:
    """How many last tokens are enough to make all rows that such states hold; 0: all of them."""
    each = [state.last if isinstance(state, WindowRing) else 0 for state in states]
    return max(each) if each and all(each) else 0
