"""`GrammarMatcher`: where one answer is in its grammar, and which tokens may come next."""

from __future__ import annotations

from time import thread_time

import numpy as np

from tandem.engine.grammar.allowance import Allowance, GrammarTooSlow
from tandem.engine.grammar.compiled import CompiledGrammar
from tandem.engine.grammar.shared_bits import TokenBits
from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling.masks import TokenMask, allows
from tandem.errors import EngineError, RequestError

_PIECE_BYTES = 64
_NO_BEGIN = (
    "the answer that the last message begins does not match what the answer must match (a schema, a grammar, or "
    "tool calls): begin it so that it does, or leave one of them out"
)


class GrammarMatcher:
    """`place`: of the mask of the answer's next token, which `look_ahead` makes there. `ended`: the grammar allows
    nothing more, so the answer is complete.

    A grammar that may end or go on allows end tokens as well; where these are ignored, it goes on. Only an answer that
    is complete as it is may have ended. So any other one's mask can wait until a model is computing its next logits.
    """

    __slots__ = (
        "__weakref__", "_allowance", "_behind", "_compiled", "_due", "_end_bits", "_ends", "_error", "_inner", "_last",
        "_may_end", "_room", "_text_bits", "ended", "place",
    )  # fmt: skip

    def __init__(self, compiled: CompiledGrammar, sampling: SamplingSettings) -> None:
        """Raises RequestError where the grammar does not match what the prompt has begun; EngineError where no answer
        begins, or where looking for one takes too long."""
        import xgrammar

        vocabulary = compiled.vocabulary
        self._compiled, self._inner = compiled, xgrammar.GrammarMatcher(compiled.inner)
        self._ends = _end_ids(compiled, sampling)
        self._text_bits, self._end_bits = vocabulary.shared.of(compiled.shown, self._ends)
        self._behind, self._last = vocabulary.shared.behind, b""
        self._may_end = not sampling.ignore_eos
        self._allowance = Allowance()
        self._room = TokenBits(vocabulary.size)
        self.ended, self.place = False, self._room.tokens
        self._due = True
        self._error: tuple[type[EngineError], str] | None = None
        compiled.users.add(self)
        self._begin(sampling.grammar_prefix.encode())
        self.look_ahead()
        self.check()
        if self.ended:  # by what the prompt has begun: only an end token is to come
            if not self._may_end:
                raise RequestError("the answer that the last message begins is complete", "grammar")
            self.ended = False

    def _begin(self, text: bytes) -> None:
        """In pieces: the text may be long, and the grammar ambiguous."""
        for at in range(0, len(text), _PIECE_BYTES):
            began, piece = thread_time(), text[at : at + _PIECE_BYTES]
            if not self._inner.accept_string(piece):
                raise RequestError(_NO_BEGIN, "grammar")
            self._spend(began, tokens=1)
        self._last = text[-1:]

    def accept(self, token_id: int) -> None:
        """The answer's next token. Raises EngineError for one that `mask` does not allow, or where matching it took too
        long. What `check` raises is known once the next mask is made."""
        if self.ended or not allows(self.mask, token_id):
            raise EngineError(f"token {token_id} does not match the request's grammar")
        if token_id in self._ends:
            self.ended = True
            return
        began = thread_time()
        self._advance(token_id)
        complete, self._due = self._inner.is_completed(), True
        self._spend(began, tokens=1)
        if complete:
            self.look_ahead()
            self.check()

    def look_ahead(self) -> None:
        """Makes the mask, if it is not made. Where there is none, nothing may come, and `check` raises why."""
        if not self._due:
            return
        began, self._due = thread_time(), False
        try:
            self._fill()
            self._spend(began, tokens=0)
        except EngineError as error:
            self._fail(type(error), str(error))
        except Exception as error:  # of the library: others are in the same step
            self._fail(EngineError, f"matching the grammar failed: {error}")

    def _fail(self, kind: type[EngineError], reason: str) -> None:
        self.place.fill(0)
        self._error = kind, reason  # the frames of an exception would keep this matcher, and its grammar in use

    def check(self) -> None:
        """Raises EngineError where no token of this vocabulary continues the answer, or where looking for one took too
        long."""
        if self._error is not None:
            kind, reason = self._error
            raise kind(reason)

    @property
    def mask(self) -> TokenMask:
        """Mask of the answer's next token. Raises what `check` raises."""
        self.look_ahead()
        self.check()
        return self.place

    def try_repeated(self, piece: bytes, times: int, seconds: float) -> float:
        """Seconds of matching a text that often, or as often as it matches; not much more than `seconds`. The matcher
        stays where it is."""
        began, count = thread_time(), 0
        while count < times and thread_time() - began <= seconds and self._inner.accept_string(piece):
            count += 1
        spent = thread_time() - began
        if count:
            self._inner.rollback(count)
        return spent

    def _advance(self, token_id: int) -> None:
        if not self._inner.accept_token(token_id):
            raise EngineError(f"token {token_id} does not match the request's grammar")
        self._last = self._compiled.vocabulary.pieces[token_id][-1:]

    def _fill(self) -> None:
        room, mask = self._room, self.place
        if not self._inner.fill_next_token_bitmask(room.rows):
            room.words.fill(-1)
        complete = room.says_complete
        mask &= self._text_bits
        if (text := self._behind.get(self._last)) is not None:
            mask &= text
        has_tokens = np.count_nonzero(mask) > 0  # NumPy's `any` takes three times as long
        if complete and self._may_end:
            mask |= self._end_bits
        if not has_tokens and not complete:
            raise EngineError("no token of this model continues an answer that matches the request's grammar")
        self.ended = not has_tokens

    def _spend(self, began: float, tokens: int) -> None:
        try:
            self._allowance.spend(thread_time() - began, tokens)
        except GrammarTooSlow:
            self._compiled.too_slow = True  # the next request would hold up the others as long
            raise


def _end_ids(compiled: CompiledGrammar, sampling: SamplingSettings) -> frozenset[int]:
    """A control token that the request stops at ends the answer as the model's own end tokens do. One that the grammar
    spells ends it there only."""
    vocabulary = compiled.vocabulary
    stops = {i for i in sampling.stop_token_ids if i in vocabulary.special}
    return frozenset({*vocabulary.end_ids, *stops} - set(compiled.shown))
