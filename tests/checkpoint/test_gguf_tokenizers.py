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
from tandem.errors import CheckpointError
from tandem.text.tokenizer import Tokenizer

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


def written(path: Path, model: str, vocabulary: dict[str, int], merges: Pairs | None, **more: Any) -> Tokenizer:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_token_list(tokens)
    if "kinds" not in more or more["kinds"] is not None:
        kinds = more.get("kinds", {})
        writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    if merges is not None:
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


@pytest.mark.parametrize(("model", "more"), [("gpt2", {"pre": "qwen2"}), ("gemma4", {})])
def test_without_merges_a_file_is_refused(tmp_path: Path, model: str, more: dict[str, Any]) -> None:
    """Each letter would be a token, and prompts nonsense to the model; llama.cpp refuses it, too."""
    letters = {letter: i for i, letter in enumerate(LETTERS)}
    vocabulary = letters | {"<0x0A>": 256, "the": 257}
    with pytest.raises(CheckpointError, match=r"no tokenizer\.ggml\.merges.*convert the model again"):
        written(tmp_path / "m.gguf", model, vocabulary, None, **more)
    assert written(tmp_path / "n.gguf", model, letters, None, **more).encode("ab") == [letters["a"], letters["b"]]


LOOKS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<｜User｜>", "<fim_prefix>")
TEXTS_TOO = ("<|", "|>", "<b>", "</td>", "<||>", "<a|b>")
MERGES = [("<", "|"), ("|", ">"), ("<", "b"), ("<b", ">")]


@pytest.mark.parametrize("kinds", [None, {}, {"<|im_start|>": gguf.TokenType.CONTROL}])
def test_control_tokens_without_their_type_are_control_tokens(tmp_path: Path, kinds, caplog) -> None:
    """With no types at all, or with normal ones. Texts that only begin like one stay texts."""
    vocabulary = {letter: i for i, letter in enumerate((*LETTERS, *LOOKS, "named", *TEXTS_TOO, "<b"))}
    more = {"pre": "qwen2", "kinds": kinds, "special": {"eos": "named"}}
    tokenizer = written(tmp_path / "m.gguf", "gpt2", vocabulary, MERGES, **more)
    for token in (*LOOKS, "named"):
        assert tokenizer.encode(f"a{token}b") == [64, vocabulary[token], 65], token
        assert tokenizer.is_special(vocabulary[token])
    assert not any(tokenizer.is_special(vocabulary[token]) for token in TEXTS_TOO)
    ends = {vocabulary[token] for token in ("named", "<|im_end|>", "<|eot_id|>", "<end_of_turn>")}
    assert set(tokenizer.eos_ids) == ends
    assert "control tokens without their type" in caplog.text and repr("<|im_end|>") in caplog.text


def test_types_that_a_file_has_are_kept(tmp_path: Path, caplog) -> None:
    vocabulary = {letter: i for i, letter in enumerate((*LETTERS, *LOOKS))}
    kinds = dict.fromkeys(LOOKS, gguf.TokenType.USER_DEFINED)
    tokenizer = written(tmp_path / "m.gguf", "gpt2", vocabulary, [], pre="qwen2", kinds=kinds)
    assert not any(tokenizer.is_special(vocabulary[token]) for token in LOOKS) and not caplog.records
