"""The page's routes: `/` for browsers, its files under `/page/`, and the numbers of its map."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import Scope

import tandem
from tandem.server.page.live import LiveView
from tandem.server.state import ServerState

_TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
    ".woff2": "font/woff2", ".txt": "text/plain",
}  # fmt: skip
_INDEX = "index.html"
_FILES = "/page/"

_INDEX_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {}, "text/plain": {}}}}
_HEADERS = {
    # Answers of a model are shown on this page: whatever they contain, no script of theirs runs, and nothing is
    # fetched from or sent to another site. HTML becomes elements in DOMPurify only.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and answered by 304: an update shows at once
}


class _PageFile(NamedTuple):
    data: bytes
    media_type: str
    etag: str


def is_public(scope: Scope) -> bool:
    """Files of this package, which hold nothing that a key protects: the page itself asks for the key."""
    if scope["method"] != "GET":  # as which `Gate` takes HEAD, too
        return False
    path: str = scope["path"]
    return path.startswith(_FILES) or (path == "/" and _wants_html(dict(scope["headers"]).get(b"accept", b"")))


class PageFiles:
    """The page itself, whatever it is of."""

    def __init__(self) -> None:
        self._stored = _read()

    def index(self, http: Request, served: str) -> Response:
        """served: names of models, for those who are no browser."""
        if _wants_html(http.headers.get("accept", "").encode("latin-1")):
            return _answer(http, self._stored[_INDEX])
        text = f"Tandem {tandem.__version__} serves {served}.\nRoutes: /docs. Chat: kt chat\n"
        return Response(text, media_type="text/plain; charset=utf-8", headers={"Vary": "Accept"})

    def file(self, http: Request, name: str) -> Response:
        """Raises HTTPException 404."""
        if name not in self._stored:
            raise HTTPException(404)
        return _answer(http, self._stored[name])


def routes(state: ServerState) -> APIRouter:
    router, live, page = APIRouter(), LiveView(state), PageFiles()

    @router.get("/", responses=_INDEX_ANSWERS, response_class=PlainTextResponse)
    async def index(http: Request) -> Response:
        return page.index(http, state.model_name)

    @router.get(_FILES + "{name:path}", include_in_schema=False)
    async def file(http: Request, name: str) -> Response:
        return page.file(http, name)

    @router.get("/tandem/live", summary="What the engine and each of its experts do now")
    async def look() -> Response:
        return Response(
            await live.body(), media_type="application/json", headers={"Cache-Control": "no-store"}
        )

    return router


def _wants_html(accept: bytes) -> bool:
    """Browsers ask for it by name; clients of the API take anything."""
    return b"text/html" in accept


def _read() -> Mapping[str, _PageFile]:
    """Every file of `static/` whose kind is known, by its path there."""
    with as_file(files("tandem.server.page").joinpath("static")) as folder:
        paths = [path for path in folder.rglob("*") if path.suffix in _TYPES]
        return {path.relative_to(folder).as_posix(): _file(path) for path in paths}


def _file(path: Path) -> _PageFile:
    data = path.read_bytes()
    return _PageFile(data, _TYPES[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:16]}"')


def _answer(http: Request, file: _PageFile) -> Response:
    headers = _HEADERS | {"ETag": file.etag, "Vary": "Accept"}
    if http.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    charset = "" if file.media_type.startswith("font/") else "; charset=utf-8"
    return Response(file.data, headers=headers, media_type=file.media_type + charset)
