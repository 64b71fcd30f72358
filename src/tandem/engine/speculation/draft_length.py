"""`DraftLengthController`: how many draft tokens are worth a row in the next step.

Each draft token lengthens the step by what its row costs. If accepted, it saves a share of a later step. Both are
measured: the cost by the time of steps, the chance by comparing drafts with what came. Drafts without a row are
compared, too. So a step without drafts costs nothing more, and still tells whether they would have been accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import cached_property
from typing import NamedTuple, Protocol

from tandem.engine.sequence import Sequence
from tandem.engine.speculation.confidence import ConfidenceCalibration
from tandem.engine.speculation.draft import LAYER_KINDS, Draft
from tandem.engine.speculation.step_times import StepTimes

LEAST_GAIN = 1.02  # below it a step goes without drafts: a difference this small may be none
LEAST_CHANCE = 0.02  # of a draft token that is looked at
PROBE_EVERY = 64  # steps with draft tokens, then one without; likewise steps without, then a trial
ASKED_EVERY = 64  # steps without drafts, where not even what may be hoped for would pay
LONGEST_PATIENCE = 1024  # of those steps: each trial that changes nothing doubles them
CLOSE_PATIENCE = 192  # at most, where a trial loses little: not much has to change
_SHORT_TRIAL, _LONG_TRIAL = 3, 8  # steps: of any trial, and of one that loses little
WIDER_EVERY = 8  # steps, then one that has all that might pay: what was never tried is never known
_LEAST_WIDER = 0.9  # of the tokens per second that are expected without more draft tokens: else they are not tried
_MEMORY = 0.97  # of a sequence's counts, from one draft token to the next
_SERVER_MEMORY = 0.995
_SERVER_WEIGHT = 4.0  # draft tokens that the server's mean counts as, for a sequence
_MOST_EVIDENCE = 32.0  # draft tokens that the server's count as, where it is asked how sure that mean is
_FIRST_CHANCES = {1: 0.3, 2: 0.5, 3: 0.7, 4: 0.8, 5: 0.85}  # by kind
_LAYERS_CHANCE = 0.8  # of a trained draft layer's token


class _Acceptance:
    """Hits and trials of draft tokens of one kind; old ones fade."""

    __slots__ = ("hits", "trials")

    def __init__(self, hits: float = 0.0, trials: float = 0.0) -> None:
        self.hits, self.trials = hits, trials

    def add(self, hit: bool, memory: float) -> None:
        self.hits = memory * self.hits + hit
        self.trials = memory * self.trials + 1.0


class Beliefs(NamedTuple):
    """seconds: of a step, by draft tokens of each sequence: 0, 1, …; empty while a step without drafts is not known.
    chances: that a draft token is accepted if those before it are, by kind."""

    seconds: list[float]
    chances: list[float]


class Chances:
    """Probabilities of acceptance of draft tokens, with their drafts' numbers: the likeliest first. Each list is worked
    out when it is asked for: most steps need the first one only."""

    def __init__(self, by: Callable[[float], list[tuple[float, int]]]) -> None:
        """by: so many deviations above the mean."""
        self._by = by

    @cached_property
    def low(self) -> list[tuple[float, int]]:
        """By what is sure; from these the choice is made."""
        return self._by(-1.0)

    @cached_property
    def likely(self) -> list[tuple[float, int]]:
        return self._by(0.0)

    @cached_property
    def high(self) -> list[tuple[float, int]]:
        """By what may be hoped."""
        return self._by(1.0)


class DraftLengths(Protocol):
    """Says which draft tokens get a row."""

    def widths(self, sequences: Rows[Sequence], drafts: Rows[Draft | None], room: int) -> list[int]:
        """Draft tokens of each draft that get a row, `room` in all at most."""
        ...

    def shortened(self, drafts: Rows[Draft | None], widths: list[int]) -> list[int]:
        """The same, or fewer: after they were drawn, by what is said of each draft token."""
        ...

    def learn(self, sequence: Sequence, draft: Draft, tokens: Rows[int]) -> None:
        """tokens: the tokens that the sequence got. Those behind the first rejected draft token tell nothing."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        ...

    def believed(self, sequences: int, most: int) -> Beliefs:
        """Beliefs about steps of so many sequences with up to `most` draft tokens each; empty where nothing depends on
        them."""
        ...

    @property
    def stays(self) -> int:
        """Steps of these sequences for which the last answer stays none, if nothing is learnt meanwhile."""
        ...

    def rested(self, steps: int) -> None:
        """For so many it was not asked."""
        ...


