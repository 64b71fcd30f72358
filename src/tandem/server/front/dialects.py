"""Facts of dialects for the front: which routes need a loaded model, and what a stream says while it waits."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from tandem.server.body import decode
from tandem.server.generation import DONE, EVENTS, comment, frame
from tandem.server.ollama.writer import LINES

OLLAMA = ("/api/chat", "/api/generate")
_STREAMS = frozenset((
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate", *OLLAMA,
))  # fmt: skip
_NEEDED = _STREAMS | {"/v1/responses/input_tokens", "/v1/messages/count_tokens", "/tokenize", "/detokenize"}
# With the newline before it, none can be a part of a JSON string.
_ENDS = {
    "/v1/messages": (b"\nevent: message_stop\n",),
    "/v1/responses": tuple(b"\nevent: response.%b\n" % how for how in (b"completed", b"incomplete", b"failed")),
    **dict.fromkeys(OLLAMA, (b',"done":true',)),
}  # fmt: skip
_DONE = (b"\ndata: [DONE]\n",)
END_BYTES = max(len(end) for end in sum(_ENDS.values(), _DONE))
_NOTHING = (b"", b"null", b'""', b"[]")


class FrontFields(msgspec.Struct):
    """Fields of a body that the front reads; the model's own server checks it all."""

    model: str | None = None
    stream: Any = None
    keep_alive: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


def wish_of(body: bytes) -> FrontFields:
    """Raises ApiError 400."""
    return decode(body, FrontFields) if body.strip() else FrontFields()


def needs_model(path: str) -> bool:
    """Whether a request to it loads the model."""
    return path in _NEEDED


def streams(path: str, wish: FrontFields) -> bool:
    return path in _STREAMS and (wish.stream is True or (path in OLLAMA and wish.stream is not False))


def is_empty(path: str, wish: FrontFields) -> bool:
    """Ollama's way to ask for a model to be loaded, or unloaded."""
    content = {"/api/chat": wish.messages, "/api/generate": wish.prompt}.get(path)
    return content is not None and bytes(content).strip() in _NOTHING


def media_type(path: str) -> str:
    """Media type of a stream."""
    return LINES if path in OLLAMA else EVENTS


def is_stream(content_type: bytes) -> bool:
    return content_type.startswith((EVENTS.encode(), LINES.encode()))


def waiting(path: str, model: str) -> bytes:
    """That a stream waits: a comment, or a line of Ollama's without text."""
    if path not in OLLAMA:
        return comment()
    return msgspec.json.encode(chunk(path, model) | {"done": False}) + b"\n"


def chunk(path: str, model: str) -> dict[str, Any]:
    """An answer of Ollama's without text."""
    text: dict[str, Any] = {"response": ""}
    if path == "/api/chat":
        text = {"message": {"role": "assistant", "content": ""}}
    return {"model": model, "created_at": datetime.now(UTC).isoformat(), **text}


def begins_to_end(path: str, data: bytes) -> bool:
    """Whether a stream's last event, or line, begins in `data`."""
    return any(end in data for end in _ENDS.get(path, _DONE))


def failure(path: str, body: bytes) -> bytes:
    """Last bytes of a stream that has begun and fails. body: the refusal, as the dialect has it."""
    if path in OLLAMA:
        return body + b"\n"
    if path.startswith("/v1/messages"):
        return frame(body, "error")
    return frame(body) + (b"" if path == "/v1/responses" else DONE)
