"""Attachments of messages: plain text in a file is given to the model, and images, if it sees; of the rest it gets a
note.

An agent sends its whole history with every request. A refusal would come again each time and end its work for good:
some append the next prompt to the very message that was refused. So only what a user shows in the newest turn is
refused, and only where the request has no tools.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote_to_bytes

from tandem.server.chat import content as contents
from tandem.server.chat.content import Content, Detail, Image
from tandem.server.errors import ApiError

_IMAGES = ("image", "image_url", "input_image", "computer_screenshot")
_KINDS = {
    **dict.fromkeys(_IMAGES, ("an image", "see")),
    **dict.fromkeys(("document", "file", "input_file", "container_upload"), ("a file", "read")),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), ("a sound", "hear")),
    **dict.fromkeys(("video", "video_url", "input_video"), ("a video", "see")),
}
_TEXT_TYPES = ("application/json", "application/xml", "application/x-yaml", "application/yaml", "application/toml")
_MOST_NAME = 200


@dataclass(frozen=True, slots=True)
class Sight:
    """Kinds of attachments that a model takes of a message. images: it sees them. unread: gets the places of what it is
    only told of. refuses: that is refused instead. blind: why a model that could see does not."""

    unread: list[str]
    images: bool = False
    refuses: bool = False
    blind: str = ""

    def of_turn(self, refused: bool) -> Sight:
        return replace(self, refuses=refused)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where an image's bytes are: a `data:` URL, or, where `bare`, base64 alone. Clients may put anything there."""

    url: Any
    detail: Any = None
    bare: bool = False


@dataclass(frozen=True, slots=True)
class Attachment:
    """kind: its part's type. name: of a file. text: where it is plain text. field: of its part, that says its kind.
    image: where it is one, in the field `image_field`."""

    kind: str
    name: str | None = None
    text: str | None = None
    field: str = ".type"
    image: ImageSource | None = None
    image_field: str = ""

    def shown(self, where: str, sight: Sight) -> Content:
        """Content that the model reads or sees. Raises ApiError 400 where it can do neither, and that is refused."""
        if self.text is not None:
            return self.text
        if sight.images and self.image is not None:
            try:
                data = _image_data(self.image, where + self.image_field)
            except ApiError:
                if sight.refuses:
                    raise
            else:
                detail: Detail = "low" if self.image.detail == "low" else "high"
                return (Image(data, where + self.image_field, detail, older=not sight.refuses),)
        elif sight.refuses:
            raise self._refused(where + self.field, sight)
        sight.unread.append(where)
        name = f": {self.name[:_MOST_NAME]}" if self.name else ""
        return note(self.kind, name, sight)

    def _refused(self, where: str, sight: Sight) -> ApiError:
        served = "text and images are" if sight.images else "text is"
        text = f"{where}: only {served} served here, not {self.kind[:40]!r}"
        if sight.images and _KINDS[self.kind][0] == "a video":
            text += "; send frames as images, with their times as text"
        if sight.blind and self.kind in _IMAGES:
            text += f": {sight.blind}"
        return ApiError(400, text, param=where, code="not_available")


def note(kind: str, name: str, sight: Sight) -> str:
    """Note to a model about an attachment that it cannot read."""
    what, verb = _KINDS[kind]
    if sight.images and kind in _IMAGES:
        return unread_image("it did not come with the request")
    reads = "text and see images" if sight.images else "text"
    return f"[{what}{name}. You cannot {verb} it: you read {reads} only. Say so if it matters.]"


def unread_image(why: str) -> str:
    """Note to a model that sees, about an image that it cannot be shown."""
    return f"[an image, which cannot be shown to you: {why[:200]}. Say so if it matters.]"


def _image_data(source: ImageSource, where: str) -> str:
    """Its base64. Raises ApiError 400."""
    url = source.url if isinstance(source.url, str) else ""
    scheme, _, rest = url[:2048].partition(":")
    if not rest and source.bare and url:
        return url
    if scheme.lower() != "data":
        text = f"{where}: send the image itself, as data:image/png;base64,…; the server fetches and opens none"
        raise ApiError(400, text, param=where, code="image_url_not_allowed" if url else "invalid_image")
    head, comma, _ = rest.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        text = f"{where}: write the image as data:image/png;base64,… with the base64 of its bytes"
        raise ApiError(400, text, param=where, code="invalid_image")
    return url[len(scheme) + len(head) + 2 :]


def is_attachment(kind: str) -> bool:
    """Whether a part of this type is an attachment."""
    return kind in _KINDS


def refused_turn(roles: Sequence[str], tools: Collection[object] | None) -> int | None:
    """The message whose attachments are refused: what a user shows now. An answer that the client began may follow it.
    None: an agent asks, for there are tools, or it goes on with a tool's result. roles: of all messages."""
    if tools:
        return None
    turns = [i for i, role in enumerate(roles) if role not in ("system", "developer")]
    while turns and roles[turns[-1]] == "assistant":
        turns.pop()
    if not turns or roles[turns[-1]] != "user":
        return None
    beside_result = len(turns) > 1 and roles[turns[-2]] == "tool"
    return None if beside_result else turns[-1]


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


def joined(parts: Iterable[tuple[Content, bool]]) -> Content:
    """Texts and images of a message as one: attached text (True) stands in lines of its own."""
    pieces, attached = list[Content](), False
    for piece, attachment in parts:
        if piece and pieces and (attachment or attached) and _needs_line(pieces[-1], piece):
            pieces.append("\n")
        if piece:
            pieces.append(piece)
        attached = attachment
    return contents.joined(pieces)


def _needs_line(before: Content, piece: Content) -> bool:
    return isinstance(before, str) and isinstance(piece, str) and not before.endswith("\n")
