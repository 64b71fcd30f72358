"""`GrammarQueue`: requests whose grammars are being compiled. They run when these are there."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Collection, Iterator
from concurrent.futures import Future

from tandem.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from tandem.engine.grammar.matcher import GrammarMatcher
from tandem.engine.grammar.vocabulary import Vocabulary
from tandem.engine.protocol import Grammar
from tandem.engine.sequence import Sequence, Status
from tandem.engine.text.tokenizer import Tokenizer

WAIT_SECONDS = 0.005  # of an engine with nothing else to do; messages wait for that long, too

_Entry = tuple[list[Sequence], Future[CompiledGrammar]]


class GrammarQueue:
    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: Collection[int]) -> None:
        """Cheap: the vocabulary is read at the first grammar, by another thread."""
        self._compiler = GrammarCompiler(lambda: Vocabulary.of(tokenizer.token_table(), vocab, end_ids))
        self._waiting: list[_Entry] = []

    def __len__(self) -> int:
        """Answers that wait."""
        return sum(len(sequences) for sequences, _ in self._waiting)

    def add(self, sequences: list[Sequence], grammar: Grammar) -> None:
        """The answers of one request."""
        self._waiting.append((sequences, self._compiler.compiled(grammar)))

    def ready(self) -> Iterator[tuple[list[Sequence], Exception | None]]:
        """Requests that wait no more, those that were aborted left out: with matchers, or with why there are none."""
        done, self._waiting = self._split()
        for sequences, future in done:
            live = [s for s in sequences if s.status is not Status.FINISHED]
            if live:
                yield live, _give_matchers(live, future)

    def wait(self) -> None:
        """For a moment, or until a grammar is compiled."""
        concurrent.futures.wait(
            [future for _, future in self._waiting],
            timeout=WAIT_SECONDS,
            return_when=concurrent.futures.FIRST_COMPLETED,
        )

    def _split(self) -> tuple[list[_Entry], list[_Entry]]:
        """Those that are done or aborted, and the others; in order of arrival."""
        done: list[_Entry] = []
        still: list[_Entry] = []
        for entry in self._waiting:
            aborted = all(s.status is Status.FINISHED for s in entry[0])
            (done if aborted or entry[1].done() else still).append(entry)
        return done, still


def _give_matchers(sequences: list[Sequence], future: Future[CompiledGrammar]) -> Exception | None:
    try:
        for sequence in sequences:
            sequence.matcher = GrammarMatcher(future.result(), sequence.sampling)
    except Exception as error:  # of this request alone, whatever it is
        return error
    return None
