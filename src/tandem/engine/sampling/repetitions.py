"""`Repetitions`: where the end of a text stands before in it, kept up to date token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]

_NONE: Places = np.zeros(0, dtype=np.int64)


class Repetitions:
    """`places`: ascending, where the last token stands before. `lengths`: how many tokens up to there equal the text's
    last ones, `longest` at most. A repetition does not reach over `breakers`.

    A repetition that ends at a place is one token longer than the one that the token before ended one place earlier. So
    a further token costs as much as it has places, not as much as the text is long.
    """

    def __init__(self, longest: int, breakers: Collection[int]) -> None:
        self._longest, self._breakers = longest, frozenset(breakers)
        self._tokens = _Growing(_NONE)
        self._sorted = _NONE, _NONE  # the tokens of a longer piece, and their places
        self._places: dict[int, _Growing] = {}  # of tokens that were looked for
        self._ends = np.zeros(1, dtype=np.int8)  # 0 but while lengths are looked up; [0] is before the text
        self.places, self.lengths = _NONE, _NONE

    def extend(self, tokens: Sequence[int]) -> None:
        """Behind those that are known."""
        if len(tokens) == 1:
            self._follow(tokens[0])
        elif tokens:
            self._append(np.asarray(tokens, dtype=np.int64))
            self._begin()

    def behind(self, places: Places) -> Places:
        """The token behind each place."""
        return self._tokens.array[places + 1]

    @property
    def size(self) -> int:
        """Tokens of the text."""
        return len(self._tokens.array)

    def _begin(self) -> None:
        """From the text alone, one token further back each time."""
        text = self._tokens.array
        order = np.argsort(text, kind="stable")
        self._sorted, self._places = (text[order], order), {}
        self.places = self._places_of(int(text[-1])).array[:-1]
        self.lengths = np.zeros(len(self.places), dtype=np.int64)
        alive = np.arange(len(self.places))
        for length in range(1, min(self._longest, len(text)) + 1):
            first = self.places[alive] - length + 1
            alive = alive[(first >= 0) & (text[first] == text[-length])]
            if not len(alive) or int(text[-length]) in self._breakers:
                break
            self.lengths[alive] = length

    def _follow(self, token: int) -> None:
        known = self._places_of(token)
        before = known.array
        if token in self._breakers:
            places, lengths = _NONE, _NONE
        else:
            places, lengths = before, 1 + self._lengths_at(before - 1)
        known.append(np.asarray([self.size]))
        self._append(np.asarray([token]))
        self.places, self.lengths = places, np.minimum(lengths, self._longest)

    def _lengths_at(self, places: Places) -> Places:
        """Lengths of the repetitions that end at `places`, in the text without its last token; 0 where nothing ends."""
        self._ends[self.places + 1] = self.lengths
        lengths = self._ends[places + 1].astype(np.int64)
        self._ends[self.places + 1] = 0
        return lengths

    def _append(self, tokens: Places) -> None:
        self._tokens.append(tokens)
        if len(self._ends) <= self.size:
            self._ends = np.zeros(2 * self.size + 1, dtype=np.int8)

    def _places_of(self, token: int) -> _Growing:
        if token not in self._places:
            tokens, order = self._sorted
            first, end = np.searchsorted(tokens, (token, token + 1))
            self._places[token] = _Growing(order[first:end])
        return self._places[token]


class _Growing:
    """Numbers, more and more of them."""

    __slots__ = ("_memory", "_size")

    def __init__(self, numbers: Places) -> None:
        self._memory, self._size = numbers, len(numbers)

    @property
    def array(self) -> Places:
        """View of the numbers so far; it does not grow with what is appended later."""
        return self._memory[: self._size]

    def append(self, numbers: Places) -> None:
        end = self._size + len(numbers)
        if end > len(self._memory):
            self._memory = np.concatenate((self.array, np.zeros(max(end, 64), dtype=np.int64)))
        self._memory[self._size : end] = numbers
        self._size = end
