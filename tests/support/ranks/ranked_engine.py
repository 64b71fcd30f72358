"""An engine whose other ranks are threads of this process, joined as processes are: by ZeroMQ and shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import msgspec
import zmq

from tandem.engine.engine import Engine
from tandem.engine.ranks.follower import Follower
from tandem.engine.ranks.leader import Leader
from tandem.engine.ranks.messages import StartRank, StepList
from tandem.engine.start.loader import load_parts, load_rank
from tandem.flags.engine_config import EngineConfig

LOOK_MS = 20


class RankThread(Thread):
    """Follows until it is told to stop. steps: the lists that came, as bytes."""

    def __init__(self, endpoint: str, rank: int) -> None:
        super().__init__(daemon=True)
        self._endpoint, self._rank, self._stopping = endpoint, rank, Event()
        self.steps: list[bytes] = []
        self.failed = ""

    def run(self) -> None:
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.setsockopt(zmq.IDENTITY, b"rank %d" % self._rank)
            socket.connect(self._endpoint)
            socket.send(b"")
            try:
                self._follow(socket)
            except Exception as error:
                self.failed = str(error)  # not its frames, which would keep what a process would leave

    def _follow(self, socket: zmq.Socket[bytes]) -> None:
        parts = load_rank(msgspec.msgpack.decode(socket.recv(), type=StartRank), self._rank)
        socket.send(b"")
        follower = Follower(parts)
        while not self._stopping.is_set():
            if socket.poll(LOOK_MS):
                self.steps.append(socket.recv())
                follower.step(msgspec.msgpack.decode(self.steps[-1], type=StepList))

    def stop(self) -> None:
        self._stopping.set()
        self.join(60)


@contextlib.contextmanager
def ranked_engine(
    config: EngineConfig, folder: Path, **changed: object
) -> Iterator[tuple[Engine, list[RankThread]]]:
    """changed: parts of the first rank's."""
    endpoint = f"ipc://{folder}/engine"
    leader = Leader(endpoint, config.tensor_parallel_size)
    others = [RankThread(endpoint, rank) for rank in range(1, config.tensor_parallel_size)]
    for each in others:
        each.start()
    try:
        engine = Engine.from_parts(replace(load_parts(config, leader=leader), **changed))
        yield engine, others
        engine.close()
    finally:
        for each in others:
            each.stop()
        leader.close()
