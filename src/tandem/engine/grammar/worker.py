"""The process that compiles grammars: `python -m tandem.engine.grammar.worker DESCRIPTOR CPUS`.

It reads the vocabulary from a socket, then jobs, each with a socket for its answer. Each job runs in a fork: one that
takes too long, or too much memory, ends alone, and the next one need not import anything. Jobs run beside the engine's
cores, which must not wait for them: hence the niceness.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tandem.engine.frames import receive_frame, send_frame
from tandem.engine.grammar.backend import compiled_by, complaint, grammar_compiler, warned
from tandem.engine.grammar.vocabulary import Vocabulary
from tandem.engine.protocol import Grammar

DONE, REFUSED = b"+", b"-"  # what an answer begins with; then the compiled grammar, or why there is none
NICENESS = 5
MOST_THREADS = 8  # of a job
MEMORY_BYTES = 1 << 30  # of a job, beyond what the process has when it is forked
MOST_RESULT_BYTES = 64 << 20
MOST_COMPILERS = 4  # one for each set of control tokens that grammars spell: mostly there are two

_MOST_SAID = 64 << 10


class Job(msgspec.Struct, frozen=True):
    """`shown`: control tokens that the grammar spells. `seconds`: by the clock; then the job is ended."""

    grammar: Grammar
    shown: tuple[int, ...]
    seconds: float


def send_job(to: socket.socket, job: Job, answer: socket.socket) -> None:
    socket.send_fds(to, [b"j"], [answer.fileno()])
    send_frame(to, msgspec.msgpack.encode(job))


def serve(ours: socket.socket) -> NoReturn:
    """Raises EOFError when nobody asks any more."""
    compilers = _Compilers(msgspec.msgpack.decode(receive_frame(ours), type=Vocabulary))
    compilers.of(())
    send_frame(ours, DONE)
    while True:
        job, answer = _next_job(ours)
        compiler = compilers.of(job.shown)
        with answer:
            if os.fork() == 0:
                ours.close()  # or it would seem open to the engine when this process is gone
                _work(compiler, job, answer)


def _next_job(ours: socket.socket) -> tuple[Job, socket.socket]:
    mark, descriptors, *_ = socket.recv_fds(ours, 1, 1)
    if not mark:
        raise EOFError("the engine has ended")
    return msgspec.msgpack.decode(receive_frame(ours), type=Job), socket.socket(fileno=descriptors[0])


class _Compilers:
    """Kept from job to job: making one sorts the vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._made: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def of(self, shown: tuple[int, ...]) -> Any:
        if shown not in self._made:
            threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
            self._made[shown] = grammar_compiler(self._vocabulary.tokenizer_info(shown), threads)
        self._made.move_to_end(shown)
        if len(self._made) > MOST_COMPILERS:
            self._made.popitem(last=False)
        return self._made[shown]


def _work(compiler: Any, job: Job, answer: socket.socket) -> NoReturn:
    """In the fork. The alarm ends it, whatever xgrammar is at; what is forked must not return."""
    code = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, job.seconds)
        _bound_memory()
        send_frame(answer, _result(compiler, job.grammar))
        code = 0
    finally:
        os._exit(code)


def _result(compiler: Any, grammar: Grammar) -> bytes:
    said = os.memfd_create("said")
    os.dup2(said, 2)
    try:
        compiled = compiled_by(compiler, grammar)
    except Exception as error:
        return REFUSED + complaint(error).encode(errors="replace")
    ignored = warned(os.pread(said, _MOST_SAID, 0).decode(errors="replace"))
    if ignored is not None and not grammar.lenient:
        return REFUSED + ignored.encode()
    text = str(compiled.serialize_json()).encode()
    if len(text) > MOST_RESULT_BYTES:
        return REFUSED + f"its compiled form has more than {MOST_RESULT_BYTES >> 20} MiB".encode()
    return DONE + text


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # the server drains first
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the jobs
    descriptor, cpus = sys.argv[1:]
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    os.nice(NICENESS)
    with socket.socket(fileno=int(descriptor)) as ours:
        try:
            serve(ours)
        except (EOFError, ConnectionError):
            return 0


if __name__ == "__main__":
    sys.exit(main())
