"""`ResponseStore`: responses that later ones may go on from, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tandem.server.chat.content import Image, images_of, text_of
from tandem.server.chat.conversation import Message
from tandem.server.errors import ApiError

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """messages: all that was said up to the end of the response, without `instructions`. body: as it was sent. items:
    its output's by their ids, as JSON: a body may be much longer than one of them, and requests name hundreds."""

    messages: tuple[Message, ...]
    body: bytes
    items: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def images(self) -> list[Image]:
        return [image for message in self.messages for image in images_of(message.content)]

    @property
    def size(self) -> int:
        """Bytes without images, nearly. A later response has the same texts: they are counted for each."""
        items = sum(map(len, self.items.values()))
        return len(self.body) + items + sum(_size(message) for message in self.messages)


class ResponseStore:
    """The least recently used go first. All are gone when the server ends."""

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._response_of: dict[str, str] = {}  # of an item's id
        self._bytes = 0
        self._images: dict[str, _StoredEntry] = {}  # by their data

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """One that is too large for the store is not kept; it would take all others' place."""
        if stored.size + sum(len(image.data) for image in stored.images) > self._most_bytes:
            return
        stored = replace(stored, messages=tuple(map(self._with_kept_images, stored.messages)))
        self._stored[response_id] = stored
        self._response_of |= dict.fromkeys(stored.items, response_id)
        self._bytes += stored.size
        while len(self._stored) > self._most or self._bytes > self._most_bytes:
            self._forget(next(iter(self._stored)))

    def get(self, response_id: str, param: str) -> StoredResponse:
        """Raises ApiError: 400 for one that another request names, else 404."""
        if response_id not in self._stored:
            earlier = param == "previous_response_id"
            text = (
                f"there is no response {response_id[:100]!r}; it was not stored, or was dropped for newer ones"
            )
            code = "previous_response_not_found" if earlier else "response_not_found"
            raise ApiError(400 if earlier else 404, text, param=param, code=code)
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def drop(self, response_id: str, param: str) -> None:
        """Raises ApiError 404."""
        self.get(response_id, param)
        self._forget(response_id)

    def item(self, item_id: str | None, param: str) -> dict[str, Any]:
        """Item of a stored response's output. Raises ApiError 400."""
        if item_id not in self._response_of:
            text = f"there is no item {(item_id or '')[:100]!r}; its response was not stored, or was dropped"
            raise ApiError(400, text, param=param, code="item_not_found")
        entry: dict[str, Any] = msgspec.json.decode(self.get(self._response_of[item_id], param).items[item_id])
        return entry

    def _forget(self, response_id: str) -> None:
        stored = self._stored.pop(response_id)
        self._bytes -= stored.size
        for image in stored.images:
            self._drop_image(image.data)
        for item in stored.items:
            self._response_of.pop(item, None)


    def _with_kept_images(self, message: Message) -> Message:
        """Equal images of all responses are one, and count once."""
        if isinstance(message.content, str):
            return message
        parts = (part if isinstance(part, str) else self._kept_image(part) for part in message.content)
        return replace(message, content=tuple(parts))

    def _kept_image(self, image: Image) -> Image:
        if image.data not in self._images:
            self._images[image.data] = _StoredEntry(image.data)
            self._bytes += len(image.data)
        entry = self._images[image.data]
        entry.uses += 1
        return replace(image, data=entry.data, older=True)

    def _drop_image(self, data: str) -> None:
        entry = self._images[data]
        entry.uses -= 1
        if entry.uses == 0:
            del self._images[data]
            self._bytes -= len(data)


@dataclass(slots=True)
class _StoredEntry:
    """An image of so many messages of stored responses."""

    data: str
    uses: int = 0


def _size(message: Message) -> int:
    calls = sum(len(str(call.arguments)) for call in message.tool_calls)
    return 4 * (len(text_of(message.content)) + len(message.reasoning or "") + calls) + 200
