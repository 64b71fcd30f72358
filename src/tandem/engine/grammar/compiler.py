"""`GrammarCompiler`: grammars to what sequences are matched against, off the engine's thread, and kept for the next."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tandem.engine.grammar.allowance import AMBIGUOUS
from tandem.engine.grammar.backend import quick_switches
from tandem.engine.grammar.compiled import CompiledGrammar
from tandem.engine.grammar.process import Cancellation, CompilerProcess, allowed_cpus
from tandem.engine.grammar.sources import is_small
from tandem.engine.grammar.vocabulary import Vocabulary
from tandem.engine.protocol import Grammar
from tandem.errors import BusyError, EngineError, RequestError
from tandem.planner.memory import GRAMMAR_BYTES

# Of small grammars, and of others: so many clients with a schema each wait for each other, and not for hostile ones.
MOST_AT_ONCE = 2  # jobs in the compiling process
MOST_SMALL_WAITING, MOST_WAITING = 4096, 64  # being compiled or waiting for it
MOST_CACHED = 1024


class Compilation:
    """One grammar, being compiled or compiled. `waiting`: requests that wait for it."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar, self.waiting, self.small = grammar, 0, is_small(grammar)
        self.cancellation = Cancellation()
        self.future: Future[CompiledGrammar]

    @property
    def compiled(self) -> CompiledGrammar | None:
        """None: it is not there yet, or never will be."""
        done = self.future.done() and not self.future.cancelled() and self.future.exception() is None
        return self.future.result() if done else None

    @property
    def failed(self) -> bool:
        return self.future.done() and self.compiled is None

    @property
    def idle(self) -> bool:
        """Nobody's answer is matched against it, or will be."""
        return not self.waiting and (self.compiled is None or not self.compiled.users)


class GrammarCompiler:
    """For the engine's thread alone; what it calls returns at once.

    Other threads wait for the compiling process and read what it made, which for a large vocabulary takes a tenth of a
    second in C++, without Python's lock.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], most_bytes: int = GRAMMAR_BYTES) -> None:
        """vocabulary: called at the first grammar. Made before the calling thread is bound to a CPU, as others that it
        makes later would be, too. most_bytes: of all compiled grammars."""
        self.patient = False  # until the first grammar; see `CompilerProcess`
        self._read, self._cpus, self._most_bytes = vocabulary, allowed_cpus(), most_bytes
        self._lock = threading.Lock()
        self._ready: tuple[Vocabulary, Any, CompilerProcess] | None = None  # with xgrammar's tables of it
        self._known: OrderedDict[Grammar, Compilation] = OrderedDict()
        self._threads: dict[bool, ThreadPoolExecutor] = {}  # for small grammars, and for others

    def ask(self, grammar: Grammar) -> Compilation:
        """For one request, until `take` or `leave`. Raises RequestError, without a field, where an answer has shown
        that it cannot be matched fast enough; BusyError where too many are being compiled."""
        known = self._known.get(grammar)
        if known is None or known.failed:
            known = self._begin(grammar)
        elif known.compiled is not None and known.compiled.too_slow:
            raise RequestError(AMBIGUOUS)
        self._known.move_to_end(grammar)
        known.waiting += 1
        return known

    def leave(self, one: Compilation) -> None:
        """A request waits no more. Nobody's grammar is not compiled to its end."""
        one.waiting -= 1
        if not one.waiting and not one.future.done():
            one.future.cancel()
            one.cancellation.cancel()
            self._drop(one)

    def take(self, one: Compilation) -> CompiledGrammar:
        """Compiled grammar of a future that is done. Its matchers must be made before anything else is asked. Raises
        RequestError, without a field, where the grammar cannot be compiled in bounded time and memory. Raises
        EngineError where nothing can, or where others take the memory of all."""
        one.waiting -= 1
        compiled = self._result(one)
        if not self._make_room(one):
            self._drop(one)
            raise EngineError(
                f"the grammars of running requests take all of the {self._most_bytes >> 20} MiB that compiled ones may "
                "take; try again"
            )
        return compiled

    def _result(self, one: Compilation) -> CompiledGrammar:
        """A grammar that was refused is forgotten: its text, too, is up to half a MiB."""
        try:
            compiled = one.future.result()
            if compiled.nbytes > self._most_bytes:
                raise RequestError(f"its compiled form has more than {self._most_bytes >> 20} MiB")
        except Exception:
            self._drop(one)
            raise
        return compiled

    def close(self) -> None:
        """Whoever waits gets an EngineError. No process and no thread is left."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        for one in self._known.values():
            one.cancellation.cancel()
        if self._ready is not None:
            self._ready[2].close()
        for threads in self._threads.values():
            threads.shutdown(wait=True)

    def _begin(self, grammar: Grammar) -> Compilation:
        one = Compilation(grammar)
        waiting = sum(each.small == one.small and not each.future.done() for each in self._known.values())
        if waiting >= (MOST_SMALL_WAITING if one.small else MOST_WAITING):
            raise BusyError(f"{waiting} grammars are waiting to be compiled; try again")
        one.future = self._pool(one.small).submit(self._compile, grammar, one.cancellation)
        self._known[grammar] = one
        return one

    def _make_room(self, newest: Compilation) -> bool:
        """Forgets what was not used for the longest time. False: the rest is in use, and too much."""
        sizes = {one: one.compiled.nbytes for one in self._known.values() if one.compiled is not None}
        sizes.setdefault(newest, newest.future.result().nbytes)
        total = sum(sizes.values())
        for one in list(self._known.values()):
            if total <= self._most_bytes and len(self._known) <= MOST_CACHED:
                break
            if one is not newest and one.idle and one.future.done():
                self._drop(one)
                total -= sizes.get(one, 0)
        return total <= self._most_bytes

    def _drop(self, one: Compilation) -> None:
        if self._known.get(one.grammar) is one:
            del self._known[one.grammar]

    def _pool(self, small: bool) -> ThreadPoolExecutor:
        if small not in self._threads:
            self._threads[small] = ThreadPoolExecutor(
                MOST_AT_ONCE, "grammar", initializer=os.sched_setaffinity, initargs=(0, self._cpus)
            )
        return self._threads[small]

    def _compile(self, grammar: Grammar, cancellation: Cancellation) -> CompiledGrammar:
        vocabulary, tables, process = self._started()
        text = process.compiled(grammar, cancellation)
        import xgrammar

        inner = xgrammar.CompiledGrammar.deserialize_json(text.decode(), tables)
        return CompiledGrammar.of(inner, vocabulary, vocabulary.spelt_in(grammar.text))

    def _started(self) -> tuple[Vocabulary, Any, CompilerProcess]:
        with self._lock:
            if self._ready is None:
                with quick_switches():
                    vocabulary = self._read()
                    tables = vocabulary.tokenizer_info()
                self._ready = vocabulary, tables, CompilerProcess(vocabulary, self._cpus, self.patient)
            return self._ready
