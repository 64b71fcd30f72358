"""`block_content`: what a model reads or sees of a content block: text, documents, search results and images, or a note
of what it cannot read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tandem.errors import RequestError
from tandem.server.anthropic.schema import ContentBlock
from tandem.server.chat.attachments import Attachment, ImageSource, Sight, file_text, is_attachment, string
from tandem.server.chat.content import Content, joined
from tandem.server.errors import ApiError

BETWEEN = "\n\n"  # blocks and turns that become one text


class PlacedBlock(NamedTuple):
    """where: it stands in the body. sight: what the model takes of it."""

    where: str
    block: ContentBlock
    sight: Sight


def content_of(blocks: Iterable[PlacedBlock]) -> Content:
    """Raises RequestError, ApiError 400 for what is refused."""
    return joined(map(block_content, blocks), BETWEEN)


def block_content(placed: PlacedBlock) -> Content:
    where, block, sight = placed
    match block.type:
        case "text":
            if block.text is None:
                raise RequestError(f"{where}.text is missing", f"{where}.text")
            return block.text
        case "document":
            return _document(placed)
        case "search_result":
            return _titled(block.title, string(block.source), text=_inside(block.content, placed, "content"))
        case "tool_reference":  # all tools are told of, so there is nothing to look up
            return f"[the tool {(block.tool_name or '')[:128]}]"
    if not is_attachment(block.type):
        text = f"{where}.type: only text is served here, not {block.type[:40]!r}"
        raise ApiError(400, text, param=f"{where}.type", code="not_available")
    image = _image(block) if block.type == "image" else None
    return Attachment(block.type, image=image, image_field=".source").shown(where, sight)


def _image(block: ContentBlock) -> ImageSource:
    """Image source of a block: base64, or an address, which is refused. One of a file's id is refused, too."""
    source: dict[str, Any] = block.source if isinstance(block.source, dict) else {}
    if source.get("type") == "base64":
        return ImageSource(source.get("data"), bare=True)
    return ImageSource(source.get("url") or source.get("file_id"))


def _document(placed: PlacedBlock) -> Content:
    block = placed.block
    source: dict[str, Any] = block.source if isinstance(block.source, dict) else {}
    match source.get("type"):
        case "text":
            text: Content | None = string(source.get("data"))
        case "content":
            text = _inside(_blocks(source.get("content")), placed, "source.content")
        case _:
            text = file_text(string(source.get("data")), media_type=string(source.get("media_type")))
    if text is not None:
        return _titled(block.title, block.context, text=text)
    return Attachment(block.type, block.title).shown(placed.where, placed.sight)


def _blocks(content: Any) -> str | list[ContentBlock]:
    """Blocks of a source, into which a client may have put anything."""
    if not isinstance(content, list):
        return string(content) or ""
    return [
        ContentBlock(string(each.get("type")) or "", string(each.get("text")), source=each.get("source"))
        for each in content
        if isinstance(each, dict)
    ]


def _inside(content: str | list[ContentBlock] | None, around: PlacedBlock, name: str) -> Content:
    if not isinstance(content, list):
        return content or ""
    where = f"{around.where}.{name}"
    return content_of(PlacedBlock(f"{where}[{i}]", block, around.sight) for i, block in enumerate(content))


def _titled(*titles: str | None, text: Content) -> Content:
    return joined(("\n".join(filter(None, titles)), text), BETWEEN)
