"""Bytes that stand in no text. xgrammar takes some for letters: halves of UTF-16's, and spellings that are too long.

A client would see several other letters for them, so a text of bounded length would be too long.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# A letter's first byte, and which second bytes never follow it.
_NEVER = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F), 0xF4: (0x90, 0xBF)}
_PAIRS = b"|".join(b"\\x%02x[\\x%02x-\\x%02x]" % (first, *seconds) for first, seconds in _NEVER.items())
_NO_TEXT = re.compile(rb"[\xc0\xc1\xf5-\xff]|" + _PAIRS)


def no_texts(pieces: Sequence[bytes]) -> set[int]:
    """Tokens that have such bytes."""
    return {i for i, piece in enumerate(pieces) if not piece.isascii() and _NO_TEXT.search(piece)}


def never_behind(pieces: Sequence[bytes]) -> dict[bytes, set[int]]:
    """By the last byte of a text so far: tokens that no text goes on with."""
    begins = [(i, piece[0]) for i, piece in enumerate(pieces) if piece and 0x80 <= piece[0] <= 0xBF]
    return {
        bytes([first]): {i for i, begin in begins if low <= begin <= high} for first, (low, high) in _NEVER.items()
    }
