"""`CompilerProcess`: the engine's side of the process that compiles grammars (`worker.py`)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import msgspec

from tandem.engine.frames import receive_frame, send_frame
from tandem.engine.grammar.vocabulary import Vocabulary
from tandem.engine.grammar.worker import DONE, Job, send_job
from tandem.engine.protocol import Grammar
from tandem.errors import EngineError, RequestError

COMPILE_SECONDS = 1.8  # by the clock: with what else a refusal takes, it is there within 2 s
START_SECONDS = 60.0  # importing takes seconds, on a busy machine many


class CompilerProcess:
    """Started at the first grammar. Several threads may compile at once; each job has its own fork there."""

    def __init__(self, vocabulary: Vocabulary, cpus: set[int]) -> None:
        """cpus: where it may run. The engine's own thread is bound to one."""
        self._vocabulary, self._cpus = vocabulary, cpus
        self._lock = threading.Lock()  # of all that follows, and of writing to the socket
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def compiled(self, grammar: Grammar, shown: tuple[int, ...]) -> bytes:
        """Serialised. Raises RequestError with what is wrong with it, EngineError where there is no process."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = self._send(Job(grammar, shown, COMPILE_SECONDS), theirs)
            began = time.monotonic()
            ours.settimeout(COMPILE_SECONDS + START_SECONDS)
            try:
                answer = receive_frame(ours)
            except (OSError, EOFError) as error:
                if process.poll() is not None:
                    raise EngineError("the process that compiles grammars has ended; try again") from error
                raise _ended(time.monotonic() - began) from error
        if answer[:1] != DONE:
            raise RequestError(answer[1:].decode())
        return answer[1:]

    def close(self) -> None:
        with self._lock:
            self._end()

    def _send(self, job: Job, answer: socket.socket) -> subprocess.Popen[bytes]:
        """To a new process where the last one has died."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            send_job(self._connected(), job, answer)
            assert self._process is not None
            return self._process

    def _connected(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair()
            cpus = ",".join(map(str, sorted(self._cpus)))
            command = [sys.executable, "-m", "tandem.engine.grammar.worker", str(theirs.fileno()), cpus]
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
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._process = self._socket = None


def _ended(seconds: float) -> RequestError:
    if seconds >= 0.9 * COMPILE_SECONDS:
        return RequestError(
            f"compiling it takes more than {COMPILE_SECONDS:g} s; make it smaller: maxLength, maxItems and counts in "
            "patterns cost most"
        )
    return RequestError("compiling it takes too much memory; make it smaller")


def allowed_cpus() -> set[int]:
    """Of the calling thread, before it is bound to one."""
    return os.sched_getaffinity(0)
