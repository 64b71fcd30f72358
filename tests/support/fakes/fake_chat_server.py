"""A chat server of the standard library, for tests of `kt chat`: slow or fast, good or failing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeChatServer:
    """A server that notes what it was asked. Its answers: the number of messages it was sent, then its words."""

    port: int = 0
    api_key: str | None = None
    seconds_per_word: float = 0.0
    words: int = 5
    thoughts: int = 0  # pieces of reasoning before the words
    fails: str = ""  # "400": refuses; "midway": an error event after the first word
    loading: int = 0  # how often /health still says 503
    bodies: list[dict[str, Any]] = field(default_factory=list)
    client_left: threading.Event = field(default_factory=threading.Event)


@contextmanager
def fake_chat_server(**settings: Any) -> Iterator[FakeChatServer]:
    """A server on a free port for the length of a `with` block."""
    fake = FakeChatServer(**settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    server.daemon_threads = True
    fake.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def _handler(fake: FakeChatServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/health":
                fake.loading -= 1
                starting = {"error": {"message": "the engine is starting"}}
                return self._json(503, starting) if fake.loading >= 0 else self._json(200, {})
            if fake.loading > 0:
                return self._json(503, {"error": {"message": "the engine is starting"}})
            self._json(200, {"data": [{"id": "fake-model"}]}) if self._may() else self._refuse()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self._may():
                return self._refuse()
            if fake.fails == "400":
                error = {"message": "the prompt is too long", "code": "context_length_exceeded"}
                return self._json(400, {"error": error})
            fake.bodies.append(body)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                self._words(len(body["messages"]))
            except (BrokenPipeError, ConnectionResetError):
                fake.client_left.set()

        def _words(self, messages: int) -> None:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for _ in range(fake.thoughts):
                self._event({"choices": [{"delta": {"reasoning_content": "hm "}}]})
            for number in range(fake.words):
                text = f"m{messages}" if number == 0 else f" word{number}"
                self._event({"choices": [{"delta": {"content": text}}]})
                if fake.fails == "midway":
                    return self._event({"error": {"message": "the engine died"}})
                time.sleep(fake.seconds_per_word)
            self._event({"choices": [], "usage": {"completion_tokens": fake.words}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()

        def _may(self) -> bool:
            return fake.api_key is None or self.headers.get("Authorization") == f"Bearer {fake.api_key}"

        def _refuse(self) -> None:
            self._json(401, {"error": {"message": "no key"}})

        def _json(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
