"""`StepTimes`: what rows of guesses cost, as measured."""

from __future__ import annotations

from bisect import bisect_left

_WEIGHT_OF_NEWEST = 0.1
_SURE_AFTER = 3  # measurements: the first one of a size pays for more than its rows
_FAR = 0.8  # of a figure, or it of a measurement: nearer ones are noise
_FALLS_AFTER, _RISES_AFTER = 3, 6  # measurements in a row that are far below, or above: then the figure is wrong
_STALE = 0.9  # of a figure without guesses: more rows take no less, so it is the machine that has become faster
_FIRST_SLOPE = 0.4  # of a step without guesses, per guess of every sequence: until something is known


class _Figure:
    """Of measurements that others on the machine disturb: their least at first, then a slow mean. Where several in a
    row are far from it, it becomes the nearest of them: sooner below, since nothing makes a step too short."""

    __slots__ = ("_far", "count", "value")

    def __init__(self, value: float) -> None:
        self.value, self.count = value, 1
        self._far: list[float] = []  # measurements in a row that are far on one side

    def add(self, value: float) -> None:
        self.count += 1
        if self.count <= _SURE_AFTER:
            self.value = min(self.value, value)
            return
        if not self._moves(value):
            near = min(max(value, _FAR * self.value), self.value / _FAR)  # one long pause says nothing
            self.value += _WEIGHT_OF_NEWEST * (near - self.value)

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
    def falls(self) -> bool:
        return bool(self._far) and self._far[-1] < self.value

    @property
    def sure(self) -> bool:
        return self.count >= _SURE_AFTER


class StepTimes:
    """Seconds of steps without guesses, and how many times as long others take, by sequences and by guesses."""

    def __init__(self) -> None:
        self._plain: dict[int, _Figure] = {}
        self._ratios: dict[int, dict[int, _Figure]] = {}

    def observe(self, sequences: int, guesses: int, seconds: float) -> None:
        size = rounded(sequences)
        plain = self._plain.get(size)
        if guesses == 0:
            _add(self._plain, size, seconds)
        elif plain is not None:
            if seconds < _STALE * plain.value:
                plain.add(seconds)
            _add(self._ratios.setdefault(size, {}), rounded(guesses), max(1.0, seconds / plain.value))

    def plain(self, sequences: int) -> float | None:
        """Seconds of a step of so many sequences without guesses, once that is known."""
        figure = self._plain.get(rounded(sequences))
        return figure.value if figure is not None and figure.sure else None

    def falls(self, sequences: int, guesses: int) -> bool:
        """Whether the last step of so many took far less than is known of such steps, which is not believed yet."""
        figure = self._ratios.get(rounded(sequences), {}).get(rounded(guesses))
        return figure is not None and figure.falls

    def curve(self, sequences: int, *, hopeful: bool = False) -> Curve:
        """hopeful: as if nothing bad were known."""
        known, first = self._ratios.get(rounded(sequences), {}), _FIRST_SLOPE / sequences
        sure = {guesses: f.value for guesses, f in known.items() if f.sure}
        made = Curve(sure, first)
        tried = {g: min(f.value, made(g)) for g, f in known.items() if not f.sure}
        if not hopeful:
            return Curve(sure | tried, first)
        return Curve({g: min(value, 1.0 + first * g) for g, value in (sure | tried).items()}, first)


class Curve:
    """How many times as long a step takes with so many guesses: through the known points, and straight on."""

    def __init__(self, points: dict[int, float], first_slope: float) -> None:
        """first_slope: of each guess, where no point is known."""
        self._first_slope = first_slope
        self._at = [0, *sorted(points)]
        self._values = [1.0, *(points[g] for g in self._at[1:])]

    def __call__(self, guesses: int) -> float:
        i = bisect_left(self._at, guesses)
        if i == len(self._at):
            return 1.0 + self._slope * guesses
        if self._at[i] == guesses:
            return self._values[i]
        (a, b), (low, high) = self._at[i - 1 : i + 1], self._values[i - 1 : i + 1]
        return low + (high - low) * (guesses - a) / (b - a)

    @property
    def _slope(self) -> float:
        last = self._at[-1]
        return (self._values[-1] - 1.0) / last if last else self._first_slope


def rounded(count: int) -> int:
    """Counts that are treated alike: each up to 8, then four between powers of two."""
    shift = max(0, count.bit_length() - 3) if count > 8 else 0
    return count >> shift << shift


def _add(figures: dict[int, _Figure], key: int, value: float) -> None:
    if key in figures:
        figures[key].add(value)
    else:
        figures[key] = _Figure(value)
