"""Images in the messages of `tandem.LLM.chat`: found, decoded, and put where the prompt has their placeholders."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from tandem.engine.images.placeholders import with_rows
from tandem.engine.images.process import ImageProcess, Resized
from tandem.engine.vision.spans import ImageSpan, PixelSource
from tandem.errors import RequestError
from tandem.spec.vision import Tower

_TYPES = ("image", "image_url", "input_image")


class Picture(Protocol):
    """An image of Pillow's."""

    def save(self, fp: Any, format: str) -> None: ...


@dataclass
class Pictures:
    """Decodes them in a process of its own, which is started with the first one. most_tokens: of an image."""

    tower: Tower | None
    most_tokens: int
    blind: str = "this model reads text only"
    _process: ImageProcess | None = field(default=None, init=False)

    def taken_out(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Resized]]:
        """The messages as chat templates want them, and their images in order. Raises RequestError."""
        images: list[Resized] = []
        converted: list[dict[str, Any]] = []
        for i, message in enumerate(messages):
            if isinstance(parts := message.get("content"), list):
                where = f"messages[{i}].content"
                message |= {"content": [self._part(part, f"{where}[{j}]", images) for j, part in enumerate(parts)]}
            converted.append(message)
        return converted, images

    def placed(self, ids: list[int], images: list[Resized]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """The ids with a row for each token of an image. Raises RequestError."""
        if not images or self.tower is None:
            return ids, ()
        spans = [_span(self.tower, resized) for resized in images]
        try:
            ids, firsts = with_rows(ids, self.tower.placeholder, [span.rows for span in spans])
        except ValueError as error:
            text = f"the chat template wrote {error}; put images into a user's message"
            raise RequestError(text, "messages") from error
        return ids, tuple(
            msgspec.structs.replace(span, first=first) for span, first in zip(spans, firsts, strict=True)
        )

    def _part(self, part: Any, where: str, images: list[Resized]) -> Any:
        if not isinstance(part, Mapping) or part.get("type") not in _TYPES:
            return part
        if self.tower is None:
            raise RequestError(f"{where}: images are not read: {self.blind}", "messages")
        if self._process is None:
            self._process = ImageProcess(self.tower.processor)
        data = _file(part.get("image") or part.get("image_url") or part.get("url"), where)
        images.append(self._process.resized(data, where, most_tokens=self.most_tokens))
        return {"type": "image"}


def _file(image: Any, where: str) -> bytes:
    """The bytes of a picture: a path, a `data:` URL, bytes or an image of Pillow's. Raises RequestError."""
    if isinstance(image, Mapping):
        image = image.get("url")
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if isinstance(image, str) and image.startswith("data:"):
        return _decoded(image, where)
    if isinstance(image, str | Path) and not str(image).startswith(("http:", "https:")):
        try:
            return Path(image).expanduser().read_bytes()
        except OSError as error:
            raise RequestError(f"{where}: {str(image)[:200]} cannot be read ({error.strerror})", "messages") from error
    if hasattr(image, "save"):
        file = io.BytesIO()
        cast(Picture, image).save(file, format="PNG")
        return file.getvalue()
    raise RequestError(f"{where}: an image is a path, bytes or an image of Pillow's, not {image!r:.80}", "messages")


def _decoded(url: str, where: str) -> bytes:
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except ValueError as error:
        raise RequestError(f"{where}: the URL's data is no base64", "messages") from error


def _span(tower: Tower, resized: Resized) -> ImageSpan:
    """At the beginning of a prompt."""
    size, processor = resized.decoded, tower.processor
    grid = processor.grid(size.height, size.width)
    return ImageSpan(
        first=0, rows=processor.tokens(grid), grid=grid, key=resized.key(processor),
        pixels=PixelSource(height=size.height, width=size.width, inline=resized.pixels),
    )  # fmt: skip
