"""One line of the log for each request: its id, what it asked for, how it ended. Never what was said."""

from __future__ import annotations

import logging
import re
import time
from uuid import uuid4

from starlette.types import Message, Scope, Send

log = logging.getLogger("tandem.server.requests")

ID_HEADER = b"x-request-id"
_ID = re.compile(rb"[\w.:/+=-]{1,128}")  # anything else could forge lines of the log
_OFTEN = ("/health", "/ping", "/metrics", "/tandem/live", "/page/", "/favicon.ico")  # asked by programs, all the time


class RequestNote:
    """Takes the client's `x-request-id`, or makes one, and sends it back with the answer."""

    def __init__(self, scope: Scope) -> None:
        request_id = next((value for name, value in scope["headers"] if name == ID_HEADER), b"")
        self.id = request_id if _ID.fullmatch(request_id) else uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = self.id
        self._what = f"{scope['method']} {scope['path'][:200]!r}"
        self._level = logging.DEBUG if scope["path"].startswith(_OFTEN) else logging.INFO
        self._came_at = time.monotonic()
        self._status = 0
        self._ended = False

    def sending(self, send: Send) -> Send:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (ID_HEADER, self.id)]}
            elif not message.get("more_body", False):
                self._ended = True
            await send(message)

        return noted

    def tell(self) -> None:
        """The request is over, whatever ended it."""
        if not log.isEnabledFor(self._level):
            return
        how = "" if self._ended else ", the client left" if self._status else ", no answer"
        seconds = time.monotonic() - self._came_at
        log.log(self._level, "%s %s: %d in %.3f s%s", self.id.decode(), self._what, self._status, seconds, how)
