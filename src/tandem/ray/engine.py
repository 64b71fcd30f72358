"""`ReplicaEngine`: a replica of one model. It owns a `kt serve` process, and so all its ranks, on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ray import serve
from tandem.errors import EngineError
from tandem.ray.router import name_of
from tandem.server.front.child import Child, Command, Life, serve_command, socket_name
from tandem.server.front.launch import socket_folder
from tandem.server.front.models_file import ModelEntry


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """An HTTP request. target: path and query."""

    method: str
    target: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The first of an answer. replica: whose it is."""

    replica: str
    status: int
    headers: Sequence[tuple[bytes, bytes]]


class ReplicaEngine:
    """A deployment of Ray Serve. It is ready once the model is loaded."""

    async def __init__(self, entry: ModelEntry, command: Command = serve_command) -> None:  # type: ignore[misc]  # Ray awaits it
        """Raises EngineError with the reason of a start that failed; Ray tells it in `serve status`."""
        self._name = name_of(serve.get_replica_context().replica_id)
        self._folders = contextlib.ExitStack()
        self._child = Child(entry, self._folders.enter_context(socket_folder()) / socket_name(0), command)
        await self._child.start()
        self._watching = asyncio.create_task(self._child.ended())

    async def check_health(self) -> None:
        """Ray replaces a replica whose server has ended. One whose engine is being restarted stays."""
        if self._child.life is not Life.LOADED:
            raise EngineError(self._child.why)

    async def answer(
        self, request: ReplicaRequest, *, key: bytes, avoid: Sequence[str]
    ) -> AsyncIterator[AnswerHead | bytes]:
        """The head, then the body as it comes. `key` and `avoid` are the router's. Raises EngineError where the server
        ends first. A caller that leaves aborts the request."""
        self._child.use()
        answer = None
        try:
            answer = await self._child.wire.ask(request.method, request.target, request.headers, request.body)
            yield AnswerHead(self._name, await answer.head(), answer.headers)
            while part := await answer.part():
                yield part
            answer = None
        finally:
            self._child.done()
            if answer is not None:
                answer.close()

    async def __del__(self) -> None:
        """Ray calls it after the last request of a replica that goes; one that is killed takes its server along."""
        await self._child.stop(0.0)
        self._folders.close()
