"""`TokenTable`: the bytes that each token of a vocabulary stands for, all of them at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

_SPACE = "▁"  # SentencePiece's
_SPELLERS = {"ByteLevel", "Metaspace", "ByteFallback"}


@dataclass(frozen=True, slots=True)
class TokenTable:
    """`pieces[i]` are the bytes of token i, empty where it stands for no text. `special`: control tokens' texts by id.

    The bytes of a control token are its text, which a message may spell without meaning the token.
    """

    pieces: tuple[bytes, ...]
    special: Mapping[int, str]


def read_token_table(
    inner: tokenizers.Tokenizer, byte_of_char: Mapping[str, int], bytes_of: Callable[[int], bytes]
) -> TokenTable:
    """byte_of_char: the alphabet of byte-level BPE. bytes_of: the same of one token, which is slow."""
    vocabulary = inner.get_vocab(with_added_tokens=True)
    added = inner.get_added_tokens_decoder()
    spell = _speller(inner, byte_of_char)
    pieces = [b""] * (1 + max(vocabulary.values(), default=-1))
    for text, index in vocabulary.items():
        pieces[index] = bytes_of(index) if spell is None else spell(text)
    for index, token in added.items():
        pieces[index] = token.content.encode()
    return TokenTable(tuple(pieces), {i: t.content for i, t in added.items() if t.special})


def _speller(inner: tokenizers.Tokenizer, byte_of_char: Mapping[str, int]) -> Callable[[str], bytes] | None:
    """Function from a token's text to its bytes, as the tokenizer's decoder has it; None for a decoder of another
    kind."""
    kinds = {step["type"] for step in _steps(inner.decoder)}
    if "ByteLevel" in kinds:
        return lambda text: _of_alphabet(text, byte_of_char)
    if kinds & _SPELLERS:
        single = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        return lambda text: single.get(text) or text.replace(_SPACE, " ").encode()
    return None


def _of_alphabet(text: str, byte_of_char: Mapping[str, int]) -> bytes:
    """A token with other letters is none of byte-level BPE's: it is spelt as it is."""
    try:
        return bytes([byte_of_char[char] for char in text])
    except KeyError:
        return text.encode()


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps
