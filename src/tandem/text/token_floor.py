"""`TokenFloor`: how few tokens a text can have at the least, found without tokenising it.

Each byte has a weight: one over the length of the longest token with that byte. The bytes of one token then weigh at
most 1 together, so a text has at least as many tokens as its bytes weigh.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import numpy as np
import tokenizers

_CHUNK_CHARS = 1 << 16  # a step that holds the GIL takes well under a millisecond
_SEAM_TOKENS = 16  # a chunk's end may hide characters that its neighbour would have composed
_SPACE = "\u2581"  # SentencePiece's space
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}  # pre-tokenisers that drop no character

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]


class TokenFloor:
    """Made by `token_floor`. Safe to use from several threads."""

    def __init__(self, lengths: Mapping[int, int], form: Form | None, strips: bool) -> None:
        """lengths: of the longest token with each byte. strips: some tokens swallow white space around them."""
        self._weights = np.zeros(256)
        for byte, length in lengths.items():
            self._weights[byte] = 1.0 / length
        self._form = form
        self._strips = strips

    def of(self, text: str) -> int:
        """No spelling of `text` has fewer tokens. Raises UnicodeEncodeError for lone surrogates."""
        counts = np.zeros(256, dtype=np.int64)
        for start in range(0, len(text), _CHUNK_CHARS):
            chunk = self._normal(text[start : start + _CHUNK_CHARS])
            counts += np.bincount(np.frombuffer(chunk.encode(), dtype=np.uint8), minlength=256)
        seams = len(text) // _CHUNK_CHARS if self._form is not None else 0
        return max(0, math.ceil(float(counts @ self._weights) - 1e-6) - seams * _SEAM_TOKENS)

    def _normal(self, chunk: str) -> str:
        if self._form is not None and not chunk.isascii():
            chunk = unicodedata.normalize(self._form, chunk)
        return "".join(chunk.split()) if self._strips else chunk


def token_floor(inner: tokenizers.Tokenizer, byte_of_char: Mapping[str, int]) -> TokenFloor | None:
    """None where some part of the tokenizer may drop characters, or put any number of them into one token.

    byte_of_char: the alphabet of byte-level BPE.
    """
    steps, model = _steps(inner.pre_tokenizer), inner.model
    form = _normal_form(_steps(inner.normalizer))
    if form is False or not isinstance(model, tokenizers.models.BPE) or not all(map(_keeps, steps)):
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    vocabulary = inner.get_vocab(with_added_tokens=False)
    added = list(inner.get_added_tokens_decoder().values())
    if any(step["type"] == "ByteLevel" for step in steps):
        known = {byte for char, byte in byte_of_char.items() if char in vocabulary}
        spellings = [bytes(byte_of_char[c] for c in token if c in byte_of_char) for token in vocabulary]
    elif model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        known, spellings = set(range(256)), _pieces(vocabulary)
    else:
        return None
    longest = _longest([*spellings, *(token.content.encode() for token in added)])
    lengths = {byte: length for byte, length in longest.items() if byte in known}  # others may vanish
    return TokenFloor(lengths, form, any(token.lstrip or token.rstrip for token in added))


def _steps(part: Any) -> list[dict[str, Any]]:
    """The normalisers or pre-tokenisers that a part consists of, as tokenizer.json would have them."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    if state["type"] == "Sequence":
        return cast(list[dict[str, Any]], state.get("normalizers") or state.get("pretokenizers") or [])
    return [state]


def _keeps(step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokeniser only divides the text."""
    if step["type"] in ("Split", "Punctuation"):
        return step.get("behavior") != "Removed"
    return step["type"] in _KEEPING


def _normal_form(steps: Iterable[Mapping[str, Any]]) -> Form | Literal[False] | None:
    """The Unicode form that the text gets; False where a normaliser may do more than that and mark spaces."""
    form: Form | None = None
    for step in steps:
        if step["type"] in _FORMS and form is None:
            form = cast(Form, step["type"])
        elif step["type"] != "Prepend" and not _marks_spaces(step):
            return False
    return form


def _marks_spaces(step: Mapping[str, Any]) -> bool:
    return (
        step["type"] == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == _SPACE
    )


def _pieces(vocabulary: Iterable[str]) -> list[bytes]:
    """The bytes of a text that each of SentencePiece's tokens stands for."""
    single = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    return [single.get(token) or token.replace(_SPACE, " ").encode() for token in vocabulary]


def _longest(tokens: Iterable[bytes]) -> dict[int, int]:
    """For each byte, the length of the longest token with it."""
    longest: dict[int, int] = {}
    for token in sorted(tokens, key=len, reverse=True):
        for byte in set(token) - longest.keys():
            longest[byte] = len(token)
    return longest
