"""`Content`: what a turn says, a text, or texts and images in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Detail = Literal["low", "high"]


@dataclass(frozen=True, slots=True)
class Image:
    """data: the file's bytes in base64, as the client sent them. where: its field, for errors. detail: "low" shows it
    small. older: it came with an earlier turn, or with a tool's result. One that cannot be read is told as a note
    then: a refusal would come again with every later request."""

    data: str = field(repr=False)
    where: str
    detail: Detail = "high"
    older: bool = False


Content = str | tuple[str | Image, ...]
"""A tuple has an image at least, and no empty text: what is only text is a string, for many templates take no other."""


def joined(pieces: Iterable[Content | None], between: str = "") -> Content:
    """All of them as one. between: texts that would touch, never beside an image."""
    parts = list[str | Image]()
    for piece in pieces:
        behind = between
        for part in (piece,) if isinstance(piece, str) else piece or ():
            if part and isinstance(part, str) and parts and isinstance(last := parts[-1], str):
                parts[-1] = f"{last}{behind}{part}"
            elif part:
                parts.append(part)
            behind = ""
    if any(isinstance(part, Image) for part in parts):
        return tuple(parts)
    return "".join(part for part in parts if isinstance(part, str))


def images_of(content: Content) -> tuple[Image, ...]:
    return () if isinstance(content, str) else tuple(part for part in content if isinstance(part, Image))


def text_of(content: Content) -> str:
    """Without its images."""
    return content if isinstance(content, str) else "".join(part for part in content if isinstance(part, str))


def template_content(content: Content) -> str | list[dict[str, Any]]:
    """As chat templates have it: never an image's bytes."""
    return content if isinstance(content, str) else list(_template_parts(content))


def _template_parts(parts: Iterable[str | Image]) -> Iterator[dict[str, Any]]:
    for part in parts:
        yield {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
