"""`Allowance`: how much of a thread's time one answer's grammar may take. An ambiguous grammar takes ever more.

xgrammar follows all ways in which a text can be matched. Of `s ::= s s | [a-z]` there are more with every letter.
"""

from __future__ import annotations

from tandem.errors import EngineError

# Usual grammars take 0.01 to 2 ms a token with 150,000 tokens; long patterns 15 ms. Others of the step wait for it.
SECONDS_PER_TOKEN = 0.02
MOST_SECONDS = 0.25  # ahead of that: what a single token may hold the others up

AMBIGUOUS = (
    "matching the grammar takes too long: it is ambiguous, as ([a-z]*)* and s ::= s s are; write it so that "
    "each text can be matched in one way only"
)


class GrammarTooSlow(EngineError):
    """Error of one answer whose grammar takes too long; the others go on."""


class Allowance:
    """It is given CPU time, so that a busy machine changes nothing."""

    __slots__ = ("_debt",)

    def __init__(self) -> None:
        self._debt = 0.0  # seconds

    def spend(self, seconds: float, tokens: int) -> None:
        """Raises GrammarTooSlow."""
        self._debt = max(0.0, self._debt + seconds - tokens * SECONDS_PER_TOKEN)
        if self._debt > MOST_SECONDS:
            raise GrammarTooSlow(AMBIGUOUS)
