"""`Step`: chunks that the model runs at once. `Running`: a step that was started. `StepOutput`: the chunks as they were
run, and their logits. `SequenceOutput`: the tokens that one sequence gets in one step.

The rule that chooses a token sees the sequence as it is when that token's turn comes, all tokens before it appended. So
a draft token decides only whether the row is there already: whatever a request asks for is done as without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

import msgspec

from tandem.engine.protocol import TokenOutput
from tandem.engine.sampling.logits import Logits
from tandem.engine.sequence import Chunk, Sequence

Output = TypeVar("Output")
Changed = TypeVar("Changed")

HasNewRequest = Callable[[], bool]
"""Says whether a request has arrived, or one is to end, that waits for the step under way."""


def no_new_request() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Step:
    """chunks: in the order of their rows. shared_tokens: rows that the one chunk may shrink to while it runs, as soon
    as `has_new_request`; 0: it stays as it is. decode_rows: how many first chunks are known to be no prompt's."""

    chunks: tuple[Chunk, ...]
    shared_tokens: int = 0
    has_new_request: HasNewRequest = no_new_request
    decode_rows: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows of the model, those of draft tokens included."""
        return sum([chunk.length for chunk in self.chunks])

    @property
    def has_prefill(self) -> bool:
        return any(chunk.prefills for chunk in self.chunks[self.decode_rows :])

    @property
    def has_drafts(self) -> bool:
        return any(chunk.draft_tokens for chunk in self.chunks)

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


def _nothing() -> None:
    """Cancels a step that computes nothing before its result is wanted."""


class Running(Generic[Output]):
    """A step under way. As a context: where an error leaves it before the result, the step is cancelled, so that no
    device waits for what does not come."""

    __slots__ = ("_cancel", "_finish")

    def __init__(self, finish: Callable[[], Output], cancel: Callable[[], None] = _nothing) -> None:
        """finish: waits for the device, and returns the output. cancel: lets the device end, without a result."""
        self._finish, self._cancel = finish, cancel

    def result(self) -> Output:
        """Output of the step, once. Raises what ended it."""
        self._cancel = _nothing
        return self._finish()

    def then(self, change: Callable[[Output], Changed]) -> Running[Changed]:
        """The same step with another form of its output."""
        return Running(lambda: change(self.result()), self.cancel)

    def cancel(self) -> None:
        """Ends it. Nothing happens where the result has been asked for."""
        cancel, self._cancel = self._cancel, _nothing
        cancel()

    def __enter__(self) -> Running[Output]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.cancel()


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


class SequenceOutput:
    """`row`: of the step's logits, the one that the next token is chosen from."""

    __slots__ = ("_outputs", "chunk", "first_position", "first_row", "row", "sequence", "tokens")

    def __init__(self, chunk: Chunk, first_row: int, row: int) -> None:
        """first_row: of the step's rows, the chunk's first; row: of the step's logits. Made before any token is
        chosen."""
        self.chunk, self.first_row, self.row = chunk, first_row, row
        self.sequence: Sequence = chunk.sequence
        self.first_position = self.sequence.computed_len
        self._outputs: tuple[TokenOutput, ...] = ()
        self.tokens = 0  # that it has got

    @property
    def rows(self) -> int:
        """The model's rows of tokens that the sequence has had, once its first token is chosen."""
        drafts = len(self.chunk.draft_tokens)
        return self.chunk.length - drafts + max(0, self.tokens - 1) if drafts else self.chunk.length

    def take(self, token_id: int, output: TokenOutput) -> bool:
        """The next token of the sequence. True: the row behind it is of this token, and the answer goes on."""
        taken, drafts = self.tokens, self.chunk.draft_tokens
        self.tokens = taken + 1
        self.row += 1
        self._outputs += (output,)
        return taken < len(drafts) and output.finish_reason is None and drafts[taken] == token_id

    def end(self, output: TokenOutput) -> None:
        self._outputs += (output,)

    @property
    def output(self) -> TokenOutput | None:
        """The sequence's outputs of this step, as one."""
        return merged(self._outputs) if self._outputs else None

    @property
    def rejected(self) -> range:
        """The model's rows of draft tokens that were rejected, or not reached."""
        return range(self.first_row + self.rows, self.first_row + self.chunk.length)


class StepResult(NamedTuple):
    """A step that has run: outputs of its sequences, and their turns; none where it failed."""

    outputs: list[TokenOutput]
    turns: list[SequenceOutput]
    num_tokens: int = 0  # rows as they were run


def turns_of(chunks: Rows[Chunk]) -> Iterator[SequenceOutput]:
    """In the order of the step's rows."""
    row = last = 0
    for chunk in chunks:
        last += chunk.logits
        yield SequenceOutput(chunk, row, last - 1 - len(chunk.draft_tokens))
        row += chunk.length


def merged(outputs: Rows[TokenOutput]) -> TokenOutput:
    """One output that says what these say one after the other."""
    if len(outputs) == 1:
        return outputs[0]
    logprobs = [each for output in outputs for each in output.logprobs or ()]
    return msgspec.structs.replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        lengths=[len(output.text) for output in outputs if output.token_ids],
        logprobs=logprobs or None,
        prompt_logprobs=outputs[0].prompt_logprobs,
        first_token=outputs[0].first_token,
    )
