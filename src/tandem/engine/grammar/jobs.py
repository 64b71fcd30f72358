"""`Jobs`: the forks of the compiling process, each with a socket for its answer. One that nobody waits for is ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import NoReturn

from tandem.engine.grammar.answers import send_answer

# What an answer begins with; then the compiled grammar, or why there is none.
DONE, REFUSED, BUSY = b"+", b"-", b"?"

# What a job begins with. One that the clock has ended is asked for patiently the next time, and then gets its own time.
# Else a machine that is always busy would never accept a good schema.
USUAL, PATIENT = b"u", b"p"

# With what else a refusal takes, it is there within 2 s. A busy machine does not decide what is refused: what takes too
# long there only because of that may be asked for again. Usual schemas take 0.1 s, with 150,000 tokens.
COMPILE_SECONDS = 1.45
LARGE_SECONDS, BUSY_SECONDS = 0.2, 1.5  # of its own time; since it began: then the machine is too busy for a large one
WALL_SECONDS = 30.0  # then for any, and for a patient one

_TICK_SECONDS = 0.02
_TOO_LONG = (
    f"compiling it takes more than {COMPILE_SECONDS:g} s; make it smaller: maxLength, maxItems and counts in "
    "patterns cost most, and what is ambiguous, as (a*)* is"
)
_TOO_LARGE = "compiling it takes too much memory; make it smaller"
_TOO_BUSY = "the machine is too busy to compile it in {:g} s; make it smaller, or try again"
_MORE_TIME = ": it may then take {:g} s"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Job:
    answer: socket.socket
    began: float
    patient: bool


class Jobs:
    def __init__(self, ours: socket.socket, work: Callable[[socket.socket], NoReturn], threads: int) -> None:
        """`work` runs in forks, with up to so many threads beside its own."""
        self._ours, self._work, self._threads = ours, work, threads
        self._running: dict[int, _Job] = {}  # by process id
        self._ending: set[int] = set()  # killed, and not gone yet

    def run(self) -> None:
        """Until the engine is gone."""
        try:
            while self._wait():
                self._end_some()
                self._ending = {pid for pid in self._ending if not os.waitpid(pid, os.WNOHANG)[0]}
        finally:
            for pid in list(self._running):
                self._end(pid)
            for pid in self._ending:
                os.waitpid(pid, 0)

    def _wait(self) -> bool:
        """For a new job, or for a moment. False: there will be none any more."""
        polled = select.poll()
        polled.register(self._ours, select.POLLIN)
        for job in self._running.values():
            polled.register(job.answer, 0)  # tells when the other end is closed
        ready = dict(polled.poll(1000 * _TICK_SECONDS if self._running or self._ending else None))
        for pid, job in list(self._running.items()):
            if ready.get(job.answer.fileno(), 0):
                self._end(pid)
        return not ready.get(self._ours.fileno(), 0) or self._begin()

    def _begin(self) -> bool:
        mark, descriptors, *_ = socket.recv_fds(self._ours, 1, 1)
        if not mark:
            return False
        answer = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            for job in self._running.values():  # or they would seem open when their own forks are gone
                job.answer.close()
            self._work(answer)
        self._running[pid] = _Job(answer, monotonic(), mark == PATIENT)
        return True

    def _end_some(self) -> None:
        """Those that have ended, and those that take too long."""
        for pid, job in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._close(pid, None if status == 0 else REFUSED + _TOO_LARGE.encode())
            else:
                self._end_long(pid, job, _seconds(pid, self._threads))

    def _end_long(self, pid: int, job: _Job, own: float) -> None:
        hurried = own > LARGE_SECONDS and not job.patient
        most = BUSY_SECONDS if hurried else WALL_SECONDS
        if own > COMPILE_SECONDS:
            self._end(pid, REFUSED + _TOO_LONG.encode())
        elif monotonic() - job.began > most:
            message = _TOO_BUSY.format(most) + (_MORE_TIME.format(WALL_SECONDS) if hurried else "")
            self._end(pid, BUSY + message.encode())

    def _end(self, pid: int, message: bytes | None = None) -> None:
        """A busy machine gives a gigabyte of memory back in tenths of a second. The answer does not wait for that."""
        os.kill(pid, signal.SIGKILL)
        self._ending.add(pid)
        self._close(pid, message)

    def _close(self, pid: int, message: bytes | None) -> None:
        with self._running.pop(pid).answer as answer:
            if message is not None:
                answer.setblocking(False)
                with contextlib.suppress(OSError):
                    send_answer(answer, message)


def _seconds(pid: int, threads: int) -> float:
    """Seconds that a job takes where nothing else runs: its own thread's CPU time, and a share of that of its other
    threads."""
    own, everything = _cpu_seconds(f"/proc/{pid}/task/{pid}/stat"), _cpu_seconds(f"/proc/{pid}/stat")
    return own + max(0.0, everything - own) / threads


def _cpu_seconds(path: str) -> float:
    """0 where the process has just ended."""
    try:
        fields = Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
