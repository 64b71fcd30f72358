"""`bpe_tokenizer`: a tokenizer from vocab.json and merges.txt, which models have that were saved before tokenizer.json.

How words are cut is in no file, but in the class that tokenizer_config.json names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tandem.checkpoint.gguf_tokenizer import PRE, words
from tandem.config.json_keys import read_json
from tandem.config.small_files import read_text
from tandem.errors import CheckpointError

VOCABULARY, MERGES = "vocab.json", "merges.txt"
FILE_BYTES = 64 << 20  # Qwen's have three million
_DIGITS = 10  # more than any id has; Python refuses to read thousands
_WORDS = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt-2"}
"""Classes, without "Fast", by how GGUF files call the way in which they cut words."""


def bpe_tokenizer(directory: Path, settings: dict[str, Any]) -> Tokenizer:
    """settings: tokenizer_config.json. Raises CheckpointError."""
    kind = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    if kind not in _WORDS:
        raise CheckpointError(
            f"{directory / VOCABULARY} belongs to a tokenizer_class {kind!r}, whose words are not known here; "
            f"{' and '.join(_WORDS)} are. Write tokenizer.json there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    tokenizer = Tokenizer(_model(directory))
    tokenizer.pre_tokenizer, tokenizer.decoder = words(PRE[_WORDS[kind]]), decoders.ByteLevel()
    if kind == "Qwen2Tokenizer":
        tokenizer.normalizer = normalizers.NFC()
    _add_tokens(tokenizer, directory, settings)
    return tokenizer


def _model(directory: Path) -> tokenizers.models.Model:
    vocabulary = read_json(directory / VOCABULARY, FILE_BYTES)
    merges = _merges(directory / MERGES)
    if not all(type(number) is int and 0 <= number < 1 << 31 for number in vocabulary.values()):
        raise CheckpointError(
            f"{directory / VOCABULARY} does not give each token a number; fetch the file again"
        )
    for pair in merges:
        if not {*pair, "".join(pair)} <= vocabulary.keys():
            raise CheckpointError(
                f"{directory / MERGES} joins {' '.join(pair)!r}, which {VOCABULARY} does not have"
            )
    return models.BPE(vocabulary, merges)


def _merges(path: Path) -> list[tuple[str, str]]:
    """A line for each; the first may name the version."""
    found: list[tuple[str, str]] = []
    for number, line in enumerate(read_text(path, FILE_BYTES).split("\n"), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        first, _, second = line.rstrip("\r").partition(" ")
        if not first or not second or " " in second:
            raise CheckpointError(f"{path}, line {number}, is no pair of tokens; fetch the file again")
        found.append((first, second))
    return found


def _add_tokens(tokenizer: Tokenizer, directory: Path, settings: dict[str, Any]) -> None:
    """Those of tokenizer_config.json, in the order of their numbers, which the library gives in turn."""
    said = settings.get("added_tokens_decoder")
    tokens = said.items() if isinstance(said, dict) else ()
    numbered = {int(number[:_DIGITS]): token for number, token in tokens if number.isdecimal()}
    for number, token in sorted(numbered.items()):
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not content:
            raise CheckpointError(
                f"{directory}: added_tokens_decoder.{number} is {json.dumps(token)[:40]}, no token"
            )
        ways = {
            way: token.get(way) is True
            for way in ("lstrip", "rstrip", "single_word", "normalized", "special")
        }
        tokenizer.add_tokens([AddedToken(content, **ways)])
        if tokenizer.token_to_id(content) != number:
            raise CheckpointError(
                f"{directory}: added_tokens_decoder names {content!r} as token {number}, which follows "
                f"{tokenizer.get_vocab_size()} tokens; fetch tokenizer_config.json again"
            )
