"""vocab.json and merges.txt, and chat_template.json: the same ids and prompts as Transformers has of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from tandem.errors import CheckpointError
from tandem.text.tokenizer import Tokenizer

TEXT = (
    "The weather in Oslo: 1234 degrees, it's COLD there. 天气很好 and 東京 too.\n\n  Zürich’s naïve café\r\n"
    * 3
)
ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<tool_call>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """As Qwen3-Omni is on the hub."""
    path = tmp_path_factory.mktemp("omni")
    learnt = Library(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learnt.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    learnt.model.save(str(path))
    first = learnt.get_vocab_size()
    added = {
        str(first + i): {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                         "special": text != "<tool_call>"}
        for i, text in enumerate(ADDED)
    }  # fmt: skip
    said = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "eos_token": "<|im_end|>",
            "unk_token": None, "bos_token": None, "pad_token": "<|endoftext|>", "add_prefix_space": False}  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe"}))
    (path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def both(directory):
    return Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(
    "text", [TEXT, "<|im_start|>user\nHi<|im_end|>", "e\u0301 <tool_call>{}", "  a\t\n", "12345 don't"]
)
def test_ids_are_transformers(both, text):
    ours, theirs = both
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text)) == theirs.decode(
        theirs(text)["input_ids"], skip_special_tokens=True
    )


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_ids_of_any_text_are_transformers(both, text):
    ours, theirs = both
    assert ours.encode(text) == theirs(text)["input_ids"]


def test_the_end_token_is_known(both):
    ours, theirs = both
    assert ours.eos_ids == (theirs.convert_tokens_to_ids("<|im_end|>"),)


def test_the_chat_template_has_a_file_of_its_own(both):
    assert (
        both[0].apply_chat_template([{"role": "user", "content": "Hi"}]) == "<|im_start|>user\nHi<|im_end|>\n"
    )


SAID = [  # tokenizer_config.json beside a vocab.json that has the control tokens as pieces, as GPT-2's has
    {},
    {"eos_token": None, "unk_token": None, "bos_token": None, "pad_token": None},
    {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]},
    {"eos_token": "<new>", "unk_token": None, "bos_token": None, "pad_token": None},
    {"added_tokens_decoder": {"257": {"content": "<|im_start|>", "lstrip": True, "special": False}}},
]


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("said", SAID)
def test_control_tokens_of_vocab_json_are_transformers(kind, said, tmp_path):
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind} | said))
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs("a <|im_start|>hi<|im_end|><|endoftext|><new>")["input_ids"]
    assert ours.encode("a <|im_start|>hi<|im_end|><|endoftext|><new>") == ids
    special = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert {i for i in ids if ours.is_special(i)} == special & {*ids}
    assert ours.eos_ids == (() if theirs.eos_token is None else (theirs.eos_token_id,))


# -- what is refused ---


def changed(directory, path, name, text):
    for file in directory.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / name).write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("vocab.json", "[]", r"vocab\.json holds a JSON list"),
        ("vocab.json", '{"a": "b"}', r"vocab\.json does not give each token a number"),
        ("vocab.json", '{"a": true}', r"vocab\.json does not give each token a number"),
        ("merges.txt", "a b c\n", r"merges\.txt, line 1, is no pair"),
        (
            "merges.txt",
            "#version: 0.2\nqq zz\n",
            r"merges\.txt joins 'qq zz', which vocab\.json does not have",
        ),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "LlamaTokenizer"}',
            "'LlamaTokenizer'.*save_pretrained",
        ),
        ("tokenizer_config.json", "{}", "tokenizer_class ''"),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "Qwen2TokenizerFast", "added_tokens_decoder": {"9999": {"content": "<x>"}}}',
            r"vocab\.json has \d+ tokens, and a file beside it names token 9999",
        ),
    ],
)
def test_broken_files_are_named(directory, tmp_path, name, text, said):
    with pytest.raises(CheckpointError, match=said):
        Tokenizer.load(changed(directory, tmp_path, name, text))


def test_nothing_to_read_is_told(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json, nor vocab\.json and merges\.txt"):
        Tokenizer.load(tmp_path)
