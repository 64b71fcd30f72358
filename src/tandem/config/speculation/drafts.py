"""`Drafts`: a layer behind the last one that guesses the token after next (DeepSeek-V3, arXiv 2412.19437, 2.2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.config.layers import Layer
from tandem.config.mechanisms.norm import Norm
from tandem.config.state import Array, Pages, Ring, State


@dataclass(frozen=True, slots=True)
class Drafts:
    """It takes a token's embedding beside what the model's last norm made of the token before, each normed once more.
    A norm of its own and the model's head follow. What that norm makes stands for the model's when it guesses on.

    Where the layer has several streams, all of the model's streams are taken instead, before that norm, each normed
    once more. What they are after the layer stands for them then.

    Row p of its state is of the hidden state at p and of the token at p + 1.
    """

    layer: Layer
    norm: Norm
    vocab: int = 0  # tokens that it can guess, of the model's; 0: all

    def params(self, hidden: int) -> int:
        """Weights that every guess uses; the head counts where it has rows of its own."""
        blocks = self.layer.blocks
        bodies = sum(block.body.params(hidden) for block in blocks)
        return bodies + (self.vocab + 2 * hidden + len(blocks) + 3) * hidden

    def states(self, hidden: int) -> tuple[State, ...]:
        """Of a sequence: the layer's, then the model's hidden states, so that rows can be made up for at any time."""
        own = tuple(state for block in self.layer.blocks for state in block.body.states())
        hyper = self.layer.hyper
        kept, last = Array("hidden", (hidden if hyper is None else hyper.streams * hidden,)), window_of(own)
        return (*own, Ring(kept, last) if last else Pages((kept,)))


def window_of(states: Iterable[State]) -> int:
    """How many last tokens are enough to make all rows that such states hold; 0: all of them."""
    each = [state.last if isinstance(state, Ring) else 0 for state in states]
    return max(each) if each and all(each) else 0
