"""Rules of GGUF files that cut text into words, beside the tokenizers of Transformers that have them too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers
from transformers import GemmaTokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from gguf_files import finish
from tandem.checkpoint.gguf_tokenizer import PRE
from tandem.engine.text.tokenizer import Tokenizer

TEXTS = (
    "Grüße, 42 Äpfel!\n\n  x", "e\u0301te\u0301 नमस्ते दुनिया", "don't WON'T it's 12345 a/b\r\n\r\n",
    "東京 도쿄 ١٢٣", "\t  tab", "",
)  # fmt: skip
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
Pairs = list[tuple[str, str]]


def learnt(words: pre_tokenizers.PreTokenizer, **more: Any) -> tuple[dict[str, int], Pairs]:
    """Tokens and merges of a small BPE."""
    library = Library(models.BPE())
    library.pre_tokenizer = words
    library.train_from_iterator([*TEXTS * 3], trainers.BpeTrainer(vocab_size=420, show_progress=False, **more))
    merges = json.loads(library.to_str())["model"]["merges"]
    return library.get_vocab(), [tuple(pair) for pair in merges]


def written(path: Path, model: str, vocabulary: dict[str, int], merges: Pairs, **more: Any) -> Tokenizer:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types([more.get("kinds", {}).get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    if "pre" in more:
        writer.add_tokenizer_pre(more["pre"])
    for name, token in more.get("special", {}).items():
        getattr(writer, f"add_{name}_token_id")(vocabulary[token])
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    return Tokenizer.load(finish(writer, path))


def test_qwen35(tmp_path: Path) -> None:
    vocabulary, merges = learnt(pre_tokenizers.ByteLevel(add_prefix_space=False), initial_alphabet=LETTERS)
    theirs = Qwen3_5Tokenizer(vocab=dict(vocabulary), merges=merges)
    ours = written(tmp_path / "m.gguf", "gpt2", vocabulary, merges, pre="qwen35")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_gemma4(tmp_path: Path) -> None:
    special = {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"}
    kinds = dict.fromkeys(special.values(), gguf.TokenType.CONTROL)
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    learnt_tokens, merges = learnt(pre_tokenizers.Metaspace())
    tokens = [*special.values(), *bytes_, *sorted(learnt_tokens, key=learnt_tokens.__getitem__)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    theirs = GemmaTokenizer(vocab=dict(vocabulary), merges=merges, mask_token="<pad>")
    ours = written(tmp_path / "m.gguf", "gemma4", vocabulary, merges, kinds=kinds, special=special)
    for text in (*TEXTS, "two  spaces   three 🙂"):
        found = ours.encode(text, add_special_tokens=False)
        assert found == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(found) == text
    assert ours.encode("a", add_special_tokens=True)[0] == vocabulary["<bos>"]


@pytest.mark.parametrize("pre", sorted(PRE))
def test_every_rule_gives_back_the_text(tmp_path: Path, pre: str) -> None:
    """Of text in composed form, which some rules bring it into."""
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    ours = written(tmp_path / "m.gguf", "gpt2", vocabulary, [], pre=pre)
    for text in (TEXTS[0], TEXTS[2], TEXTS[3]):
        assert ours.decode(ours.encode(text)) == text
