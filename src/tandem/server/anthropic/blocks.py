"""`block_text`: what a model reads of a content block: text, documents and search results, or a note of what it cannot
read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tandem.errors import RequestError
from tandem.server.anthropic.schema import Block
from tandem.server.chat.attachments import Attachment, file_text, is_attachment, string
from tandem.server.errors import ApiError

BETWEEN = "\n\n"  # blocks and turns that become one text


class Placed(NamedTuple):
    """where: it stands in the body. unread: gets the places of what is no text in it. None: that is refused."""

    where: str
    block: Block
    unread: list[str] | None = None


def text_of(blocks: Iterable[Placed]) -> str:
    """Raises RequestError, ApiError 400 for what is no text."""
    return BETWEEN.join(filter(None, map(block_text, blocks)))


def block_text(placed: Placed) -> str:
    where, block, unread = placed
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
    return Attachment(block.type).shown(where, unread)


def _document(placed: Placed) -> str:
    block = placed.block
    source: dict[str, Any] = block.source if isinstance(block.source, dict) else {}
    match source.get("type"):
        case "text":
            text = string(source.get("data"))
        case "content":
            text = _inside(_blocks(source.get("content")), placed, "source.content")
        case _:
            text = file_text(string(source.get("data")), media_type=string(source.get("media_type")))
    shown = Attachment(block.type, block.title, text).shown(placed.where, placed.unread)
    return shown if text is None else _titled(block.title, block.context, text=shown)


def _blocks(content: Any) -> str | list[Block]:
    """Blocks of a source, into which a client may have put anything."""
    if not isinstance(content, list):
        return string(content) or ""
    return [
        Block(string(each.get("type")) or "", string(each.get("text")), source=each.get("source"))
        for each in content
        if isinstance(each, dict)
    ]


def _inside(content: str | list[Block] | None, around: Placed, name: str) -> str:
    if not isinstance(content, list):
        return content or ""
    where = f"{around.where}.{name}"
    return text_of(Placed(f"{where}[{i}]", block, around.unread) for i, block in enumerate(content))


def _titled(*titles: str | None, text: str) -> str:
    head = "\n".join(filter(None, titles))
    return BETWEEN.join(filter(None, (head, text)))
