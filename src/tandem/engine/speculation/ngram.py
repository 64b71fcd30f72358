"""`NGram`: drafts what followed the text's last tokens before.

It needs no weights: it looks the end of a text up in the text itself, prompt and answer (Saxena, 2023, "Prompt lookup
decoding"). The search is that of LZ77 with chains of hashes.
"""

from __future__ import annotations

from array import array

from tandem.engine.sequence import Sequence
from tandem.engine.speculation.draft import Draft

CANDIDATES = 8  # places that are compared with the end of the text: the newest ones
TOKENS_AT_ONCE = 4096  # of prompts that are learnt in one step: about a millisecond
LEAST_AT_ONCE = 32  # of each, more than a step brings
LONGEST_KIND = 16  # matches of so many tokens are as good as longer ones


class NGram:
    """`Drafter` by the longest match of `least` to `longest` tokens; of equally long ones, the newest."""

    def __init__(self, least: int, longest: int) -> None:
        self._least, self._longest = least, longest
        self._texts: dict[Sequence, _SequenceText] = {}

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _SequenceText(sequence.tokens, self._least, self._longest)
        text.read(max(LEAST_AT_ONCE, TOKENS_AT_ONCE // len(self._texts)))
        return text.draft(most) if text.at else None

    def forget(self, sequence: Sequence) -> None:
        self._texts.pop(sequence, None)


class _SequenceText:
    """A text that grows, and where its end stood before.

    A place is the number of tokens in front of it. `at`: the place behind the best match, 0 without one; `matched`: its
    tokens. `_newest`: by the hash of the `least` tokens before it, the newest place that has a token behind it;
    `_older`: of each such place, the one before with that hash, or 0.
    """

    __slots__ = ("_known", "_least", "_longest", "_newest", "_older", "_tokens", "at", "matched")

    def __init__(self, tokens: list[int], least: int, longest: int) -> None:
        """tokens: the sequence's own, which grow."""
        self._tokens, self._least, self._longest = tokens, least, longest
        self._newest: dict[int, int] = {}
        self._older = array("q", bytes(8 * least))
        self._known = least  # places below it are in the index
        self.at = self.matched = 0

    def read(self, most: int) -> None:
        """Takes in what is new, `most` tokens of it, and follows its match or looks for another."""
        new = self._known
        self._index(min(len(self._tokens), new + most))
        if self._known < len(self._tokens):  # a long prompt: some of it is known, none of it is followed yet
            self.at = 0
            return
        if self._known > new and self.at:
            self._follow(new)
        if not self.at and self._known >= self._least:
            self._search()

    def draft(self, most: int) -> Draft:
        """From `at` on; where that reaches the end of the text, on with the draft tokens themselves."""
        tokens, period = self._tokens[self.at : self.at + most], len(self._tokens) - self.at
        while len(tokens) < most:
            tokens.append(tokens[len(tokens) - period])
        kinds = tuple(
            kind_of(self.matched + i) for i in range(most)
        )  # if the ones before are accepted, the match is as much longer
        return Draft(tuple(tokens), kinds)

    def _index(self, end: int) -> None:
        tokens, least, newest, older = self._tokens, self._least, self._newest, self._older
        for place in range(self._known, end):
            name = hash(tuple(tokens[place - least : place]))
            older.append(newest.get(name, 0))
            newest[name] = place
        self._known = max(self._known, end)

    def _follow(self, new: int) -> None:
        """Tokens from `new` on are new: as long as they are the matched ones, the match grows."""
        for place in range(new, self._known):
            if self._tokens[self.at] != self._tokens[place]:
                self.at = 0
                return
            self.at += 1
            self.matched += 1

    def _search(self) -> None:
        """The longest match of the end of the text among the newest candidates."""
        tokens = self._tokens
        place = self._newest.get(hash(tuple(tokens[len(tokens) - self._least :])), 0)
        self.at, self.matched = 0, self._least - 1  # two texts may have one hash
        for _ in range(CANDIDATES):
            if not place:
                break
            length = self._length(place)
            if length > self.matched:
                self.at, self.matched = place, length
                if length >= self._longest:
                    break
            place = self._older[place]

    def _length(self, place: int) -> int:
        """Length of the match in front of a place, in tokens, as far as it counts."""
        tokens, end, most = self._tokens, len(self._tokens), min(self._longest, place)
        for i in range(1, most + 1):
            if tokens[place - i] != tokens[end - i]:
                return i - 1
        return most


def kind_of(matched: int) -> int:
    """2 and 3 tokens, 4 to 7, 8 to 15, more: about twice as many are one kind better."""
    return min(matched, LONGEST_KIND).bit_length()
