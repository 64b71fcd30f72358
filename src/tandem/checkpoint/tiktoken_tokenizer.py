"""`tiktoken_tokenizer`: Moonshot's models (Kimi, Moonlight) have `tiktoken.model`, and no tokenizer.json.

A line of it is a token's bytes in base64 and its rank. tiktoken joins the two neighbours whose joint token has the
lowest rank, so a rank is a merge's place. How words are cut is in no file, but in the code of `TikTokenTokenizer`.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tandem.checkpoint.gguf_tokenizer import PRE, all_merges
from tandem.errors import CheckpointError
from tandem.spec.small_files import lfs_pointer, read_text

FILE = "tiktoken.model"
KIND = "TikTokenTokenizer"
FILE_BYTES = 16 << 20  # Kimi's has three million
ID_DIGITS = 10  # more than any id has; Python refuses to read thousands
RESERVED = 256  # ids behind the ranks; those without a name are `<|reserved_token_ID|>`


def tiktoken_tokenizer(directory: Path, settings: dict[str, Any], byte_of_char: dict[str, int]) -> Tokenizer:
    """settings: tokenizer_config.json. byte_of_char: the stand-ins of byte-level BPE. Raises CheckpointError."""
    path, kind = directory / FILE, settings.get("tokenizer_class", KIND)
    if kind != KIND:
        raise CheckpointError(f"{path} belongs to {kind}, whose words are not known here; only {KIND}'s are")
    char_of_byte = {byte: char for char, byte in byte_of_char.items()}
    tokens = ["".join(map(char_of_byte.__getitem__, token)) for token in _tokens(path)]
    vocabulary = {token: rank for rank, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise CheckpointError(f"{path} has a token twice; fetch the file again")
    merges = all_merges(path, [(token, -float(rank)) for rank, token in enumerate(tokens)], vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE["kimi-k2"]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    _add(tokenizer, path, _named(settings), len(tokens))
    return tokenizer


def _tokens(path: Path) -> list[bytes]:
    """By rank."""
    tokens: list[bytes] = []
    for number, line in enumerate(read_text(path, FILE_BYTES).splitlines(), 1):
        code, _, rank = line.partition(" ")
        try:
            tokens.append(base64.b64decode(code, validate=True))
        except binascii.Error:
            rank = ""
        if rank != str(len(tokens) - 1):
            broken = CheckpointError(f"{path}, line {number}, is no token and its rank; fetch the file again")
            raise lfs_pointer(path) or broken
    if not tokens:
        raise CheckpointError(f"{path} is empty; fetch the file again")
    return tokens


def _named(settings: dict[str, Any]) -> dict[int, AddedToken]:
    """Added tokens by their ids."""
    decoder = settings.get("added_tokens_decoder")
    return {
        int(place[:ID_DIGITS]): AddedToken(
            str(token.get("content", "")), normalized=False, special=token.get("special") is True
        )
        for place, token in (decoder.items() if isinstance(decoder, dict) else ())
        if place.isdecimal() and isinstance(token, dict)
    }


def _add(tokenizer: Tokenizer, path: Path, tokens: dict[int, AddedToken], first: int) -> None:
    """The library numbers added tokens in their order, so none may be left out."""
    end = max(first + RESERVED, *(place + 1 for place in tokens), first)
    if end > first + 16 * RESERVED:
        raise CheckpointError(f"{path} has {first} tokens, but tokenizer_config.json names token {end - 1}")
    for place in range(first, end):
        token = tokens.get(place) or AddedToken(f"<|reserved_token_{place}|>", normalized=False, special=True)
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != place:
            raise CheckpointError(f"tokenizer_config.json names {token.content!r} twice, or an empty token")
