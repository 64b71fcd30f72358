"""`RequestStream`: what comes from the engine for one HTTP request, and the times that users notice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from tandem.engine.protocol import FirstToken, GenerateRequest, TokenOutput
from tandem.errors import EngineError, RequestError, TandemError
from tandem.server.errors import ApiError
from tandem.server.limits import MAX_UNREAD_OUTPUTS, MAX_UNREAD_PER_ANSWER


class StreamObserver(Protocol):
    """Told what users notice; `server/metrics.py` counts it."""

    def first_token(self, seconds: float, took: FirstToken | None) -> None: ...
    def next_token(self, seconds: float, tokens: int) -> None: ...
    def finished(self, reason: str, seconds: float) -> None: ...


class _OpenAnswer:
    """Times of one of the n answers of one prompt."""

    __slots__ = ("last_token_at",)

    def __init__(self) -> None:
        self.last_token_at: float | None = None


class RequestStream:
    """The outputs of one HTTP request: one or more prompts, each with n answers, in the order they arrive.

    `next` returns what has come since the last call (at least one output), or [] when all answers are finished.
    """

    def __init__(
        self, requests: Sequence[GenerateRequest], observer: StreamObserver, name: str = "", probe: bool = False
    ) -> None:
        """name: what the client calls all of `requests` together, if it does. probe: it only asks if the engine
        answers, which is no use of it."""
        self.name = name
        self.probe = probe
        self.position = {request.id: index for index, request in enumerate(requests)}
        self.submitted_at = time.monotonic()
        self._open = {(r.id, i): _OpenAnswer() for r in requests for i in range(r.sampling.n)}
        self.overflown = False  # so much lies unread that the answers must end
        self._most_unread = max(MAX_UNREAD_OUTPUTS, MAX_UNREAD_PER_ANSWER * len(self._open))
        self._observer = observer
        self._arrived: list[TokenOutput] = []
        self._error: TandemError | None = None
        self._wake: asyncio.Future[None] | None = None

    @property
    def open_answers(self) -> int:
        return len(self._open)

    def is_open(self, request_id: str) -> bool:
        return any(key[0] == request_id for key in self._open)

    def open_indices(self, request_id: str) -> list[int]:
        return [index for owner, index in self._open if owner == request_id]

    async def next(self) -> list[TokenOutput]:
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        arrived, self._arrived = self._arrived, []
        return arrived

    def push(self, output: TokenOutput) -> None:
        answer = self._open.get((output.id, output.index))
        if answer is None:
            return
        self._observe(answer, output)
        if output.finish_reason is not None:
            del self._open[(output.id, output.index)]
        if output.finish_reason == "error":
            self._observer.finished("error", time.monotonic() - self.submitted_at)
            self.fail_reader(_failure(output))
            return
        self._arrived.append(output)
        self._notify()
        if len(self._arrived) > self._most_unread and self._error is None:
            message = f"{len(self._arrived)} tokens were made before any of them was read; read faster"
            self.fail_reader(ApiError(408, message, kind="timeout_error", code="client_too_slow"))
            self.overflown = True

    def end(self) -> None:
        """Nobody will read: nothing is open any more."""
        self._open.clear()

    def fail(self, error: TandemError, request_id: str | None = None) -> None:
        """The reader gets `error` after what has arrived. Answers of `request_id` (None: all) run no more."""
        for key in [k for k in self._open if request_id in (None, k[0])]:
            del self._open[key]
        if self._error is None:
            self._observer.finished("error", time.monotonic() - self.submitted_at)
        self.fail_reader(error)

    def fail_reader(self, error: TandemError) -> None:
        """The reader gets `error`; the answers run on until `EngineClient.release`."""
        if self._error is None:
            self._error = error
            self._notify()

    def _observe(self, answer: _OpenAnswer, output: TokenOutput) -> None:
        now = time.monotonic()
        if output.token_ids:
            if answer.last_token_at is None:
                self._observer.first_token(now - self.submitted_at, output.first_token)
            else:
                self._observer.next_token(now - answer.last_token_at, len(output.token_ids))
            answer.last_token_at = now
        if output.finish_reason is not None and output.finish_reason != "error":
            self._observer.finished(output.finish_reason, now - self.submitted_at)

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def _failure(output: TokenOutput) -> TandemError:
    """Whose fault it was."""
    message = output.error or "the engine failed on this request"
    return EngineError(message) if output.refused is None else RequestError(message, output.refused)
