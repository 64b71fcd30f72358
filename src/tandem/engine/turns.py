"""`Turn`: the tokens that one sequence gets in one step.

The rule that chooses a token sees the sequence as it is when that token's turn comes, all tokens before it appended. So
a guess decides only whether the row is there already: whatever a request asks for is done as without guesses.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import NamedTuple

import msgspec

from tandem.engine.protocol import TokenOutput
from tandem.engine.sequence import Chunk, Sequence


class Turn:
    """`row`: of the step's logits, the one that the next token is chosen from."""

    __slots__ = ("_guesses", "_outputs", "chunk", "first_position", "first_row", "row", "tokens")

    def __init__(self, chunk: Chunk, first_row: int, row: int) -> None:
        """first_row: of the step's rows, the chunk's first; row: of the step's logits. Made before any token is
        chosen."""
        self.chunk, self.first_row, self.row = chunk, first_row, row
        self.first_position = chunk.sequence.computed_len
        self._guesses = iter(chunk.guesses)
        self._outputs: list[TokenOutput] = []
        self.tokens = 0  # that it has got

    @property
    def sequence(self) -> Sequence:
        return self.chunk.sequence

    @property
    def rows(self) -> int:
        """The model's rows of tokens that the sequence has had, once its first token is chosen."""
        return self.chunk.sure + max(0, self.tokens - 1)

    def take(self, token_id: int, output: TokenOutput) -> bool:
        """The next token of the sequence. True: the row behind it is of this token, and the answer goes on."""
        self.tokens += 1
        self.row += 1
        self.end(output)
        return output.finish_reason is None and next(self._guesses, None) == token_id

    def end(self, output: TokenOutput) -> None:
        self._outputs.append(output)

    @property
    def output(self) -> TokenOutput | None:
        """What became of the sequence in this step, as one."""
        return merged(self._outputs) if self._outputs else None

    @property
    def rejected(self) -> range:
        """The model's rows of guesses that were wrong, or not reached."""
        return range(self.first_row + self.rows, self.first_row + self.chunk.length)


class Ran(NamedTuple):
    """A step that has run: outputs of its sequences, and their turns; none where it failed."""

    outputs: list[TokenOutput]
    turns: list[Turn]
    num_tokens: int = 0  # rows as they were run


def turns_of(chunks: Rows[Chunk]) -> Iterator[Turn]:
    """In the order of the step's rows."""
    row = last = 0
    for chunk in chunks:
        last += chunk.logits
        yield Turn(chunk, row, last - 1 - len(chunk.guesses))
        row += chunk.length


def merged(outputs: list[TokenOutput]) -> TokenOutput:
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
