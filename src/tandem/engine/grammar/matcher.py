"""`GrammarMatcher`: where one answer is in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from tandem.engine.grammar.compiler import CompiledGrammar
from tandem.engine.protocol import SamplingParams
from tandem.engine.sampling.masks import TokenMask, bits_of
from tandem.errors import EngineError


class GrammarMatcher:
    """`mask`: of the answer's next token. `ended`: the grammar allows nothing more, so the answer is complete.

    A grammar that may end or go on allows end tokens as well; where these are ignored, it goes on.
    """

    __slots__ = ("_end_bits", "_inner", "_may_end", "ended", "mask")

    def __init__(self, compiled: CompiledGrammar, sampling: SamplingParams) -> None:
        import xgrammar

        ends = _end_ids(compiled, sampling)
        self._inner = xgrammar.GrammarMatcher(compiled.inner, override_stop_tokens=sorted(ends) or None)
        self._end_bits = bits_of(ends, compiled.vocabulary.size)
        self._may_end = not sampling.ignore_eos
        self.ended = False
        self.mask: TokenMask = np.zeros_like(self._end_bits)
        self._look_ahead()

    def accept(self, token_id: int) -> None:
        """The answer's next token. Raises EngineError for one that `mask` does not allow, or after which nothing
        matches in this vocabulary."""
        if not self._inner.accept_token(token_id):
            raise EngineError(f"token {token_id} does not match the request's grammar")
        self.ended = bool(self._inner.is_terminated())
        if not self.ended:
            self._look_ahead()

    def masks_after(self, drafts: Rows[int]) -> list[TokenMask]:
        """`mask`, and those of the rows behind each of the drafted tokens, up to the first that does not match or ends
        the answer. The matcher stays where it is."""
        masks, taken = [self.mask], 0
        for token_id in drafts:
            if not self._inner.accept_token(token_id):
                break
            taken += 1
            if self._inner.is_terminated():
                break
            masks.append(self._filled(np.zeros_like(self.mask)))
        if taken:
            self._inner.rollback(taken)
        return masks

    def _look_ahead(self) -> None:
        self._filled(self.mask)
        if (self.mask & ~self._end_bits).any():
            return
        if not self._inner.is_completed():
            raise EngineError("no token of this model continues an answer that matches the request's grammar")
        self.ended = True

    def _filled(self, mask: TokenMask) -> TokenMask:
        """In place."""
        self._inner.fill_next_token_bitmask(torch.from_numpy(mask[None]))
        if not self._may_end:
            mask &= ~self._end_bits
        return mask


def _end_ids(compiled: CompiledGrammar, sampling: SamplingParams) -> set[int]:
    """A control token that the request stops at ends the answer as the model's own end tokens do."""
    vocabulary = compiled.vocabulary
    stops = {i for i in sampling.stop_token_ids if i in vocabulary.special}
    return {*vocabulary.end_ids, *stops} - set(compiled.shown)
