"""Attachments of messages: plain text in a file is given to the model, of the rest it gets a note.

An agent sends its whole history with every request. A refusal would come again each time and end its work for good:
some append the next prompt to the very message that was refused. So only what a user shows in the newest turn is
refused, and only where the request has no tools.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from tandem.server.errors import ApiError

_KINDS = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), ("an image", "see")),
    **dict.fromkeys(("document", "file", "input_file", "container_upload"), ("a file", "read")),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), ("a sound", "hear")),
    **dict.fromkeys(("video", "video_url", "input_video"), ("a video", "see")),
}
_TEXT_TYPES = ("application/json", "application/xml", "application/x-yaml", "application/yaml", "application/toml")
_MOST_NAME = 200


@dataclass(frozen=True, slots=True)
class Attachment:
    """kind: its part's type. name: of a file. text: where it is plain text. field: of its part, that says its kind."""

    kind: str
    name: str | None = None
    text: str | None = None
    field: str = ".type"

    def shown(self, where: str, unread: list[str] | None) -> str:
        """The text that the model reads. unread: gets `where` if that is a note. None: raises ApiError 400 instead."""
        if self.text is not None:
            return self.text
        if unread is None:
            where += self.field
            text = f"{where}: only text is served here, not {self.kind[:40]!r}"
            raise ApiError(400, text, param=where, code="not_available")
        unread.append(where)
        name = f": {self.name[:_MOST_NAME]}" if self.name else ""
        what, verb = _KINDS[self.kind]
        return f"[{what}{name}. You cannot {verb} it: you read text only. Say so if it matters.]"


def is_attachment(kind: str) -> bool:
    """Whether a part of this type is an attachment."""
    return kind in _KINDS


def refused_turn(roles: Sequence[str], tools: Collection[object] | None) -> int | None:
    """The message whose attachments are refused: what a user shows now. An answer that the client began may follow it.
    None: an agent asks, for there are tools, or it goes on with a tool's result. roles: of all messages."""
    if tools:
        return None
    said = [i for i, role in enumerate(roles) if role not in ("system", "developer")]
    while said and roles[said[-1]] == "assistant":
        said.pop()
    if not said or roles[said[-1]] != "user":
        return None
    beside_result = len(said) > 1 and roles[said[-2]] == "tool"
    return None if beside_result else said[-1]


def file_text(data: str | None, name: str | None = None, media_type: str | None = None) -> str | None:
    """The text of a file that is plain text; None for any other. data: a `data:` URL, or base64 of a type that
    `media_type` or the file's name says."""
    if not data:
        return None
    if data.startswith("data:"):
        head, _, data = data[5:].partition(",")
        media_type, *parameters = head.split(";")
        if "base64" not in parameters:
            return _decoded(unquote_to_bytes(data)) if is_text(media_type or "text/plain") else None
    media_type = media_type or mimetypes.guess_type(name or "")[0] or ""
    if not is_text(media_type):
        return None
    try:
        return _decoded(base64.b64decode(data, validate=True))
    except binascii.Error:
        return None


def is_text(media_type: str) -> bool:
    kind = media_type.partition(";")[0].strip().lower()
    return kind.startswith("text/") or kind in _TEXT_TYPES or kind.endswith(("+json", "+xml"))


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def string(value: Any) -> str | None:
    """A field's text, into which a client may have put anything; None: it is no text."""
    return value if isinstance(value, str) else None


def joined(parts: Iterable[tuple[str, bool]]) -> str:
    """Texts of a message as one: what was attached (True) stands in lines of its own."""
    text, attached = "", False
    for piece, attachment in parts:
        if text and piece and (attachment or attached) and not text.endswith("\n"):
            text += "\n"
        text, attached = text + piece, attachment
    return text
