"""docs/troubleshooting.md and docs/setup-gpu.md quote messages as the program says them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"troubleshooting.md": 30, "setup-gpu.md": 5, "tuning.md": 3}  # the fewest messages
COMMANDS = ("kt ", "pip ", "make ", "unset ", "--speculative", "--chat-template FILE")
VARIABLE = "\0"


def messages(page: str) -> list[str]:
    """The first cells of a page's tables that quote nothing but words that a program says."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    cells = re.findall(r"^\| `([^`|]+)` \|", text, re.M)
    inner = re.findall(r"^\| it ends while it loads \| `([^`|]+)`", text, re.M)
    return [cell for cell in cells + inner if " " in cell and not cell.startswith(COMMANDS)]


@cache
def said() -> tuple[str, ...]:
    """Every text of the sources, with a mark in the place of what is put in."""
    files = (ROOT / "src" / "tandem").rglob("*.py")
    return tuple(text for file in files for text in texts(ast.parse(file.read_text(encoding="utf-8"))))


def texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else VARIABLE for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(?:s|d|r)|\{\w*\}", VARIABLE, node.value)


def is_said(message: str) -> bool:
    """Its pieces, in their order, stand in one text."""
    pieces = [piece.strip() for piece in message.split("…") if piece.strip()]
    return any(has_in_order(text, pieces) for text in said())


def has_in_order(text: str, pieces: list[str]) -> bool:
    place = 0
    for piece in pieces:
        place = text.find(piece, place) + len(piece)
        if place < len(piece):
            return False
    return True


@pytest.mark.parametrize("page", PAGES)
def test_messages_are_those_of_the_sources(page: str) -> None:
    quoted = messages(page)
    assert len(quoted) >= PAGES[page]
    assert [message for message in quoted if not is_said(message)] == []


@pytest.mark.parametrize(
    "message",
    ["no GPU was ever found", "… is gated: accept its terms in …", "take … does not fit: its weights"],
)
def test_other_words_are_noticed(message: str) -> None:
    assert not is_said(message)
