"""`PrefillPace`: how much prompt a step may take while others wait for their next token."""

from __future__ import annotations

# A decoding answer pauses no longer than about this for somebody else's prompt. Shorter steps would waste more of a
# prompt's speed: a chunk reads all weights once, however few tokens it has.
SHARED_STEP_SECONDS = 0.25
MIN_TOKENS = 32  # fewer are dominated by reading the weights
_WEIGHT_OF_NEWEST = 0.3
_WEIGHT_BESIDE = 0.05  # of a decoding step beside a prompt, which takes somewhat longer than alone
SLICE_OF_STEP = (
    0.9  # of a decoding step's time alone, for a slice of a prompt: gaps are to stay below 2.5 steps
)


class PrefillPace:
    """Learns tokens per second from steps that had enough tokens to tell.

    Where experts are streamed to the GPU, a step takes about the same time for any number of rows. If that is short,
    others wait for whole chunks; if not, only steps that others waited in say how long such steps take.
    """

    def __init__(
        self,
        max_step_tokens: int,
        streams: bool = False,
        whole_chunks: bool = False,
        pieces: int = 1,
        overlap_tokens: int = 0,
        shared: int = 0,
        pipelined: int = 1,
    ) -> None:
        """streams: experts are streamed in long steps. whole_chunks: such steps are short enough to be waited for.
        pieces: that a chunk can be cut into, so that others wait for one of them; 1: it is a step. overlap_tokens:
        tokens of a chunk that a device computes beside those who decode; 0: as time allows. shared: of all prompts in a
        step that others wait in, at most; 0: the step's. pipelined: chunks of `max_step_tokens` of one prompt, at most,
        in a step that nobody else is in: stages compute them one behind the other."""
        self._max_step_tokens, self._streams, self._whole_chunks = max_step_tokens, streams, whole_chunks
        self._tokens_per_second: float | None = None
        self._pieces, self._overlap_tokens, self._decoding_seconds = pieces, overlap_tokens, 0.0
        self._shared, self._pipelined = shared or max_step_tokens, pipelined

    def decoded(self, seconds: float, overlapped: bool = False) -> None:
        """A step without prompts took so long; overlapped: a slice of one belonged to it. While prompts wait there are
        no others, and more sequences decode than before."""
        known, weight = self._decoding_seconds, _WEIGHT_BESIDE if overlapped else _WEIGHT_OF_NEWEST
        self._decoding_seconds = known + weight * (seconds - known) if known else seconds

    def slice_seconds(self, share: float = SLICE_OF_STEP) -> float:
        """How long a slice of a prompt may take for each step of those who decode; one piece at least is done. share:
        of such a step's time."""
        return share * self._decoding_seconds or SHARED_STEP_SECONDS

    def observe(self, tokens: int, seconds: float, shared: bool = True) -> None:
        """A step of `tokens` rows took so long; shared: with sequences that decode. Pipelined chunks say nothing of one
        alone."""
        pipelined = self._pipelined > 1 and tokens > self._max_step_tokens
        if tokens < MIN_TOKENS or seconds <= 0 or (self._streams and not shared) or pipelined:
            return
        rate, known = tokens / seconds, self._tokens_per_second
        self._tokens_per_second = rate if known is None else known + _WEIGHT_OF_NEWEST * (rate - known)

    def step_tokens(
        self, decoding: int, pauses: bool = True, exclusive: bool = True, pipelines: bool = False
    ) -> int:
        """Token budget of a step in which `decoding` sequences take part: all of it if nobody waits. Until something
        is known, a small chunk finds out. pauses: a chunk is computed in pieces, where it can be. exclusive: no more
        than one prompt wants to be computed. pipelines: it may have several chunks, where stages compute them."""
        if pipelines and decoding == 0 and exclusive:
            return self._max_step_tokens * self._pipelined
        if self._whole_chunks or (decoding == 0 and exclusive):
            return self._max_step_tokens
        most = min(self._max_step_tokens, decoding + self._shared)
        if decoding == 0:
            return most
        if self._overlap_tokens and pauses:
            return min(most, decoding + self._overlap_tokens)
        rate = self._tokens_per_second
        wait = SHARED_STEP_SECONDS
        if pauses and self._pieces > 1 and self._decoding_seconds:
            wait = self._pieces * self.slice_seconds()
        paced = 4 * MIN_TOKENS if rate is None else int(rate * wait)
        return min(most, decoding + max(MIN_TOKENS, paced))
