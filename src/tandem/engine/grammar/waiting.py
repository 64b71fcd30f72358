"""`GrammarQueue`: requests whose grammars are being compiled. They run when these are there."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Collection, Iterator

from tandem.engine.grammar.compiler import Compilation, GrammarCompiler
from tandem.engine.grammar.matcher import GrammarMatcher
from tandem.engine.grammar.vocabulary import Vocabulary
from tandem.engine.limits import refused_grammar
from tandem.engine.protocol import Grammar
from tandem.engine.sequence import Sequence, Status
from tandem.errors import RequestError
from tandem.text.tokenizer import Tokenizer

WAIT_SECONDS = 0.005  # of an engine with nothing else to do; messages wait for that long, too

_Entry = tuple[list[Sequence], Compilation]


class GrammarQueue:
    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: Collection[int]) -> None:
        """Cheap: the vocabulary is read at the first grammar, by another thread."""
        self._compiler = GrammarCompiler(lambda: Vocabulary.of(tokenizer.token_table(), vocab, end_ids))
        self.waiting: list[_Entry] = []  # requests, with what compiles their grammars

    def __len__(self) -> int:
        """Answers that wait."""
        return sum(len(sequences) for sequences, _ in self.waiting)

    def be_patient(self) -> None:
        """Before the first grammar, where nobody would ask again: a busy machine then takes longer."""
        self._compiler.patient = True

    def add(self, sequences: list[Sequence], grammar: Grammar) -> None:
        """The answers of one request. Raises RequestError or BusyError."""
        try:
            self.waiting.append((sequences, self._compiler.ask(grammar)))
        except RequestError as error:
            raise RequestError(refused_grammar(error), "grammar") from error

    def ready(self) -> Iterator[tuple[list[Sequence], Exception | None]]:
        """Requests that wait no more, those that were aborted left out: with matchers, or with why there are none."""
        for entry in [entry for entry in self.waiting if _live(entry[0]) and entry[1].future.done()]:
            self.waiting.remove(entry)
            live = _live(entry[0])
            yield live, self._give_matchers(live, entry[1])
        for entry in [entry for entry in self.waiting if not _live(entry[0])]:
            self.waiting.remove(entry)
            self._compiler.leave(entry[1])

    def wait(self) -> None:
        """For a moment, or until a grammar is compiled."""
        concurrent.futures.wait(
            [one.future for _, one in self.waiting],
            timeout=WAIT_SECONDS,
            return_when=concurrent.futures.FIRST_COMPLETED,
        )

    def close(self) -> None:
        self._compiler.close()

    def _give_matchers(self, sequences: list[Sequence], one: Compilation) -> Exception | None:
        try:
            compiled = self._compiler.take(one)
            for sequence in sequences:
                sequence.matcher = GrammarMatcher(compiled, sequence.sampling)
        except Exception as error:  # of this request alone, whatever it is
            return error
        return None


def _live(sequences: list[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if sequence.status is not Status.FINISHED]
