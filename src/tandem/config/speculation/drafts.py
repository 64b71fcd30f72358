"""`Drafts`: a layer behind the last one that guesses the token after next (DeepSeek-V3, arXiv 2412.19437, 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.layers import Layer
from tandem.config.mechanisms.norm import Norm
from tandem.config.state import Array, Pages, State


@dataclass(frozen=True, slots=True)
class Drafts:
    """It takes a token's embedding beside what the model's last norm made of the token before, each normed once more.
    A norm of its own and the model's head follow. What that norm makes stands for the model's when it guesses on.

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
        own = (state for block in self.layer.blocks for state in block.body.states())
        return (*own, Pages((Array("hidden", (hidden,)),)))
