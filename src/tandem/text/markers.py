"""`MarkerGuard`: text of a user that spells a control token stays text.

A chat template puts messages and control tokens into one text. Before it does, `guard` writes a sign that no text has
into every control token that a message spells. `encode` then tokenises the rendered text, takes the sign out again,
and tokenises what was around it without control tokens. A text without such spellings is not touched at all.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from tandem.errors import RequestError

log = logging.getLogger("tandem.text")

_SIGNS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode promises that these are no characters
_BREAK = "\u200b"  # in place of the sign, where a text cannot be tokenised by itself: no width, but no control token


class MarkerGuard:
    """`markers`: control tokens, and other added tokens that the chat template writes."""

    def __init__(self, inner: tokenizers.Tokenizer, markers: Iterable[str]) -> None:
        self.markers = frozenset(marker for marker in markers if len(marker) > 1 and not marker.isspace())
        self._inner = inner
        self._added = frozenset(inner.get_added_tokens_decoder())
        self._pattern = _pattern(self.markers)
        self._plain: tokenizers.Tokenizer | None = None
        self._warned = False

    def sign(self, text: str) -> str:
        """A sign that is not in `text`; "" where `text` spells no marker. Raises RequestError."""
        if self._pattern is None or not self._pattern.search(text):
            return ""
        for sign in _SIGNS:
            if sign not in text:
                return sign
        raise RequestError("the messages have too many code points that are no characters", "messages")

    def guard(self, value: Any, sign: str, but: Collection[str] = ()) -> Any:
        """The same with the sign in every marker that any text in it spells. `but`: markers that are left alone."""
        pattern = _pattern(self.markers - frozenset(but)) if but else self._pattern
        return value if pattern is None or not sign else _guarded(value, sign, pattern)

    def encode(self, text: str, sign: str) -> list[int]:
        """Token ids of a rendered text, without begin-of-text. Raises UnicodeEncodeError for lone surrogates."""
        [encoding] = self._inner.encode_batch([text], add_special_tokens=False)
        ids: list[int] = []
        begin, at = 0, 0  # of the stretch between two added tokens: its first token, its first character
        for index, (token_id, (first, last)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
            if token_id in self._added:
                ids += self._stretch(encoding.ids[begin:index], text[at:first], sign)
                ids.append(token_id)
                begin, at = index + 1, last
        return ids + self._stretch(encoding.ids[begin:], text[at:], sign)

    def _stretch(self, ids: list[int], text: str, sign: str) -> list[int]:
        """Text between two added tokens, whose ids with the sign in it are known."""
        if sign not in text:
            return ids
        by_itself = self._encode_plain(text)
        without = self._encode_plain(text.replace(sign, ""))
        if by_itself == ids and self._added.isdisjoint(without):
            return without
        if not self._warned:
            self._warned = True
            log.warning(
                "control tokens in messages get a zero-width space: this tokenizer cannot take them as text"
            )
        return self._encode_plain(text.replace(sign, _BREAK))

    def _encode_plain(self, text: str) -> list[int]:
        if self._plain is None:
            self._plain = _without_added_tokens(self._inner)
        [encoding] = self._plain.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


def _pattern(markers: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(markers, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _guarded(value: Any, sign: str, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, dict):
        return {_guarded(k, sign, pattern): _guarded(v, sign, pattern) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_guarded(item, sign, pattern) for item in value]
    if not isinstance(value, str):
        return value
    while pattern.search(value):  # markers may overlap
        value = pattern.sub(lambda match: match[0][0] + sign + match[0][1:], value)
    return value


def _without_added_tokens(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Shares the model, so it costs nothing."""
    plain = tokenizers.Tokenizer(inner.model)
    if inner.normalizer is not None:
        plain.normalizer = inner.normalizer
    pre = inner.pre_tokenizer
    if isinstance(pre, pre_tokenizers.Metaspace) and pre.prepend_scheme == "first":
        # What stands behind a control token is not first.
        pre = pre_tokenizers.Metaspace(pre.replacement, prepend_scheme="never", split=pre.split)
    if pre is not None:
        plain.pre_tokenizer = pre
    return plain
