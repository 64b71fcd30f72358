"""`Speculation`: a drafter, its governor, and what they have gained."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from time import monotonic, perf_counter

from tandem.engine.protocol import SpeculationStats
from tandem.engine.scheduler import Grow
from tandem.engine.sequence import Sequence
from tandem.engine.speculation.draft import BatchDrafter, ConfidenceDrafter, Draft, Drafter
from tandem.engine.speculation.draft_length import DraftLengthController, DraftLengths, FixedDraftLength
from tandem.engine.speculation.dry_run_drafts import CHEAP_ROWS, DryRunDrafts
from tandem.engine.speculation.step_times import StepTimes
from tandem.engine.step.step import SequenceOutput
from tandem.errors import RanksApart

LOG_SECONDS = 60.0
RETRY_SECONDS, MOST_RETRY_SECONDS = 60.0, 3600.0  # without drafts after a drawing that failed; each doubles it
OBSERVED_EVERY = 8  # steps in which nobody is asked: what one of them takes is booked
MOST_UNUSUAL = 2  # drawings in a row whose time is left out of account: more are what is usual

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _DraftedStep:
    """The step that was last asked for drafts. drafts: of those that go on; speculative: whether there were any.
    usual: its time says what such steps take."""

    sequences: list[Sequence]
    drafts: dict[Sequence, Draft] = field(default_factory=dict)
    usual: bool = True
    speculative: bool = False

    def was(self, turns: Rows[SequenceOutput]) -> bool:
        """Whether these are its turns. A step that failed has none, and its sequences never run again."""
        same = len(turns) == len(self.sequences)
        return same and all(turn.sequence is each for turn, each in zip(turns, self.sequences, strict=True))


_NOBODY = _DraftedStep([])


def _cheapest(
    drawing: BatchDrafter, sequences: Rows[Sequence], offers: Rows[Draft | None]
) -> list[tuple[Sequence, int]]:
    """Whose drafts are compared, and how many: of all that lack few rows, or of the one that lacks fewest."""
    lacks = {s: drawing.behind(s) for s, offer in zip(sequences, offers, strict=True) if offer}
    most = max(CHEAP_ROWS, min(lacks.values(), default=0))
    cheap = [(s, len(offer.kinds)) for s, offer in zip(sequences, offers, strict=True) if offer and lacks[s] <= most]
    return cheap if most == CHEAP_ROWS else cheap[:1]


class Speculation:
    """Draft tokens for the scheduler, which the engine then tells what became of them.

    Whoever tells of a step need not know whether drafts were asked for it: of other steps nothing is learnt.
    """

    def __init__(
        self,
        drafter: Drafter,
        algorithm: str,
        most: int,
        *,
        governed: bool,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """most: draft tokens of one sequence in one step. clock: of what drawing takes."""
        self._drafter, self._algorithm, self._most, self._governed = drafter, algorithm, most, governed
        self._times = StepTimes()
        self._governor: DraftLengths = DraftLengthController(self._times) if governed else FixedDraftLength()
        self._drawing = drafter if isinstance(drafter, BatchDrafter) else None
        self._confidence_drafter = (
            drafter if isinstance(drafter, ConfidenceDrafter) else None
        )  # asked once: that takes longer than most calls
        self._shadows, self._clock, self._unusual = DryRunDrafts(), clock, 0
        self._rests, self._rested_until = RETRY_SECONDS, float("-inf")  # after a drawing that failed
        self._drafted = self._quiet = _NOBODY
        self._quiet_left = self._skipped = 0  # steps that the quiet one stands for, still and until now
        self._quiet_seconds = 0.0
        self._steps = self._with_drafts = self._draft_tokens = self._accepted = self._tokens = 0
        self._widths, self._sequences = [0] * (most + 1), 1  # of the last step
        self._saved = 0.0
        self._logged = monotonic()

    def draft_tokens(self, sequences: Rows[Sequence], room: int, grow: Grow) -> list[tuple[int, ...]]:
        """As `scheduler.Proposer`. Where none was made and that cannot change soon, nobody is asked for a while."""
        if self._quiet_left and self._quiet.sequences == sequences:
            self._quiet_left -= 1
            self._skipped += 1
            self._drafted = self._quiet
            return [()] * len(sequences)
        self._wake()
        self._drafted = _DraftedStep(list(sequences))
        drafts = [self._draft(sequence) for sequence in sequences]
        widths = self._governor.widths(sequences, drafts, room)
        widths = [
            width if width and grow(sequence, width) else 0
            for sequence, width in zip(sequences, widths, strict=True)
        ]
        if self._drawing is not None:
            drafts = self._drawn(self._drawing, sequences, drafts, widths, grow)
            widths = self._governor.shortened(drafts, widths)
        self._drafted.drafts = {s: draft for s, draft in zip(sequences, drafts, strict=True) if draft is not None}
        self._drafted.speculative = bool(self._drafted.drafts)
        if self._drawing is not None and not self._drafted.speculative and self._drafted.usual:
            self._quiet, self._quiet_left = self._drafted, min(self._governor.stays, self._shadows.stays)
        return [
            () if draft is None else draft.tokens[:width]
            for draft, width in zip(drafts, widths, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        self._drafter.forget(sequence)
        self._governor.forget(sequence)
        self._shadows.forget(sequence)
        self._drafted.drafts.pop(sequence, None)

    def _wake(self) -> None:
        if self._skipped:
            self._governor.rested(self._skipped)
            self._shadows.rested(self._skipped)
            self._shadows.passed(self._quiet_seconds)
        self._quiet_left, self._skipped, self._quiet_seconds = 0, 0, 0.0

    def _drawn(
        self,
        drawing: BatchDrafter,
        sequences: Rows[Sequence],
        offers: Rows[Draft | None],
        widths: list[int],
        grow: Grow,
    ) -> list[Draft | None]:
        """Drafts of the offers whose draft tokens get a row. Now and then, where none does, some are drawn to be
        compared with what comes."""
        each = list(zip(sequences, offers, widths, strict=True))
        draws = [(sequence, width) for sequence, _, width in each if width]
        shadow = not draws and self._governed and self._shadows.due(any(offers))
        if shadow:
            draws = [(s, n) for s, n in _cheapest(drawing, sequences, offers) if grow(s, n)]
        if not draws:
            self._unusual = 0  # what follows a pause makes up for it, and says nothing of steps in a row
            return [None] * len(each)
        started = self._clock()
        tokens = dict(zip([sequence for sequence, _ in draws], self._draw(drawing, draws), strict=True))
        self._unusual = self._unusual + 1 if drawing.unusual else 0
        self._drafted.usual = not shadow and not 0 < self._unusual <= MOST_UNUSUAL
        drawn = {
            s: d._replace(tokens=tokens[s], confidences=self._confidences(s))
            for s, d, _ in each if d is not None and tokens.get(s)
        }  # fmt: skip
        if shadow:
            self._shadows.cast(drawn, self._clock() - started)
            return [None] * len(each)
        return [drawn.get(sequence) for sequence in sequences]

    def _confidences(self, sequence: Sequence) -> tuple[float, ...]:
        return () if self._confidence_drafter is None else self._confidence_drafter.confidences(sequence)

    def _draw(self, drawing: BatchDrafter, draws: Rows[tuple[Sequence, int]]) -> Rows[tuple[int, ...]]:
        """If it fails, answers go on without drafts, for a while. Raises RanksApart."""
        try:
            draft_tokens = drawing.draw(draws)
        except RanksApart:
            raise
        except Exception:
            _log.exception("no draft tokens could be drawn; for %.0f s each step decodes one token", self._rests)
            self._rested_until = self._clock() + self._rests
            self._rests = min(2 * self._rests, MOST_RETRY_SECONDS)
            return [()] * len(draws)
        self._rests = RETRY_SECONDS
        return draft_tokens

    def ran(self, turns: Rows[SequenceOutput], seconds: float) -> None:
        """Learns from a step: the tokens that its sequences got, and its seconds, drawing included."""
        query = self._drafted
        if not turns or not query.was(turns):  # a prompt was computed, or it failed
            return
        self._drafted = _NOBODY
        if self._skipped and query is self._quiet:
            self._passed_quietly(len(turns), seconds)
            return
        draft_tokens = sum(len(turn.chunk.draft_tokens) for turn in turns) if query.speculative else 0
        if query.speculative or self._shadows.waiting:
            for turn in turns:
                self._note(turn, query.drafts.get(turn.sequence))  # none if it has ended
        else:
            self._widths[0] += len(turns)
        self._shadows.passed(seconds)
        if query.usual:
            self._times.observe(len(turns), draft_tokens, seconds)
        self._steps, self._sequences = self._steps + 1, len(turns)
        if draft_tokens:
            self._gained(turns, seconds)
            self._say()

    def _passed_quietly(self, sequences: int, seconds: float) -> None:
        """A step for which nobody was asked: little is done here, since nothing is computed meanwhile."""
        self._steps += 1
        self._widths[0] += sequences
        self._quiet_seconds += seconds
        if self._skipped % OBSERVED_EVERY == 0:
            self._times.observe(sequences, 0, seconds)

    def _gained(self, turns: Rows[SequenceOutput], seconds: float) -> None:
        """By a step that had drafts."""
        tokens, plain = sum(turn.tokens for turn in turns), self._times.plain(len(turns))
        self._with_drafts += 1
        self._tokens += tokens
        self._saved += 0.0 if plain is None else plain * tokens / len(turns) - seconds

    def stats(self) -> SpeculationStats:
        believed = self._governor.believed(self._sequences, self._most)
        return SpeculationStats(
            algorithm=self._algorithm,
            governed=self._governed,
            most=self._most,
            steps=self._steps,
            draft_steps=self._with_drafts,
            draft_step_tokens=self._tokens,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted,
            widths=list(self._widths),
            saved_seconds=self._saved,
            believed_seconds=believed.seconds,
            believed_chances=believed.chances,
        )

    def _draft(self, sequence: Sequence) -> Draft | None:
        """Nothing is drafted behind the last token of an answer."""
        most = min(self._most, sequence.max_len - sequence.total_len - 1)
        if self._drawing is not None and self._clock() < self._rested_until:
            return None
        return self._drafter.propose(sequence, most) if most > 0 and sequence.answer_len else None

    def _note(self, turn: SequenceOutput, draft: Draft | None) -> None:
        width, accepted = len(turn.chunk.draft_tokens), max(0, turn.tokens - 1)
        self._widths[width] += 1
        self._draft_tokens += width
        self._accepted += accepted
        for shadow, tokens in self._shadows.compared(turn.sequence):
            self._governor.learn(turn.sequence, shadow, tokens)
        if draft is not None and turn.tokens:
            self._governor.learn(turn.sequence, draft, turn.sequence.tokens[-turn.tokens :])

    def _say(self) -> None:
        now = monotonic()
        if now - self._logged < LOG_SECONDS:
            return
        self._logged = now
        _log.info(
            "speculation %s: %d of %d decode steps had drafts; %.0f %% of %d tokens accepted; %.1f s saved since start",
            self._algorithm, self._with_drafts, self._steps,
            100.0 * self._accepted / max(1, self._draft_tokens), self._draft_tokens, self._saved,
        )  # fmt: skip
