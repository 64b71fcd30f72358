"""The process that compiles grammars: `python -m tandem.engine.grammar.worker DESCRIPTOR CPUS`.

It reads the vocabulary from a socket, then single bytes. With each comes a socket of one job: the job is read from it,
and its answer written to it. Each job runs in a fork: one that takes too long, or too much memory, ends alone, and the
next one need not import anything. Jobs share the engine's cores, which must not wait for them: hence the niceness.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tandem.engine.grammar.answers import send_answer
from tandem.engine.grammar.backend import (
    compiled_by,
    complaint_of_schema,
    grammar_compiler,
    heard,
    schemas_of,
)
from tandem.engine.grammar.compiled import CompiledGrammar
from tandem.engine.grammar.jobs import DONE, REFUSED, Jobs
from tandem.engine.grammar.places import placed
from tandem.engine.grammar.probe import probe
from tandem.engine.grammar.vocabulary import Vocabulary
from tandem.engine.protocol import Grammar
from tandem.errors import RequestError
from tandem.machine.cgroup import read_cgroup_limits
from tandem.process.frames import receive_frame, send_frame

# On two busy cores: with 0, a compiling grammar doubles other streams' gaps; with 19, it gets a twentieth of a core.
NICENESS = 10
MOST_THREADS = 8  # of a job
MEMORY_BYTES = 1 << 30  # of a job, beyond what the process has when it is forked
MOST_RESULT_BYTES = 64 << 20
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def serve(ours: socket.socket) -> None:
    """Until nobody asks any more."""
    vocabulary = msgspec.msgpack.decode(receive_frame(ours), type=Vocabulary)
    threads = threads_on(len(os.sched_getaffinity(0)), read_cgroup_limits().cpu_quota)
    compiler = grammar_compiler(vocabulary.tokenizer_info(), threads)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    send_frame(ours, DONE)

    def work(answer: socket.socket) -> NoReturn:
        """In a fork, which must not return."""
        code = 1
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            ours.close()  # or it would seem open to the engine when this process is gone
            _bound_memory()
            grammar = msgspec.msgpack.decode(receive_frame(answer), type=Grammar)
            send_answer(answer, _result(compiler, vocabulary, grammar))
            code = 0
        finally:
            os._exit(code)

    Jobs(ours, work, threads).run()


def threads_on(cpus: int, quota: float | None) -> int:
    """Threads of a job, on half of the CPUs: a step waits for the slowest of the engine's cores. `quota` (CPUs' worth
    of time) limits them. With more threads, a job's share of their time would seem less than what it took."""
    return max(1, min(MOST_THREADS, int(min(cpus, cpus if quota is None else quota) // 2)))


def _result(compiler: Any, vocabulary: Vocabulary, grammar: Grammar) -> bytes:
    stderr_fd = os.memfd_create("said")
    os.dup2(stderr_fd, 2)
    compiled, wrong = heard(lambda: compiled_by(compiler, grammar), stderr_fd)
    if wrong is not None and (compiled is None or not grammar.lenient):
        where = placed(wrong, schemas_of(grammar), lambda schema: complaint_of_schema(schema, stderr_fd))
        return REFUSED + where.encode(errors="replace")
    try:
        probe(CompiledGrammar.of(compiled, vocabulary, vocabulary.spelt_in(grammar.text)))
    except RequestError as error:
        return REFUSED + str(error).encode()
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
    descriptor, cpus = sys.argv[1:]
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    os.nice(NICENESS)
    with socket.socket(fileno=int(descriptor)) as ours:
        try:
            serve(ours)
        except (EOFError, ConnectionError):
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