class DraftLengthController:
    """`DraftLengths`, by what was measured. One per engine. `times`: of its steps, which whoever runs them observes."""

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._server: dict[int, _Acceptance] = {}
        self._known: dict[Sequence, dict[int, _Acceptance]] = {}
        self._with = self._without = 0  # steps since the last probe
        self._trying = self._tried = 0  # draft tokens of a trial under way, and its steps
        self._patience = PROBE_EVERY
        self._narrow = 0  # steps since one had all draft tokens that might pay
        self._sureness, self._measures = ConfidenceCalibration(), False
        self.stays = 0

    def widths(self, sequences: Rows[Sequence], drafts: Rows[Draft | None], room: int) -> list[int]:
        chances = Chances(lambda deviations: self._chances(sequences, drafts, deviations)[:room])
        widths, self.stays = [0] * len(drafts), 0
        if self.times.plain(len(sequences)) is None:
            return widths
        if not (chances.low or chances.high):
            self._without += 1
            self.stays = ASKED_EVERY
            return widths
        best = self._best(len(sequences), chances)
        wider = self._wider(len(sequences), chances, best) if best and not self._trying else 0
        self._measures = bool(wider or self._trying)
        ranked = chances.high if self._measures else chances.low
        for _, number in ranked[: wider or best]:
            widths[number] += 1
        return widths

    def shortened(self, drafts: Rows[Draft | None], widths: list[int]) -> list[int]:
        """Drawing them is paid for, so one is left at least; so are all of a trial, which tells what they cost."""
        if self._measures or not any(draft is not None and draft.confidences for draft in drafts):
            return widths
        ranked = [
            (chance, number)
            for number, (draft, width) in enumerate(zip(drafts, widths, strict=True)) if draft is not None
            for chance in self._sureness.chances(draft, width)
        ]  # fmt: skip
        ranked.sort(key=lambda each: -each[0])
        shorter = [0] * len(widths)
        for _, number in ranked[: self._worth(len(widths), [chance for chance, _ in ranked])]:
            shorter[number] += 1
        return shorter

    def _worth(self, sequences: int, chances: Rows[float]) -> int:
        """How many of the draft tokens that are drawn, the likeliest first, give the most tokens per second."""
        cost, tokens, best, most = self.times.curve(sequences), float(sequences), 1, 0.0
        for draft_tokens, chance in enumerate(chances, 1):
            tokens += chance
            if tokens / cost(draft_tokens) > most:
                best, most = draft_tokens, tokens / cost(draft_tokens)
        return best

    def learn(self, sequence: Sequence, draft: Draft, tokens: Rows[int]) -> None:
        self._sureness.learn(draft, tokens)
        known = self._known.setdefault(sequence, {})
        for token, draft_token, kind in zip(tokens, draft.tokens, draft.kinds, strict=False):
            hit = token == draft_token
            known.setdefault(kind, _Acceptance()).add(hit, _MEMORY)
            self._server_counts(kind).add(hit, _SERVER_MEMORY)
            if not hit:
                return

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)

    def rested(self, steps: int) -> None:
        self._without += steps

    def believed(self, sequences: int, most: int) -> Beliefs:
        plain, cost = self.times.plain(sequences), self.times.curve(sequences)
        seconds = [] if plain is None else [plain * cost(sequences * width) for width in range(most + 1)]
        return Beliefs(seconds, [counts.hits / counts.trials for _, counts in sorted(self._server.items())])

    def chance(self, sequence: Sequence, kind: int, deviations: float = -1.0) -> float:
        """That a draft token of this kind is accepted: the mean less one deviation, so that little evidence promises
        little. deviations: or so many more."""
        server = self._server_counts(kind)
        own = self._known.get(sequence, {}).get(kind) or _Acceptance()
        trials = own.trials + _SERVER_WEIGHT
        mean = (own.hits + _SERVER_WEIGHT * server.hits / server.trials) / trials
        evidence = own.trials + min(server.trials, _MOST_EVIDENCE)
        deviation = math.sqrt(mean * (1.0 - mean) / (evidence + 1.0))
        return min(1.0, max(0.0, mean + deviations * deviation))

    def _server_counts(self, kind: int) -> _Acceptance:
        if kind not in self._server:
            first = _LAYERS_CHANCE if kind >= LAYER_KINDS else _FIRST_CHANCES.get(kind, 0.5)
            self._server[kind] = _Acceptance(first * _SERVER_WEIGHT, _SERVER_WEIGHT)
        return self._server[kind]

    def _chances(
        self, sequences: Rows[Sequence], drafts: Rows[Draft | None], deviations: float
    ) -> list[tuple[float, int]]:
        """Probability of every draft token that it and all before it are accepted, with its draft's number; the
        likeliest first. Those of a draft never rise, and sorting keeps their order."""
        ranked: list[tuple[float, int]] = []
        for number, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            chance = 1.0
            for kind in () if draft is None else draft.kinds:
                chance *= self.chance(sequence, kind, deviations)
                if chance < LEAST_CHANCE:
                    break
                ranked.append((chance, number))
        ranked.sort(key=lambda each: -each[0])
        return ranked

    def _best(self, sequences: int, chances: Chances) -> int:
        """The number of draft tokens that gives the most tokens per second."""
        if self._with >= PROBE_EVERY:  # what a step without drafts takes may have changed
            self._with = self._narrow = 0
            return 0
        best = self._fastest(sequences, chances.low)
        if best:
            self._with, self._without, self._trying, self._patience = self._with + 1, 0, 0, PROBE_EVERY
            return best
        self._without += 1
        if self._trying or self._without > self._patience:
            return self._trial(sequences, chances)
        if self._fastest(sequences, chances.high) == 0:
            self.stays = min(ASKED_EVERY, self._patience - self._without)
        return 0

    def _trial(self, sequences: int, chances: Chances) -> int:
        """As if rows were cheap and drafts good: they may have become so. What was drawn for its first step may have
        taken longer than usual, and one step says little; so it has several in a row."""
        if not self._trying:
            self._trying, self._tried = self._fastest(sequences, chances.high, hopeful=True), 0
        self._tried += 1
        most = min(self._trying, len(chances.high))
        close = most > 0 and self._loses_little(sequences, chances, 0, most)
        if most and self._tried <= (_LONG_TRIAL if close else _SHORT_TRIAL):
            return most
        self._trying = self._without = 0
        self._patience = min(2 * self._patience, CLOSE_PATIENCE if close else LONGEST_PATIENCE)
        return 0

    def _wider(self, sequences: int, chances: Chances, best: int) -> int:
        """Now and then: the number of draft tokens that might pay, if it is more than the best and costs little."""
        self._narrow += 1
        if self._narrow < WIDER_EVERY:
            return 0
        self._narrow = 0
        count = self._fastest(sequences, chances.high)
        return count if count > best and self._loses_little(sequences, chances, best, count) else 0

    def _loses_little(self, sequences: int, chances: Chances, best: int, more: int) -> bool:
        """Whether `more` draft tokens instead of `best` cost next to nothing, if those are accepted that are likely to
        be."""
        cost = self.times.curve(sequences)
        usual, slower = ((sequences + sum(each for each, _ in chances.likely[:n])) / cost(n) for n in (best, more))
        return slower >= _LEAST_WIDER * usual

    def _fastest(self, sequences: int, chances: Rows[tuple[float, int]], *, hopeful: bool = False) -> int:
        cost = self.times.curve(sequences, hopeful=hopeful)
        tokens, best, most = float(sequences), 0, LEAST_GAIN
        for draft_tokens, (chance, _) in enumerate(chances, 1):
            tokens += chance
            gain = tokens / sequences / cost(draft_tokens)
            if gain > most:
                best, most = draft_tokens, gain
        return best


class FixedDraftLength:
    """`DraftLengths`: every draft gets all its rows. For `--disable-speculative-governor`."""

    stays = 0

    def widths(self, sequences: Rows[Sequence], drafts: Rows[Draft | None], room: int) -> list[int]:
        widths = []
        for draft in drafts:
            widths.append(0 if draft is None else min(room, len(draft.kinds)))
            room -= widths[-1]
        return widths

    def shortened(self, drafts: Rows[Draft | None], widths: list[int]) -> list[int]:
        return widths

    def learn(self, sequence: Sequence, draft: Draft, tokens: Rows[int]) -> None:
        """Nothing depends on it."""

    def forget(self, sequence: Sequence) -> None:
        """There is nothing to forget."""

    def rested(self, steps: int) -> None:
        """It is asked in every step."""

    def believed(self, sequences: int, most: int) -> Beliefs:
        return Beliefs([], [])
