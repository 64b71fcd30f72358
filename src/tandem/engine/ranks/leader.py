"""`Leader`: the first rank's side of the others: it starts them, and tells each step before it runs its own part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from tandem.engine.ranks.lists import StepLists
from tandem.engine.ranks.messages import StartRank, StepList
from tandem.engine.sequence import Chunk
from tandem.engine.speculation.draft_batch import DraftRows
from tandem.errors import EngineError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.ranks.meeting import Meeting
from tandem.planner.plan import Plan

MEET_SECONDS = 60.0  # the others were started with this process, or when it chose ranks
_FILE = ".ranks"  # beside the socket


class Leader:
    """Where the other ranks' processes ask what to do."""

    def __init__(self, endpoint: str, ranks: int) -> None:
        self.ranks, self._endpoint, self._encoder = ranks, endpoint, msgspec.msgpack.Encoder()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._others: list[bytes] = []
        self.lists = StepLists()

    def start(self, config: EngineConfig, plan: Plan) -> Meeting:
        """Before weights are read. Raises EngineError where a rank does not come."""
        self._others = self._heard(MEET_SECONDS)
        file = self._endpoint.removeprefix("ipc://") + _FILE
        self._tell(StartRank(config=config, plan=plan, file=file))
        return Meeting(0, self.ranks, file)

    def loaded(self) -> None:
        """Waits until the others have read their shards: before that, this rank is not ready either. One that ends
        meanwhile is the supervisor's, which ends all."""
        self._heard(None)

    def step(self, chunks: Rows[Chunk], **more: Any) -> None:
        """The others run them as well. more: further fields of `StepList`."""
        self._tell(self.lists.of(chunks, **more))

    def drafts(self, runs: Rows[DraftRows], widths: Rows[int]) -> None:
        """The others make the same rows of their draft layer."""
        self._tell(self.lists.drafts(runs, widths))

    def close(self) -> None:
        self._socket.close()

    def _heard(self, seconds: float | None) -> list[bytes]:
        """All others, once each has said something. Raises EngineError after so many seconds; None: never."""
        ends, senders = time.monotonic() + (seconds or 0.0), set[bytes]()
        while len(senders) < self.ranks - 1:
            left = None if seconds is None else max(0, int(1000 * (ends - time.monotonic())))
            if not self._socket.poll(left):
                raise EngineError(f"{self.ranks - 1} more ranks were started, and {len(senders)} answered")
            senders.add(self._socket.recv_multipart()[0])
        return sorted(senders)

    def _tell(self, message: StartRank | StepList) -> None:
        frame = self._encoder.encode(message)
        for other in self._others:
            self._socket.send_multipart([other, frame])


@contextmanager
def leading(endpoint: str, ranks: int) -> Iterator[Leader | None]:
    """Leader of the ranks that meet at `endpoint`; None for "". It stays open, but for an error."""
    leader = Leader(endpoint, ranks) if endpoint else None
    try:
        yield leader
    except BaseException:
        if leader is not None:
            leader.close()
        raise
