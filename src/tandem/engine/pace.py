"""`PrefillPace`: how much prompt a step may take while others wait for their next token."""

from __future__ import annotations

# A decoding answer pauses no longer than about this for somebody else's prompt. Shorter steps would waste more of a
# prompt's speed: a chunk reads all weights once, however few tokens it has.
SHARED_STEP_SECONDS = 0.25
MIN_TOKENS = 32  # fewer are dominated by reading the weights
_WEIGHT_OF_NEWEST = 0.3


class PrefillPace:
    """Learns tokens per second from steps that had enough tokens to tell.

    Where experts travel to the GPU, a step takes about the same time for any number of rows. If that is short, others
    wait for whole chunks; if not, only steps that others waited in say how long such steps take.
    """

    def __init__(self, max_step_tokens: int, streams: bool = False, whole_chunks: bool = False) -> None:
        """streams: experts travel in long steps. whole_chunks: such steps are short enough to be waited for."""
        self._max_step_tokens, self._streams, self._whole_chunks = max_step_tokens, streams, whole_chunks
        self._tokens_per_second: float | None = None

    def observe(self, tokens: int, seconds: float, shared: bool = True) -> None:
        """A step of `tokens` rows took so long; shared: with sequences that decode."""
        if tokens < MIN_TOKENS or seconds <= 0 or (self._streams and not shared):
            return
        rate, known = tokens / seconds, self._tokens_per_second
        self._tokens_per_second = rate if known is None else known + _WEIGHT_OF_NEWEST * (rate - known)

    def step_tokens(self, decoding: int) -> int:
        """Token budget of a step in which `decoding` sequences take part: all of it if nobody waits. Until something
        is known, a small chunk finds out."""
        if decoding == 0 or self._whole_chunks:
            return self._max_step_tokens
        rate = self._tokens_per_second
        paced = 4 * MIN_TOKENS if rate is None else int(rate * SHARED_STEP_SECONDS)
        return min(self._max_step_tokens, decoding + max(MIN_TOKENS, paced))
