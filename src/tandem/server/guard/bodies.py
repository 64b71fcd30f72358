"""`UnfinishedBodies`: how much memory is taken by requests that are still arriving, over all connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tandem.server.errors import ApiError
from tandem.server.limits import MAX_UNFINISHED_BYTES, RETRY_AFTER_SECONDS, SMALL_BODY_BYTES


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
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"}
            message = "too many large requests are arriving at once; try again later"
            raise ApiError(503, message, kind="service_unavailable_error", code="overloaded", headers=headers)
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
