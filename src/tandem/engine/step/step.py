"""`Step`: chunks that the model runs at once. `StepOutput`: the chunks as they were run, and their logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.engine.sampling.logits import Logits
from tandem.engine.sequence import Chunk

HasNewRequest = Callable[[], bool]
"""Whether a request has arrived that waits for the step under way."""


def no_new_request() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Step:
    """chunks: in the order of their rows. shared_tokens: rows that the one chunk may shrink to while it runs, as soon
    as `has_new_request`; 0: it stays as it is."""

    chunks: tuple[Chunk, ...]
    shared_tokens: int = 0
    has_new_request: HasNewRequest = no_new_request

    @property
    def num_tokens(self) -> int:
        """Rows of the model, those of draft tokens included."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def has_prefill(self) -> bool:
        return any(chunk.prefills for chunk in self.chunks)

    @property
    def has_drafts(self) -> bool:
        return any(chunk.guesses for chunk in self.chunks)

    @property
    def shrinks(self) -> bool:
        return self.shared_tokens > 0

    def shrunk(self, tokens: int) -> Step:
        """The first `tokens` rows of the one chunk, which choose no token. It does not shrink again."""
        (chunk,) = self.chunks
        return replace(self, chunks=(Chunk(chunk.sequence, tokens, 0),), shared_tokens=0)


class StepOutput(NamedTuple):
    """step: as it was run, which may be shorter than as it was asked for. logits: valid until the model runs again."""

    step: Step
    logits: Logits


class ShrinkingStep:
    """A step of one long prefill chunk. When a request arrives, the layers that are left have fewer rows: as much work
    as a chunk of `shared_tokens`, at most. What was computed of the other rows is computed again."""

    def __init__(self, step: Step) -> None:
        """step: it shrinks."""
        self.step = step

    def shrink(self, layers_left: int, layers: int) -> bool:
        """Asked before each layer: whether `step` has fewer rows from here on. Rows double as layers are done:
        libraries plan each number of rows anew, so there are few."""
        step = self.step
        if not step.shrinks or not step.has_new_request():
            return False
        rows = step.shared_tokens
        while 2 * rows * layers_left <= step.shared_tokens * layers:
            rows *= 2
        if rows >= step.num_tokens:
            self.step = replace(step, shared_tokens=0)
            return False
        self.step = step.shrunk(rows)
        return True
