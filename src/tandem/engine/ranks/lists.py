"""`StepLists`: a step's chunks as a list that others can follow; `Mirror`: the chunks again, out of such lists.

Both keep each sequence's tables of pages, so that a list names only what has changed: of most steps, nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tandem.engine.ranks.messages import Place, SentRows, StepList
from tandem.engine.sequence import BatchedChunk, Chunk, Sequence, Status
from tandem.engine.speculation.draft_batch import DraftRows
from tandem.engine.vision.sequence_images import SequenceImages
from tandem.errors import EngineError

Table = npt.NDArray[np.int32]


class _SentState(NamedTuple):
    """State of a sequence that the other ranks know."""

    number: int
    pages: Table
    windows: Table


class StepLists:
    """The first rank's side."""

    def __init__(self) -> None:
        self._sent: dict[Sequence, _SentState] = {}
        self._copies: list[tuple[int, int]] = []
        self._steps = self._sequences = 0

    def copied(self, source: int, target: int) -> None:
        """Slot `target` became what `source` is, after the last list."""
        self._copies.append((source, target))

    def of(self, chunks: Several[Chunk], **more: Any) -> StepList:
        """more: further fields of `StepList`."""
        return self._list([self._rows(each.sequence, each, each.logits) for each in chunks], **more)

    def drafts(self, runs: Several[DraftRows], widths: Several[int]) -> StepList:
        """Rows of the draft layer."""
        rows = [self._rows(run.sequence, run, int(run.wanted)) for run in runs]
        return self._list(rows, widths=list(widths))

    def _list(self, rows: list[SentRows], **more: Any) -> StepList:
        ended = [self._sent.pop(s).number for s in list(self._sent) if s.status is Status.FINISHED]
        self._steps += 1
        copies, self._copies = self._copies, []
        return StepList(self._steps, rows, ended, copies, **more)

    def _rows(self, sequence: Sequence, run: Chunk | DraftRows, logits: int) -> SentRows:
        if sequence not in self._sent:
            self._sequences += 1
            none = np.full_like(sequence.page_table, -1)
            self._sent[sequence] = _SentState(self._sequences, none, none.copy())
        number, pages, windows = self._sent[sequence]
        held = sequence.num_pages
        return SentRows(
            number, run.first, run.tokens, logits, sequence.slot, held,
            _changed(pages[:held], sequence.page_table[:held]), _changed(windows[:held], sequence.window_table[:held]),
            len(run.draft_tokens) if isinstance(run, Chunk) else 0, sequence.state_len,
        )  # fmt: skip


def _changed(table: Table, now: Table) -> list[Place]:
    """Which places are to be said; from now on they are."""
    places = np.flatnonzero(table != now)
    table[places] = now[places]
    return list(zip(places.tolist(), now[places].tolist(), strict=True))


class Mirrored:
    """A `BatchedSequence`."""

    matcher = None  # the first rank chooses tokens
    images: SequenceImages | None = None  # ranks read none

    def __init__(self, places: int) -> None:
        self.tokens: dict[int, int] = {}  # of a step's only row of it, by position
        self.page_table = np.zeros(places, dtype=np.int32)
        self.window_table = np.zeros(places, dtype=np.int32)
        self.num_pages = self.computed_len = self.state_len = self.slot = 0


class MirroredChunk(NamedTuple):
    """A `BatchedChunk`."""

    sequence: Mirrored
    tokens: list[int]
    logits: int
    draft_tokens: tuple[int, ...] = ()
    offset: int = 0

    @property
    def first(self) -> int:
        return self.sequence.computed_len

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_verified(self) -> int:
        return len(self.tokens) - len(self.draft_tokens)


class Mirror:
    """Another rank's side."""

    def __init__(self, longest: int) -> None:
        """longest: pages of a sequence."""
        self._longest, self._steps = longest, 0
        self._sequences: dict[int, Mirrored] = {}

    def chunks(self, step: StepList) -> list[BatchedChunk]:
        """Raises EngineError where a list was lost: nothing would fit any more."""
        return [self._chunk(rows) for rows in self._rows(step)]

    def runs(self, step: StepList) -> list[DraftRows]:
        """Rows of the draft layer. Raises as `chunks`."""
        return [self._run(rows) for rows in self._rows(step)]

    def _rows(self, step: StepList) -> list[SentRows]:
        self._steps += 1
        if step.number != self._steps:
            raise EngineError(f"step {self._steps} was awaited, and step {step.number} came")
        for number in step.ended:
            del self._sequences[number]
        return step.rows

    def _chunk(self, rows: SentRows) -> MirroredChunk:
        drafts = tuple(rows.tokens[len(rows.tokens) - rows.draft_tokens :])
        return MirroredChunk(self._sequence(rows), rows.tokens, rows.logits, drafts)

    def _run(self, rows: SentRows) -> DraftRows:
        sequence = cast(Sequence, self._sequence(rows))  # as far as a batch asks
        return DraftRows(sequence, rows.first, rows.tokens, rows.logits > 0)

    def _sequence(self, rows: SentRows) -> Mirrored:
        """As it is now."""
        known = self._sequences.get(rows.sequence)
        if known is None:
            known = self._sequences[rows.sequence] = Mirrored(self._longest)
        known.computed_len, known.state_len, known.slot = rows.first, rows.state_len, rows.slot
        for place, page in rows.pages:
            known.page_table[place] = page
        for place, page in rows.windows:
            known.window_table[place] = page
        known.num_pages = rows.held
        known.tokens = {rows.first: rows.tokens[0]} if len(rows.tokens) == 1 else {}
        return known
