"""How much memory is taken by requests: `UnfinishedBodies`, that are still arriving, and `HeldBodies`, that have not
ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.types import Scope

from tandem.server.errors import ApiError
from tandem.server.limits import MAX_HELD_BYTES, MAX_UNFINISHED_BYTES, RETRY_AFTER_SECONDS, SMALL_BODY_BYTES

HELD = "held_bodies"  # of a request's state: the `HeldBodies` of its server
_BYTES = "held_bytes"  # and what it holds there


class HeldBodies:
    """Bodies of requests in progress: those that wait for a model, too. The gate gives it to each request."""

    def __init__(self, most: int | None) -> None:
        self.bytes = 0
        self._most = MAX_HELD_BYTES if most is None else most

    def hold(self, scope: Scope, size: int) -> None:
        """Until `let_go` of the request's scope. Raises ApiError 413, 503."""
        if size > self._most:
            text = f"the body has {size:,} bytes, and --max-queued-bytes is {self._most:,}; send less text"
            raise ApiError(413, text, code="body_too_large")
        if self.bytes + size > self._most:
            raise _overloaded(f"requests in progress have {self.bytes:,} bytes (--max-queued-bytes); try again later")
        self.bytes += size
        scope["state"][_BYTES] = scope["state"].get(_BYTES, 0) + size

    def let_go(self, scope: Scope) -> None:
        self.bytes -= scope["state"].pop(_BYTES, 0)


class UnfinishedBodies:
    """Small bodies are not counted. So a client that holds up large ones does not hold up the others."""

    def __init__(self) -> None:
        self._bytes = 0

    @contextmanager
    def reading(self) -> Iterator[UnfinishedBody]:
        body = UnfinishedBody(self)
        try:
            yield body
        finally:
            body.drop()

    def take(self, size: int) -> None:
        """Raises ApiError 503."""
        if self._bytes + size > MAX_UNFINISHED_BYTES:
            raise _overloaded("too many large requests are arriving at once; try again later", {"Connection": "close"})
        self._bytes += size

    def give_back(self, size: int) -> None:
        self._bytes -= size


class UnfinishedBody:
    """One body. `data` grows in place, so what it took goes back to the system."""

    def __init__(self, bodies: UnfinishedBodies) -> None:
        self.data = bytearray()
        self.counted = 0
        self._bodies = bodies

    def add(self, part: bytes) -> None:
        """Raises ApiError 503."""
        self.data += part
        large = max(0, len(self.data) - SMALL_BODY_BYTES)
        if large > self.counted:
            self._bodies.take(large - self.counted)
            self.counted = large

    def drop(self) -> None:
        self.data.clear()
        self._bodies.give_back(self.counted)
        self.counted = 0


def _overloaded(message: str, more: Mapping[str, str] | None = None) -> ApiError:
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS), **(more or {})}
    return ApiError(503, message, kind="service_unavailable_error", code="overloaded", headers=headers)
