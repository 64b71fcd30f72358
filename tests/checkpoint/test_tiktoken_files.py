"""`tiktoken.model`, Moonshot's form of a vocabulary: the same ids as tiktoken's own rule, which is written out here."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import CheckpointError
from tandem.text.tokenizer import Tokenizer

TEXT = "The weather in Oslo: 1234 degrees, it's COLD there. 天气很好 and 東京 too.\n\n  Zürich’s naïve café\r\n" * 3
WORDS = regex.compile(
    "|".join(
        (
            r"[\p{Han}]+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
    regex.V1,
)
ADDED = {1: ("[EOS]", True), 3: ("<|im_end|>", True), 6: ("<think>", False)}  # places behind the ranks


def learnt_ranks(count: int) -> dict[bytes, int]:
    """Bytes, then the most frequent pairs of the text, one after the other."""
    ranks = {bytes([i]): i for i in range(256)}
    words = [[bytes([b]) for b in word.encode()] for word in WORDS.findall(TEXT)]
    while len(ranks) < count:
        pairs: dict[bytes, int] = {}
        for word in words:
            for left, right in pairwise(word):
                pairs[left + right] = pairs.get(left + right, 0) + 1
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks[best] = len(ranks)
        words = [merged(word, {best: 0}) for word in words]
    return ranks


def merged(parts: list[bytes], ranks: dict[bytes, int]) -> list[bytes]:
    """The neighbours of the lowest rank are joined, again and again."""
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return parts
        i = min(found)[1]
        parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]


RANKS = learnt_ranks(320)


def reference(text: str) -> list[int]:
    found = []
    for word in WORDS.findall(text):
        data = word.encode()
        whole = [data] if data in RANKS else merged([bytes([b]) for b in data], RANKS)
        found += [RANKS[part] for part in whole]
    return found


def save(directory: Path, **settings: object) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {
        str(len(RANKS) + place): {"content": text, "special": special} for place, (text, special) in ADDED.items()
    }
    config = {"tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]", "added_tokens_decoder": added}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return directory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(save(tmp_path_factory.mktemp("tiktoken")))


@given(st.one_of(st.text(max_size=30), st.lists(st.sampled_from(TEXT.split(" ")), max_size=8).map(" ".join)))
def test_ids_are_tiktokens(tokenizer, text) -> None:
    assert tokenizer.encode(text) == reference(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_text_it_was_learnt_from(tokenizer) -> None:
    assert tokenizer.encode(TEXT) == reference(TEXT)
    assert len(tokenizer.encode(TEXT)) < len(TEXT.encode()) / 2  # merges are used


def test_added_tokens_have_their_ids_and_those_between_are_reserved(tokenizer) -> None:
    first = len(RANKS)
    assert tokenizer.encode("a<|im_end|><think>")[1:] == [first + 3, first + 6]
    assert tokenizer.eos_ids == (first + 1,)
    assert tokenizer.is_special(first + 3) and not tokenizer.is_special(first + 6)
    assert tokenizer.token_text(first + 2) == f"<|reserved_token_{first + 2}|>"
    assert tokenizer.token_text(first + 255) == f"<|reserved_token_{first + 255}|>"


def test_tokenizer_json_comes_first(tmp_path) -> None:
    (save(tmp_path) / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("version https://example\n", "line 1"),
        ("YQ== 0\nYg== zero\n", "line 2"),
        ("YQ== 0\n!!! 1\n", "line 2"),
        ("YQ== 0\nYg== 5\n", "line 2"),
        ("YQ== 0\nYQ== 1\n", r"tiktoken\.model has a token twice"),
        ("", "is empty"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named(tmp_path, content, said) -> None:
    (save(tmp_path) / "tiktoken.model").write_text(content)
    with pytest.raises(CheckpointError, match=said):
        Tokenizer.load(tmp_path)


def test_a_token_that_would_take_hours_is_refused(tmp_path) -> None:
    """Its parts are sought at each of its bytes: files are a stranger's."""
    line = base64.b64encode(b"a" * 1025).decode() + f" {len(RANKS)}\n"
    with (save(tmp_path) / "tiktoken.model").open("a") as file:
        file.write(line)
    with pytest.raises(CheckpointError, match=r"tiktoken\.model has a token of 1025 characters"):
        Tokenizer.load(tmp_path)


def test_an_added_token_of_a_huge_id_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="names token 9999999999"):
        Tokenizer.load(save(tmp_path, added_tokens_decoder={"9" * 5000: {"content": "x"}}))


def test_another_class_may_cut_words_otherwise(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="QwenTokenizer"):
        Tokenizer.load(save(tmp_path, tokenizer_class="QwenTokenizer"))
