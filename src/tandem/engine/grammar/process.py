"""`CompilerProcess`: the engine's side of the process that compiles grammars (`worker.py`)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading

import msgspec

from tandem.engine.grammar.answers import receive_answer
from tandem.engine.grammar.jobs import BUSY, DONE, PATIENT, USUAL, WALL_SECONDS
from tandem.engine.grammar.sources import is_small
from tandem.engine.grammar.vocabulary import Vocabulary
from tandem.engine.protocol import Grammar
from tandem.errors import EngineError, RequestError
from tandem.process.frames import receive_frame, send_frame

START_SECONDS = 180.0  # importing takes seconds, on a very busy machine more than a minute
MOST_HURRIED = 4096


class Cancellation:
    """Cancels one job, from any thread. Its fork ends when nobody holds the other end of its socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # also wakes the thread that reads from it

    def of(self, ours: socket.socket | None) -> None:
        """The job's end of its socket; None before it is closed. Raises EngineError if it is cancelled already."""
        with self._lock:
            self._socket = ours
            if self._cancelled and ours is not None:
                raise EngineError("nobody waits for this grammar any more")


class _Hurried:
    """Grammars that the clock has ended, by any thread. A known one stays so: its next job may need more, too.

    By hash, as a text has up to half a MiB. One that is taken for another gets more time, no more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, None] = {}  # in order

    def add(self, grammar: Grammar) -> None:
        with self._lock:
            self._known[hash(grammar)] = None
            if len(self._known) > MOST_HURRIED:
                del self._known[next(iter(self._known))]

    def mark_of(self, grammar: Grammar) -> bytes:
        """A small one takes much of its time because of others alone."""
        with self._lock:
            return PATIENT if is_small(grammar) or hash(grammar) in self._known else USUAL


class CompilerProcess:
    """Started at the first grammar. Several threads may compile at once; each job has its own fork there."""

    def __init__(self, vocabulary: Vocabulary, cpus: set[int], patient: bool = False) -> None:
        """cpus: where it may run. The engine's own thread is bound to one. patient: every job gets its own time, as one
        that is asked for again."""
        self._vocabulary, self._cpus, self._patient = vocabulary, cpus, patient
        self._lock = threading.Lock()  # of all that follows, and of writing to the socket
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False
        self._hurried = _Hurried()

    def compiled(self, grammar: Grammar, cancellation: Cancellation) -> bytes:
        """Serialised. Raises RequestError with what is wrong with it, EngineError where it was cancelled, where there
        is no process, or where the machine is too busy."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            cancellation.of(ours)
            try:
                answer = self._answer(grammar, ours, theirs)
            finally:
                cancellation.of(None)
        if answer[:1] == DONE:
            return answer[1:]
        message = answer[1:].decode()
        if answer[:1] != BUSY:
            raise RequestError(message)
        self._hurried.add(grammar)
        raise EngineError(message)

    def close(self) -> None:
        """For good: whoever still compiles gets an EngineError."""
        self._closed, process = True, self._process
        if process is not None:
            process.kill()  # whoever holds the lock waits for it
        with self._lock:
            self._end()

    def _answer(self, grammar: Grammar, ours: socket.socket, theirs: socket.socket) -> bytes:
        ours.settimeout(WALL_SECONDS + START_SECONDS)
        self._hand_over(theirs, PATIENT if self._patient else self._hurried.mark_of(grammar))
        theirs.close()
        try:
            send_frame(ours, msgspec.msgpack.encode(grammar))
            return receive_answer(ours)
        except (OSError, EOFError) as error:
            raise EngineError("the process that compiles grammars has ended; try again") from error

    def _hand_over(self, theirs: socket.socket, mark: bytes) -> None:
        """To a new process where the last one has died. One byte is sent or not: there is nothing in between that the
        next job could be taken for."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            try:
                socket.send_fds(self._connected(), [mark], [theirs.fileno()])
            except OSError as error:
                self._end()
                raise EngineError("the process that compiles grammars does not listen; try again") from error

    def _connected(self) -> socket.socket:
        if self._closed:
            raise EngineError("the engine is being closed")
        if self._socket is None:
            ours, theirs = socket.socketpair()
            cpus = ",".join(map(str, sorted(self._cpus)))
            command = [sys.executable, "-P", "-m", "tandem.engine.grammar.worker", str(theirs.fileno()), cpus]
            with theirs:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                )
            self._socket = ours
            self._begin(ours)
        return self._socket

    def _begin(self, ours: socket.socket) -> None:
        ours.settimeout(START_SECONDS)
        try:
            send_frame(ours, msgspec.msgpack.encode(self._vocabulary))
            receive_frame(ours)
        except (OSError, EOFError) as error:
            self._end()
            raise EngineError("the process that compiles grammars does not start; see the log") from error

    def _end(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()  # it ends its jobs, then itself
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None


def allowed_cpus() -> set[int]:
    """CPUs that the calling thread may run on, before it is bound to one."""
    return os.sched_getaffinity(0)
