"""`Sequence`: one answer of one request, from arrival to its last token."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Rows
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tandem.engine.grammar.matcher import GrammarMatcher
from tandem.engine.protocol import SamplingSettings, TokenLogprob
from tandem.engine.sampling.masks import RowMasks
from tandem.engine.sampling.repetitions import Repetitions
from tandem.engine.vision.rows import ImageRows
from tandem.engine.vision.sequence_images import ImageSequence, SequenceImages
from tandem.engine.vision.spans import ImageSpan
from tandem.spec.vision import Tower


class Status(enum.Enum):
    WAITING = "waiting"  # no pages, never ran
    RUNNING = "running"  # holds pages; prefilling or decoding
    PREEMPTED = "preempted"  # ran, lost its pages, kept its tokens; prefills again
    FINISHED = "finished"  # holds no pages, never runs again


_NEXT_STATUS = {
    Status.WAITING: {Status.RUNNING, Status.FINISHED},
    Status.RUNNING: {Status.PREEMPTED, Status.FINISHED},
    Status.PREEMPTED: {Status.RUNNING, Status.FINISHED},
    Status.FINISHED: set[Status](),
}


class Sequence:
    """Tokens and KV pages of one answer.

    Lengths, in tokens: 0 < prompt_len <= total_len <= max_len, and computed_len <= total_len is how many of them have
    their K and V in pages. A sequence is decoding when exactly one token, the newest, is not computed yet.
    state_len <= computed_len: tokens that its slot's folds hold. Accepted draft tokens are computed, and folded later.
    """

    __slots__ = (
        "arrival",
        "arrived_at",
        "boundary_len",
        "boundary_slot",
        "cached_prompt_len",
        "computed_len",
        "images",
        "index",
        "keys",
        "leader",
        "matched_len",
        "matcher",
        "max_len",
        "num_pages",
        "page_size",
        "page_table",
        "prompt_len",
        "prompt_logprobs",
        "repetitions",
        "request_id",
        "sampling",
        "seed",
        "siblings",
        "slot",
        "slots_taken",
        "started_at",
        "state_len",
        "status",
        "takes_best",
        "token_counts",
        "tokens",
        "window_end",
        "window_first",
        "window_table",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_ids: list[int],
        sampling: SamplingSettings,
        *,
        arrival: int,
        max_len: int,
        page_size: int,
        seed: int,
    ) -> None:
        assert 0 < len(prompt_ids) < max_len, (len(prompt_ids), max_len)
        self.request_id = request_id
        self.index = index
        self.arrived_at = self.started_at = perf_counter()
        self.arrival = (arrival, index)  # orders admission, and preemption the other way round
        self.sampling = sampling
        self.seed = seed
        self.tokens = list(prompt_ids)
        self.images: SequenceImages | None = None
        self.keys = self.tokens  # of the prefix cache, one a token
        self.prompt_len = len(prompt_ids)
        self.max_len = max_len
        self.computed_len = self.state_len = 0
        self.cached_prompt_len = 0  # prompt tokens that cost nothing at the first admission
        self.status = Status.WAITING
        self.page_size = page_size
        self.page_table: npt.NDArray[np.int32] = np.zeros(-(-max_len // page_size), dtype=np.int32)
        self.num_pages = 0
        self.window_table = np.zeros_like(self.page_table)  # of layers that see a window; 0 where it has none
        self.window_first = self.window_end = 0  # numbers first … end - 1 of them are held
        self.slot = 0  # of what is kept of it beside pages; 0: none
        self.slots_taken = 0  # how many it has had: one after each preemption
        self.boundary_slot = 0  # a copy of that as it was after boundary_len tokens
        self.boundary_len = 0
        self.matched_len = (
            0  # tokens whose pages were known at the last admission, with or without a slot's copy
        )
        self.leader: Sequence | None = None  # whose prompt pages this one shares (n > 1)
        self.siblings: list[Sequence] = []  # parked until this leader's prompt is computed
        self.prompt_logprobs: list[TokenLogprob] = []
        self.takes_best: bool | None = None  # whether all further tokens are the best of their rows; None: not known
        self.token_counts: dict[int, int] | None = None  # penalties only, see engine/sampling/penalties.py
        self.repetitions: Repetitions | None = None  # DRY only
        self.matcher: GrammarMatcher | None = None  # of the answer's grammar, if it has one

    @property
    def total_len(self) -> int:
        return len(self.tokens)

    @property
    def pending_len(self) -> int:
        """Tokens still to be fed to the model before the next one can be chosen; 1 while decoding."""
        return len(self.tokens) - self.computed_len

    @property
    def prefills(self) -> bool:
        """Whether more than its newest token is left, or a piece of an image: such rows are always a prompt's."""
        pending = len(self.tokens) - self.computed_len
        if pending != 1 or self.images is None:
            return pending > 1
        return self.images.rows.is_piece(self.computed_len)

    @property
    def decodes(self) -> bool:
        return len(self.tokens) - self.computed_len == 1 and (self.images is None or not self.prefills)

    @property
    def ready_len(self) -> int:
        """Tokens that can be computed: those before the first image whose features are missing."""
        return len(self.tokens) if self.images is None else self.images.ready_len(self.computed_len, len(self.tokens))

    @property
    def answer_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def grammar_ended(self) -> bool:
        """The answer matches its grammar, which allows nothing more."""
        return self.matcher is not None and self.matcher.ended

    @property
    def pages(self) -> list[int]:
        pages: list[int] = self.page_table[: self.num_pages].tolist()
        return pages

    def pages_wanted(self, draft_tokens: int = 0) -> int:
        """Pages that hold all tokens known now, and so many that are drafted."""
        return -(-(len(self.tokens) + draft_tokens) // self.page_size)

    @property
    def reusable_len(self) -> int:
        """Tokens that may come from a cache: the last one must run for its logits, as must prompt rows whose
        log-probabilities are asked for and not there yet."""
        if self.scores_prompt:
            return max(0, len(self.prompt_logprobs) - 1)
        return self.total_len - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted and not all there. The first answer reports them."""
        if self.sampling.prompt_logprobs is None:  # of most, and asked in each step
            return False
        return self.index == 0 and len(self.prompt_logprobs) < self.prompt_len

    def see(self, images: ImageRows) -> None:
        """The prompt has these images. Before it runs."""
        self.images, self.keys = SequenceImages(images), images.keys(self.tokens)

    def become(self, status: Status) -> None:
        assert status in _NEXT_STATUS[self.status], f"{self.status} -> {status}"
        if self.status is Status.WAITING:
            self.started_at = perf_counter()
        self.status = status
        if status is Status.FINISHED:
            self.matcher = None  # or its grammar would count as used, and its memory would not come back

    def add_pages(self, pages: list[int]) -> None:
        end = self.num_pages + len(pages)
        assert end <= len(self.page_table)
        self.page_table[self.num_pages : end] = pages
        self.num_pages = end

    def drop_pages(self) -> list[int]:
        """Gives the pages back to the caller, who releases them; what was computed in them is forgotten."""
        pages = self.pages
        self.num_pages = 0
        self.computed_len = self.state_len = 0
        if self.images is not None:
            self.images.features.clear()
        return pages

    def advance(self, length: int) -> None:
        """`length` more tokens have K and V in pages."""
        computed = self.computed_len = self.computed_len + length
        assert computed <= len(self.tokens) and computed <= self.num_pages * self.page_size

    def append(self, token_id: int) -> None:
        """Raises EngineError for a token that the answer's grammar does not allow."""
        tokens = self.tokens
        assert self.computed_len == len(tokens) < self.max_len
        tokens.append(token_id)
        if self.keys is not tokens:
            self.keys.append(token_id)
        if self.token_counts is not None:
            self.token_counts[token_id] = self.token_counts.get(token_id, 0) + 1
        if self.matcher is not None:
            self.matcher.accept(token_id)


class TokenAt(Protocol):
    """Token ids by position."""

    def __getitem__(self, position: int, /) -> int: ...


class BatchedSequence(ImageSequence, Protocol):
    """Fields of a sequence that a batch is made from. What another rank keeps of it has these alone."""

    num_pages: int
    state_len: int
    slot: int
    page_table: npt.NDArray[np.int32]
    window_table: npt.NDArray[np.int32]

    @property
    def tokens(self) -> TokenAt: ...


class BatchedChunk(Protocol):
    """Fields of a `Chunk` that a batch is made from."""

    @property
    def sequence(self) -> BatchedSequence: ...
    @property
    def offset(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def logits(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def draft_tokens(self) -> tuple[int, ...]: ...
    @property
    def num_verified(self) -> int: ...


class Chunk(NamedTuple):
    """Part of a sequence in one step: rows computed_len : computed_len + length, logits of the last `logits`. offset:
    tokens of chunks before it in the same step, whose rows come first.

    The last rows are of `draft_tokens`, which the sequence does not have yet. Such a row counts only if all draft
    tokens up to its own are what is chosen.
    """

    sequence: Sequence
    length: int
    logits: int
    draft_tokens: tuple[int, ...] = ()
    offset: int = 0

    @property
    def first(self) -> int:
        """Position of its first row."""
        return self.sequence.computed_len + self.offset

    @property
    def num_verified(self) -> int:
        """Rows of tokens that the sequence has."""
        return self.length - len(self.draft_tokens)

    @property
    def prefills(self) -> bool:
        """Whether it is of a prompt, not of a decoding sequence. Asked before the step."""
        return self.sequence.prefills

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that the next one is chosen."""
        sequence = self.sequence
        return self.offset + self.length - len(self.draft_tokens) == len(sequence.tokens) - sequence.computed_len

    @property
    def tokens(self) -> list[int]:
        """Token ids of its rows, draft tokens last."""
        return [*self.sequence.tokens[self.first : self.first + self.num_verified], *self.draft_tokens]

    def cut(self, most: int) -> list[Chunk]:
        """The same rows as chunks of up to `most`, one behind the other. Without draft tokens."""
        assert not self.draft_tokens
        return [self._part(first, min(first + most, self.length)) for first in range(0, self.length, most)]

    def _part(self, first: int, end: int) -> Chunk:
        """Rows first ... end - 1 of it."""
        without_logits = max(first, self.length - self.logits)
        return Chunk(self.sequence, end - first, max(0, end - without_logits), offset=self.offset + first)


def masks_of(sequences: Rows[Sequence]) -> RowMasks:
    """Masks of each sequence's next token; empty where no sequence has a grammar."""
    masked = [sequence for sequence in sequences if sequence.matcher is not None]
    if not masked:
        return ()
    make_masks(masked)
    return places_of(sequences)


def places_of(sequences: Rows[Sequence]) -> RowMasks:
    """Where these masks are, or will be (`make_masks`)."""
    if not [True for sequence in sequences if sequence.matcher is not None]:
        return ()
    return [None if sequence.matcher is None else sequence.matcher.place for sequence in sequences]


def make_masks(sequences: Rows[Sequence]) -> None:
    """Those that are not made yet. Where a grammar fails, nothing may come."""
    for sequence in sequences:
        if sequence.matcher is not None:
            sequence.matcher.look_ahead()


def show(sequences: Rows[Sequence], images: Rows[ImageSpan], tower: Tower | None) -> None:
    """The images of a prompt to all its answers. tower: there, where there are any."""
    if images and tower is not None:
        rows = ImageRows(images, sequences[0].prompt_len, tower.processor.merge)
        for sequence in sequences:
            sequence.see(rows)
