"""`bpe_tokenizer`: a tokenizer from vocab.json and merges.txt, which models have that were saved before tokenizer.json.

How words are cut is in no file, but in the class that tokenizer_config.json names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers

from tandem.checkpoint.gguf_tokenizer import PRE, words
from tandem.errors import CheckpointError
from tandem.spec.json_keys import read_json
from tandem.spec.small_files import read_text

VOCABULARY, MERGES = "vocab.json", "merges.txt"
FILE_BYTES = 64 << 20  # Qwen's have three million
_WORDS = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt-2"}
"""Classes, without "Fast", by how GGUF files call the way in which they cut words."""
_DEFAULTS = {
    "Qwen2Tokenizer": ("unk_token", "eos_token", "pad_token"),
    "GPT2Tokenizer": ("unk_token", "bos_token", "eos_token"),
}
"""Settings that these classes take to be END where tokenizer_config.json does not have them."""
END = "<|endoftext|>"


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """settings: tokenizer_config.json. A setting that is null stays so."""
    return dict.fromkeys(_DEFAULTS.get(_class(settings), ()), END) | settings


def bpe_tokenizer(directory: Path, settings: dict[str, Any]) -> Tokenizer:
    """Without added tokens. settings: tokenizer_config.json. Raises CheckpointError."""
    kind = _class(settings)
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
    return tokenizer


def _class(settings: dict[str, Any]) -> str:
    return str(settings.get("tokenizer_class", "")).removesuffix("Fast")


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
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(read_text(path, FILE_BYTES).split("\n"), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        first, _, second = line.rstrip("\r").partition(" ")
        if not first or not second or " " in second:
            raise CheckpointError(f"{path}, line {number}, is no pair of tokens; fetch the file again")
        merges.append((first, second))
    return merges
