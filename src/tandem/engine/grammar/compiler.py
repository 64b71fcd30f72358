"""`GrammarCompiler`: grammars to what sequences are matched against, off the engine's thread, and kept for the next."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tandem.engine.grammar.backend import quick_switches
from tandem.engine.grammar.process import CompilerProcess, allowed_cpus
from tandem.engine.grammar.vocabulary import Vocabulary
from tandem.engine.protocol import Grammar

MOST_AT_ONCE = 4  # jobs in the compiling process
MOST_CACHED, MOST_CACHED_BYTES = 1024, 512 << 20


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """What any number of sequences may be matched against at once. `shown`: control tokens that it spells."""

    inner: Any  # xgrammar's
    vocabulary: Vocabulary
    shown: tuple[int, ...]
    nbytes: int


class GrammarCompiler:
    """`compiled` is called by the engine's thread alone and returns at once.

    Other threads wait for the compiling process and read what it made, which for a large vocabulary takes a tenth of a
    second in C++, without Python's lock.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """vocabulary: called at the first grammar. Made before the calling thread is bound to a CPU, as others that it
        makes later would be, too."""
        self._read, self._cpus = vocabulary, allowed_cpus()
        self._lock = threading.Lock()
        self._ready: tuple[Vocabulary, CompilerProcess] | None = None
        self._infos: OrderedDict[tuple[int, ...], Any] = (
            OrderedDict()
        )  # xgrammar's, by the tokens that are text
        self._cache: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None

    def compiled(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The future has a RequestError, without a field, where the grammar cannot be compiled in bounded time and
        memory; EngineError where nothing can."""
        known = self._cache.get(grammar)
        if known is None or (known.done() and known.exception() is not None):
            self._cache[grammar] = known = self._pool().submit(self._compile, grammar)
        self._cache.move_to_end(grammar)
        self._forget()
        return known

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._ready is not None:
            self._ready[1].close()

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                MOST_AT_ONCE, "grammar", initializer=os.sched_setaffinity, initargs=(0, self._cpus)
            )
        return self._threads

    def _forget(self) -> None:
        """The least recently used; those that sequences use live on with them."""
        sizes = {grammar: _nbytes(future) for grammar, future in self._cache.items()}
        total = sum(sizes.values())
        while len(self._cache) > 1 and (len(self._cache) > MOST_CACHED or total > MOST_CACHED_BYTES):
            oldest, _ = self._cache.popitem(last=False)
            total -= sizes[oldest]

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        vocabulary, process = self._started()
        shown = vocabulary.spelt_in(grammar.text)
        text = process.compiled(grammar, shown)
        import xgrammar

        inner = xgrammar.CompiledGrammar.deserialize_json(text.decode(), self._info(vocabulary, shown))
        return CompiledGrammar(inner, vocabulary, shown, inner.memory_size_bytes)

    def _started(self) -> tuple[Vocabulary, CompilerProcess]:
        with self._lock:
            if self._ready is None:
                with quick_switches():
                    vocabulary = self._read()
                    import xgrammar  # noqa: F401
                self._ready = vocabulary, CompilerProcess(vocabulary, self._cpus)
            return self._ready

    def _info(self, vocabulary: Vocabulary, shown: tuple[int, ...]) -> Any:
        with self._lock:
            if shown not in self._infos:
                self._infos[shown] = vocabulary.tokenizer_info(shown)
            if len(self._infos) > MOST_AT_ONCE:
                self._infos.popitem(last=False)
            return self._infos[shown]


def _nbytes(future: Future[CompiledGrammar]) -> int:
    done = future.done() and not future.cancelled() and future.exception() is None
    return future.result().nbytes if done else 0
