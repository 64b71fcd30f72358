"""Tables that are read by row, as the engine sees them. Rows of tokens that come next are read ahead. A sequence whose
rows could not be read ends before anybody finds its pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tandem.engine.sequence import Chunk, Sequence, Status
from tandem.engine.start.parts import EngineParts
from tandem.engine.step.step import SequenceOutput
from tandem.kernels.unread_rows import unread_rows
from tandem.models.model import Model
from tandem.models.operator import ReadsTable, TokenSpan

Admitted = Callable[[Sequence], None]


class RowsAhead:
    """Says which tokens come next where tables stay in their files."""

    def __init__(self, operators: list[ReadsTable], tokens: int, answers: bool) -> None:
        """tokens: of a prompt's next chunk, at most. answers: also one token ahead. It pays where a read that has to
        wait is the rule."""
        self._operators, self._tokens, self._answers = operators, tokens, answers
        self._prompts = dict[int, tuple[Sequence, int]]()  # by slot: up to which token a prompt's rows were read ahead

    def of_prompts(self, chunks: Iterable[Chunk]) -> None:
        """Before these chunks run: tokens behind each of a prompt."""
        self._read([self._behind(chunk) for chunk in chunks if chunk.prefills])

    def of_answers(self, turns: Iterable[SequenceOutput]) -> None:
        """After a step: the tokens that were chosen in it."""
        if self._answers:
            sequences = (turn.sequence for turn in turns)
            self._read([
                TokenSpan(each.tokens, each.computed_len, each.total_len)
                for each in sequences if each.status is Status.RUNNING and each.decodes
            ])  # fmt: skip

    def _behind(self, chunk: Chunk) -> TokenSpan:
        sequence = chunk.sequence
        first = sequence.computed_len + chunk.length
        end = min(first + self._tokens, sequence.total_len)
        known, done = self._prompts.get(sequence.slot, (None, 0))
        self._prompts[sequence.slot] = sequence, end
        return TokenSpan(sequence.tokens, max(first, done) if known is sequence else first, end)

    def _read(self, spans: list[TokenSpan]) -> None:
        spans = [span for span in spans if span.first < span.end]
        for operator in self._operators:
            operator.read_ahead(spans)


def operators_of(parts: EngineParts) -> list[ReadsTable]:
    """Operators of an engine's model that read rows of tables from their files."""
    if not isinstance(parts.model, Model) or parts.plan.tables == "ram":
        return []
    blocks = (block for layer in parts.model.layers for block in layer.blocks)
    return [block.operator for block in blocks if isinstance(block.operator, ReadsTable)]


def rows_ahead_of(parts: EngineParts) -> RowsAhead | None:
    """None: there is nothing to read ahead."""
    operators = operators_of(parts)
    return RowsAhead(operators, parts.plan.max_step_tokens, parts.plan.tables == "disk") if operators else None


def unread(turn: SequenceOutput) -> str:
    """Asked once a step, before the sequence goes on: why rows of one of its tokens could not be read, or nothing."""
    sequence = turn.sequence
    if turn.tokens or not unread_rows.take(sequence.slot, sequence.computed_len + turn.chunk.num_verified):
        return ""
    return unread_rows.last


def admission(parts: EngineParts, other: Admitted | None) -> Admitted | None:
    """Hook of a sequence's admission: what was unread belongs to the one that had its slot before. other: another, and
    the only one where no rows are read."""
    if not operators_of(parts):
        return other

    def admitted(sequence: Sequence) -> None:
        unread_rows.take(sequence.slot, 0)
        if other is not None:
            other(sequence)

    return admitted
