"""`Scheduler`: which sequences run in the next step, and with how many tokens (continuous batching)."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from typing import Protocol
from weakref import WeakMethod

from tandem.engine.pace import PrefillPace
from tandem.engine.sequence import Chunk, Sequence, Status
from tandem.engine.state.store import StateStore
from tandem.engine.step.step import Step

# Logits rows of prompts (prompt_logprobs) in one step: they are float32 x vocabulary each, 0.2-0.6 MB.
# Rows of draft tokens count as well.
MAX_PROMPT_LOGITS_ROWS = 256


Grow = Callable[[Sequence, int], bool]
"""Gets a sequence pages for so many draft tokens. False: there are none for them."""


class Proposer(Protocol):
    """Says what may come next."""

    def draft_tokens(self, sequences: Rows[Sequence], room: int, grow: Grow) -> Rows[tuple[int, ...]]:
        """Draft tokens of each sequence, for the next step: at most `room` in all, and those that fit pages."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        ...


def _by_arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.arrival


class Scheduler:
    """First come, first served. Decoding sequences run in every step. The rest of the token budget prefills prompts, in
    chunks whose time is bounded (`PrefillPace`). So a long prompt delays nobody by more than that.

    `waiting` and `running` are in order of arrival. The oldest running sequence is never preempted for another, and the
    engine admits only what fits the empty cache. So it always gets on, and everybody becomes the oldest in time.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        max_step_tokens: int,
        max_running: int,
        pace: PrefillPace | None = None,
        proposer: Proposer | None = None,
        on_admit: Callable[[Sequence], None] | None = None,
    ) -> None:
        """pace: None for that of steps which take as long as they have tokens. proposer: None where nothing is
        drafted. on_admit: called before a sequence's first chunk is cut."""
        self._store = store
        self.pace = pace or PrefillPace(max_step_tokens)
        # Each running sequence needs at least one row of a step, or the youngest could starve.
        self._max_running = min(max_running, max_step_tokens)
        self._proposer, self._most_logits_rows = proposer, min(max_step_tokens, MAX_PROMPT_LOGITS_ROWS)
        self._on_admit = on_admit
        self._blocked: tuple[Sequence, int] | None = None
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.decode_rows = 0  # how many chunks of the step were no prompt's: the first ones
        self._background: Step | None = None
        self._on_release: Callable[[], Callable[[], None] | None] | None = None

    def add(self, answers: list[Sequence]) -> None:
        """The n answers of one request. The first prefills; the others wait until they can share its pages."""
        leader, *siblings = answers
        for sibling in siblings:
            sibling.leader = leader
        leader.siblings = siblings
        insort(self.waiting, leader, key=_by_arrival)

    @property
    def in_flight(self) -> tuple[Chunk, ...]:
        """Prefill chunks that are computed between steps; their sequences are in none."""
        return () if self._background is None else self._background.chunks

    def begin_background(self, step: Step, on_release: Callable[[], None]) -> None:
        """These chunks are in flight until `end_background`. on_release: a method, called when one of them loses its
        pages; its object may be freed meanwhile, since a model is freed with its engine."""
        self._background, self._on_release = step, WeakMethod(on_release)

    def end_background(self) -> Step | None:
        """The step that was in flight."""
        step, self._background, self._on_release = self._background, None, None
        return step

    def next(self, pauses: bool = True, pipelines: bool = False) -> list[Chunk]:
        """The step's chunks: decode rows, then prompts under way, then newly admitted ones. Empty: nothing can run.
        pauses: prompts may be computed in pieces. pipelines: as `PrefillPace.step_tokens`."""
        chunks = [Chunk(sequence, 1, 1) for sequence in self._decoding()]
        decoding = self.decode_rows = len(chunks)
        if self._background is not None:
            return chunks
        if self.waiting or decoding < len(self.running):
            chunks += self.prompts(decoding, pauses, pipelines)
        # Beside a prompt a draft would wait longer than it saves, and its cost could not be measured.
        return self._with_drafts(chunks) if chunks and len(chunks) == decoding else chunks

    def prompts(self, decoding: int, pauses: bool = True, pipelines: bool = False) -> list[Chunk]:
        """Chunks of prompts beside so many rows that decode, whose step may be under way: nobody loses pages."""
        asking = sum(sequence.prefills for sequence in self.running) + len(self.waiting)
        if not asking:
            return []  # of most steps
        tokens = self.pace.step_tokens(decoding, pauses, asking < 2, pipelines) - decoding
        chunks, rows = list[Chunk](), self._most_logits_rows
        for sequence, most in self._allotted(self._prefilling(tokens), tokens):
            chunk = self._chunk(sequence, most, rows)
            if not chunk.length:  # the windows of those before take all there is, until the next step has run
                break
            chunks.append(chunk)
            rows -= chunk.logits - 1
        return chunks

    def _with_drafts(self, chunks: list[Chunk]) -> list[Chunk]:
        """Decode rows, and behind them rows of drafts. Nobody loses a page for a draft: each can have its next one."""
        room = self._most_logits_rows - len(chunks)
        if self._proposer is None or room <= 0:
            return chunks
        left = len(chunks)
        drafts = self._proposer.draft_tokens(
            [c.sequence for c in chunks], room, lambda sequence, n: self._store.grow(sequence, n, left)
        )
        if not any(drafts):
            return chunks
        return [
            Chunk(c.sequence, 1 + len(draft_tokens), 1 + len(draft_tokens), draft_tokens) if draft_tokens else c
            for c, draft_tokens in zip(chunks, drafts, strict=True)
        ]

    def advance(self, chunk: Chunk) -> None:
        """The model has run `chunk`: its rows of tokens that the sequence has count. A prompt becomes a cached prefix
        chunk by chunk: all at once would take as long as a step. A finished one wakes the other answers."""
        sequence = chunk.sequence
        answers = len(sequence.tokens) > sequence.prompt_len
        done = not answers and chunk.samples
        sequence.advance(chunk.num_verified)
        sequence.state_len = sequence.computed_len
        if answers and self._store.pages_only:
            return
        self._store.snapshot(sequence)
        if not answers:
            self._store.remember(sequence)
        if done:
            self._wake_siblings(sequence)
        self._store.trim_window(sequence)

    def accept(self, sequence: Sequence) -> None:
        """The token appended last is an accepted draft: the next row of the chunk that has run counts as well."""
        sequence.advance(1)
        self._store.snapshot(sequence)
        self._store.trim_window(sequence)

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Ends a sequence in any state and frees its pages now. `keep`: what they hold is sound, cache it."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence, keep)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.become(Status.FINISHED)
        if self._proposer is not None:
            self._proposer.forget(sequence)
        self._wake_siblings(sequence)

    def _decoding(self) -> Iterator[Sequence]:
        running, grow = Status.RUNNING, self._store.grow
        for sequence in list(self.running):
            runs = sequence.status is running and sequence.decodes
            if runs and (grow(sequence) or self._grow(sequence)):
                yield sequence

    def _prefilling(self, tokens: int) -> list[Sequence]:
        """Prompts under way, then admissions: until all together take the step's tokens, and all but the longest take
        half of them. Else nobody behind a long prompt would get a share."""
        prompts = [s for s in self.running if s.prefills]
        lengths = [self._left(s) for s in prompts]
        while self.waiting and len(self.running) < self._max_running and tokens > 0:
            if sum(lengths) >= tokens and sum(lengths) - max(lengths) >= _share(tokens):
                break
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            prompts.append(sequence)
            lengths.append(self._left(sequence))
        return sorted(prompts, key=_by_arrival)

    def _left(self, sequence: Sequence) -> int:
        """Tokens of its next chunk, at most."""
        return self._store.chunk_end(sequence) - sequence.computed_len

    def _allotted(self, prompts: list[Sequence], tokens: int) -> list[tuple[Sequence, int]]:
        """Half of the tokens for those that need least, the rest by age. So a short prompt behind a long one takes at
        most twice its own time, and so does the long one. Those that get none are left out."""
        left = {sequence: self._left(sequence) for sequence in prompts}
        shares = dict.fromkeys(prompts, 0)
        for some, most in ((sorted(prompts, key=left.__getitem__), _share(tokens)), (prompts, tokens)):
            for sequence in some:
                more = min(left[sequence] - shares[sequence], most - sum(shares.values()))
                shares[sequence] += max(0, more)
        return [(sequence, most) for sequence, most in shares.items() if most]

    def _chunk(self, sequence: Sequence, tokens: int, rows: int) -> Chunk:
        length = min(tokens, self._store.chunk_end(sequence) - sequence.computed_len)
        if sequence.scores_prompt:
            length = min(length, max(1, rows))
        length = self._store.extend_window(sequence, length)  # last: it takes pages for all of them
        if not sequence.scores_prompt:
            return Chunk(sequence, length, int(length == sequence.pending_len))
        first_unknown = max(sequence.computed_len, len(sequence.prompt_logprobs) - 1)
        # After a preemption a chunk may end before the first row that is still to be scored.
        return Chunk(sequence, length, max(0, sequence.computed_len + length - first_unknown))

    def _grow(self, sequence: Sequence) -> bool:
        """Gets the page of the next token, from the youngest if need be. False: `sequence` itself had to go."""
        while not self._store.grow(sequence):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence, keep=True)
        sequence.become(Status.PREEMPTED)
        insort(self.waiting, sequence, key=_by_arrival)
        self.preemptions += 1

    def _release(self, sequence: Sequence, keep: bool) -> None:
        """Nothing may write to pages that are somebody else's."""
        if any(chunk.sequence is sequence for chunk in self.in_flight):
            unfinished = [chunk.sequence for chunk in self.in_flight]
            if self._on_release is not None and (on_release := self._on_release()) is not None:
                on_release()
            for each in unfinished:
                self._store.rollback_window(each)
        self._store.release(sequence, keep=keep)

    def _admit(self, sequence: Sequence) -> bool:
        """Reserves pages for all tokens known now, and leaves one per running sequence, so that the newcomer is not
        preempted at once."""
        if self._blocked == (sequence, self._store.pages.releases):
            return False
        if not self._store.admit(sequence, spare=len(self.running)):
            self._blocked = (sequence, self._store.pages.releases)
            return False
        first_time = sequence.status is Status.WAITING
        sequence.become(Status.RUNNING)
        if first_time:
            sequence.cached_prompt_len = sequence.computed_len
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_by_arrival)
        if self._on_admit is not None:
            self._on_admit(sequence)
        return True

    def _wake_siblings(self, leader: Sequence) -> None:
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            if sibling.status is not Status.FINISHED:
                insort(self.waiting, sibling, key=_by_arrival)


def _share(tokens: int) -> int:
    """Half of a step's tokens, rounded up, for the prompts that need least."""
    return tokens - tokens // 2
