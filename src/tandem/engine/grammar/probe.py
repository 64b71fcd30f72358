"""Tries a grammar before requests wait for it: whether text that it matches can be matched fast enough."""

from __future__ import annotations

import random
from time import thread_time

import numpy as np

from tandem.engine.grammar.allowance import AMBIGUOUS, GrammarTooSlow
from tandem.engine.grammar.compiled import CompiledGrammar
from tandem.engine.grammar.matcher import GrammarMatcher
from tandem.engine.protocol import SamplingSettings
from tandem.errors import EngineError, RequestError

WALKS, WALK_TOKENS, TOKENS = 16, 48, 144  # walks that end soon are many
WALK_SECONDS = 0.3  # of CPU time, all walks: what they have found by then counts
LOOPS = (1, 3)  # bytes that are repeated: behind a star they can be, and a star of a star takes ever longer
LOOP_BYTES, LOOP_SECONDS = 1500, 0.3
LOOP_EVERY = 20  # tokens of a walk

_Chance = random.Random


def probe(compiled: CompiledGrammar) -> None:
    """Raises RequestError. Each call walks the same ways: a grammar is refused always or never."""
    chance, until, tokens = _Chance(0), thread_time() + WALK_SECONDS, 0
    try:
        for _ in range(WALKS):
            if tokens < TOKENS:
                tokens += _walk(compiled, chance, until)
    except GrammarTooSlow as error:
        raise RequestError(AMBIGUOUS) from error
    except EngineError:  # nothing goes on from there in this vocabulary; an answer that gets there says so
        return


def _walk(compiled: CompiledGrammar, chance: _Chance, until: float) -> int:
    """Tokens at random, and how many. The answer does not end where it need not."""
    matcher = GrammarMatcher(compiled, SamplingSettings(ignore_eos=True))
    text = b""
    for number in range(WALK_TOKENS):
        if matcher.ended or thread_time() > until:
            return number
        token = chance.choice(_allowed(matcher, compiled.vocabulary.size))
        matcher.accept(token)
        text += compiled.vocabulary.pieces[token]
        if number % LOOP_EVERY == 0:
            _repeat(matcher, text)
    return WALK_TOKENS


def _repeat(matcher: GrammarMatcher, text: bytes) -> None:
    for length in LOOPS:
        if matcher.try_repeated(text[-length:], LOOP_BYTES // length, LOOP_SECONDS) > LOOP_SECONDS:
            raise GrammarTooSlow(AMBIGUOUS)


def _allowed(matcher: GrammarMatcher, size: int) -> list[int]:
    bits = np.unpackbits(matcher.mask.view(np.uint8), count=size, bitorder="little")
    return np.flatnonzero(bits).tolist()
