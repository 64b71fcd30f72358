"""A rank's own process: `python -m tandem.server.ranks.process`. Started only by the supervisor.

It does what the engine process tells it, step after step, until somebody ends it: it has nothing of its own to lose.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from tandem.engine.ranks.follower import Follower
from tandem.engine.ranks.messages import StartRank, StepList
from tandem.engine.start.loader import load_rank
from tandem.errors import TandemError
from tandem.kernels.free_memory import keep_free_memory, return_free_memory
from tandem.process.garbage import loaded_is_kept
from tandem.server.engine_errors import describe
from tandem.server.engine_process import take_cpus, tie_to_parent
from tandem.server.terminal import log_to_terminal, outlive_terminal


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True, help="of the engine process")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the API process")
    options: Any = parser.parse_args(arguments)
    tie_to_parent(options.parent)
    outlive_terminal()
    try:
        follow(options.endpoint, options.rank)
    except Exception as error:
        if not isinstance(error, TandemError):
            traceback.print_exc()
        print(f"rank {options.rank}: {describe(error)}", file=sys.stderr, flush=True)
    return 1


def follow(endpoint: str, rank: int) -> None:
    """Loads, and computes what it is told, for ever."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.set_hwm(0)
    socket.setsockopt(zmq.IDENTITY, b"rank %d" % rank)
    socket.connect(endpoint)
    socket.send(b"")
    start = msgspec.msgpack.decode(socket.recv(), type=StartRank)
    log_to_terminal(start.config.log_level)
    parts = load_rank(start, rank)
    take_cpus(parts)
    socket.send(b"")  # the shard is read
    follower = Follower(parts)
    return_free_memory()  # what loading took
    keep_free_memory()
    steps = msgspec.msgpack.Decoder(StepList)
    with loaded_is_kept():  # a pause of one rank is one of all
        while True:
            follower.step(steps.decode(socket.recv()))


if __name__ == "__main__":
    sys.exit(main())
