"""A small hub on loopback: the two routes that fetching a model takes, and what goes wrong with them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf")
_API = re.compile(r"/api/models/([^/]+/[^/]+)/revision/([^?]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class FakeHub:
    """repos: {ORG/NAME: {path: bytes}}. What is set here happens from then on."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)  # repo → the token that it takes
    gated: set[str] = field(default_factory=set)
    cut_at: dict[str, int] = field(
        default_factory=dict
    )  # file → bytes after which the connection ends, once each
    corrupt: dict[str, int] = field(default_factory=dict)  # file → how many times its bytes are wrong
    busy: int = 0  # answers of 503 to come
    ranges: bool = True
    held_at: dict[str, int] = field(default_factory=dict)  # file → bytes after which the rest waits for `goes_on`
    goes_on: threading.Event = field(default_factory=threading.Event)
    piece_bytes: int = 1 << 16
    commit: str = COMMIT
    asked: list[tuple[str, str]] = field(default_factory=list)  # (path, Range)
    url: str = ""

    def add(self, repo: str, directory: Path) -> None:
        files = (path for path in directory.rglob("*") if path.is_file())
        self.repos[repo] = {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}

    def fetched(self, ending: str = "") -> list[str]:
        """Names of files whose bytes were asked for."""
        return [
            found[3] for path, _ in self.asked if (found := _FILE.fullmatch(path)) and path.endswith(ending)
        ]

    def described(self, repo: str) -> bytes:
        siblings = [_sibling(name, content) for name, content in self.repos[repo].items()]
        return json.dumps({"id": repo, "sha": self.commit, "siblings": siblings}).encode()


def _sibling(name: str, content: bytes) -> dict[str, object]:
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
    if name.endswith(LARGE):
        entry["lfs"] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 130,
        }
    return entry


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(_Handler):
        fake = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None: ...

    def do_GET(self) -> None:
        path, _, _query = self.path.partition("?")
        self.fake.asked.append((path, self.headers.get("Range", "")))
        if self.fake.busy > 0:
            self.fake.busy -= 1
            return self._refuse(503, "")
        if found := _API.fullmatch(path):
            if self._may(found[1]) and self._has_revision(found[2]):
                self._send(200, self.fake.described(found[1]))
        elif (found := _FILE.fullmatch(path)) and self._may(found[1]):
            self._file(found[1], found[3])

    def _may(self, repo: str) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repo in self.fake.gated and token != self.fake.tokens.get(repo):
            return self._refuse(401, "GatedRepo")
        if repo not in self.fake.repos:
            return self._refuse(401, "RepoNotFound")  # as the real one says of what it does not show
        return True

    def _has_revision(self, revision: str) -> bool:
        return revision in ("main", "v1", self.fake.commit) or self._refuse(404, "RevisionNotFound")

    def _file(self, repo: str, name: str) -> None:
        content = self.fake.repos[repo].get(name)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        if self.fake.corrupt.get(name, 0) > 0:
            self.fake.corrupt[name] -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        first, last = 0, len(content)
        wish = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wish and self.fake.ranges:
            first, last = int(wish[1]), min(last, int(wish[2]) + 1 if wish[2] else last)
            if first >= len(content):
                self._refuse(416, "")
                return
        status, cut = 206 if wish and self.fake.ranges else 200, self.fake.cut_at.pop(name, None)
        self._send(status, content[first:last], cut, self.fake.held_at.get(name))

    def _send(self, status: int, body: bytes, cut: int | None = None, held_at: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        step = self.fake.piece_bytes
        for at in range(0, len(body) if cut is None else min(cut, len(body)), step):
            end = at + step if cut is None else min(at + step, cut)
            if held_at is not None and at >= held_at:
                self.fake.goes_on.wait()
            try:
                self.wfile.write(body[at:end])
            except OSError:
                return
        if cut is not None:
            self.close_connection = True

    def _refuse(self, status: int, reason: str) -> bool:
        self.send_response(status)
        self.send_header("X-Error-Code", reason)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False
