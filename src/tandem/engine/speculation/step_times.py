"""`StepTimes`: what rows of draft tokens cost, as measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Rows

_WEIGHT_OF_NEWEST = 0.1
_WEIGHT_OF_RATIO = 0.05  # the machine's pace changes sooner than what rows cost
_WEIGHT_OF_PROBE = 0.4  # of a step without drafts, right behind one that had some
_PROBED = 8  # steps without drafts, at most, that say what those before them cost
_OLD = 64  # steps: what was not measured since is known little
_MOST_EVIDENCE = 32  # measurements that a figure counts as
_LEAST_EVIDENCE = 0.001  # of them, when they are old
_OTHERS_EVIDENCE = 4.0  # measurements that the curve through all figures counts as, beside each of them
_STRAIGHT = 4.0  # likewise, for a curve that is a straight line
_SURE_AFTER = 3  # measurements: the first one of a size pays for more than its rows
_FAR = 0.8  # of a figure, or it of a measurement: nearer ones are noise
_FALLS_AFTER, _RISES_AFTER = 3, 6  # measurements in a row that are far below, or above: then the figure is wrong
_STALE = 0.9  # of a figure without drafts: more rows take no less, so it is the machine that has become faster
_FIRST_SLOPE = 0.4  # of a step without drafts, per draft token of every sequence: until something is known
_HOPEFUL_SLOPE = 0.1  # likewise, for a first trial


class _Figure:
    """Estimate from measurements that others on the machine disturb: their least at first, then a slow mean. Where
    several in a row are far from it, it becomes the nearest of them: sooner below, since nothing makes a step too
    short."""

    __slots__ = ("_far", "_fresh", "count", "last_step", "value")

    def __init__(self, value: float, now: int) -> None:
        self.value, self.count, self.last_step, self._fresh = value, 1, now, 0
        self._far: list[float] = []  # measurements in a row that are far on one side

    def add(self, value: float, now: int, weight: float = _WEIGHT_OF_NEWEST) -> None:
        """now: steps so far. What was not measured for long is known little: the next few count for more."""
        if now - self.last_step > _OLD:
            self._fresh = 0
        self.last_step, self._fresh = now, self._fresh + 1
        self.count += 1
        if self.count <= _SURE_AFTER:
            self.value = min(self.value, value)
            return
        if not self._moves(value):
            near = min(max(value, _FAR * self.value), self.value / _FAR)  # one long pause says nothing
            self.value += max(weight, 1.0 / (1 + self._fresh)) * (near - self.value)

    def _moves(self, value: float) -> bool:
        below, above = value < _FAR * self.value, _FAR * value > self.value
        if not (below or above) or (self._far and (self._far[-1] < self.value) != below):
            self._far.clear()
        if below or above:
            self._far.append(value)
        if len(self._far) < (_FALLS_AFTER if below else _RISES_AFTER):
            return False
        self.value = max(self._far) if below else min(self._far)
        self._far.clear()
        return True

    @property
    def is_reliable(self) -> bool:
        return self.count >= _SURE_AFTER


class _Steps:
    """Step times at one number of sequences. The machine's pace changes, and with it all times; ratios stay. So a step
    with draft tokens whose ratio is known tells the pace. One without drafts, behind one that had some, tells what the
    ratio is."""

    def __init__(self) -> None:
        self.plain: _Figure | None = None
        self.ratios: dict[int, _Figure] = {}
        self._steps = self._last = 0  # draft tokens of the last step that had some

    def observe(self, draft_tokens: int, seconds: float) -> None:
        self._steps += 1
        if draft_tokens == 0:
            self._without(seconds)
        elif self.plain is not None:
            self._with(self.plain, draft_tokens, seconds)

    def _without(self, seconds: float) -> None:
        if self.plain is None:
            self.plain = _Figure(seconds, self._steps)
            return
        before, last = self.plain.value, self.ratios.get(self._last)
        since = self._steps - (last.last_step if last else 0)
        self.plain.add(seconds, self._steps, _WEIGHT_OF_PROBE if last and since == 1 else _WEIGHT_OF_NEWEST)
        if last and last.is_reliable and since <= _PROBED:
            last.value = max(1.0, last.value * before / self.plain.value)

    def _with(self, plain: _Figure, draft_tokens: int, seconds: float) -> None:
        self._last = draft_tokens
        if seconds < _STALE * plain.value:
            plain.add(seconds, self._steps)
        ratio, figure = max(1.0, seconds / plain.value), self.ratios.get(draft_tokens)
        if figure is None:
            self.ratios[draft_tokens] = _Figure(ratio, self._steps)
            return
        if figure.is_reliable and plain.is_reliable and _FAR < ratio / figure.value < 1.0 / _FAR:
            plain.add(seconds / figure.value, self._steps)
        figure.add(ratio, self._steps, _WEIGHT_OF_RATIO)

    def points(self) -> dict[int, float]:
        """Ratios by draft tokens. Each is drawn to a curve through all of them, the more the older it is: one that
        happened to be measured too high would never be measured again."""
        known = [(g, f.value, self._evidence(f)) for g, f in self.ratios.items() if f.is_reliable]
        curve = _fitted(known)
        drawn = {g: value + (curve(g) - value) / (1.0 + each / _OTHERS_EVIDENCE) for g, value, each in known}
        tried = {g: f.value for g, f in self.ratios.items() if not f.is_reliable}
        return drawn | {g: value for g, value in tried.items() if not known or value < curve(g)}

    def _evidence(self, figure: _Figure) -> float:
        age = (self._steps - figure.last_step) / _OLD
        return min(figure.count, _MOST_EVIDENCE) * max(math.exp2(-age), _LEAST_EVIDENCE)


class StepTimes:
    """Seconds of steps without drafts, and how many times as long others take, by sequences and by draft tokens."""

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}

    def observe(self, sequences: int, draft_tokens: int, seconds: float) -> None:
        self._steps.setdefault(rounded(sequences), _Steps()).observe(rounded(draft_tokens), seconds)

    def plain(self, sequences: int) -> float | None:
        """Seconds of a step of so many sequences without drafts, once that is known."""
        known = self._steps.get(rounded(sequences))
        figure = None if known is None else known.plain
        return figure.value if figure is not None and figure.is_reliable else None

    def curve(self, sequences: int, *, hopeful: bool = False) -> Curve:
        """hopeful: as if nothing bad were known."""
        known, first = self._steps.get(rounded(sequences), _Steps()), _FIRST_SLOPE / sequences
        if not hopeful:
            return Curve(known.points(), first)
        if not any(figure.is_reliable for figure in known.ratios.values()):
            return Curve({}, _HOPEFUL_SLOPE / sequences)
        return Curve({g: min(value, 1.0 + first * g) for g, value in known.points().items()}, first)


class Curve:
    """How many times as long a step takes with so many draft tokens: through the known points, and straight on."""

    def __init__(self, points: dict[int, float], first_slope: float) -> None:
        """first_slope: of each draft token, where no point is known."""
        self._first_slope = first_slope
        self._at = [0, *sorted(points)]
        self._values = [1.0, *(points[g] for g in self._at[1:])]

    def __call__(self, draft_tokens: int) -> float:
        i = bisect_left(self._at, draft_tokens)
        if i == len(self._at):
            return 1.0 + self._slope * draft_tokens
        if self._at[i] == draft_tokens:
            return self._values[i]
        (a, b), (low, high) = self._at[i - 1 : i + 1], self._values[i - 1 : i + 1]
        return low + (high - low) * (draft_tokens - a) / (b - a)

    @property
    def _slope(self) -> float:
        last = self._at[-1]
        return (self._values[-1] - 1.0) / last if last else self._first_slope


def _fitted(points: Rows[tuple[int, float, float]]) -> Callable[[int], float]:
    """1 + a g + b g^2, by least squares through points (g, value, weight)."""
    if not points:
        return lambda _: 1.0
    last = max(g for g, _, _ in points)
    scaled = [(g / last, value - 1.0, weight) for g, value, weight in points]
    x2, x3, x4 = (sum(weight * x**power for x, _, weight in scaled) for power in (2, 3, 4))
    y1, y2 = (sum(weight * y * x**power for x, y, weight in scaled) for power in (1, 2))
    b = (y2 - x3 * y1 / x2) / (x4 - x3 * x3 / x2 + _STRAIGHT)
    a = (y1 - b * x3) / x2
    return lambda g: max(1.0, 1.0 + (a + b * g / last) * g / last)


def rounded(count: int) -> int:
    """Counts that are treated alike: each up to 8, then four between powers of two."""
    shift = max(0, count.bit_length() - 3) if count > 8 else 0
    return count >> shift << shift
