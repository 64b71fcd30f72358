"""`TokenFloor` never says more than the tokenizer, and says enough to refuse long texts."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from tandem.text.token_floor import token_floor
from tandem.text.tokenizer import Tokenizer

CORPUS = ["the cat sat on the mat", "        indented = 12345", "naïve 中文字符 résumé", "------------"] * 8


def byte_level(*, normalizer=None, added=()) -> tokenizers.Tokenizer:
    """Trained on a few lines, so that some tokens are long."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.normalizer = normalizer
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_special_tokens(list(added))
    return inner


def sentence_piece() -> tokenizers.Tokenizer:
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*single, "<unk>", "▁", "t", "h", "e", "▁t", "th", "the", "▁the"]
    merges = [("▁", "t"), ("t", "h"), ("th", "e"), ("▁", "the")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return inner


TOKENIZERS = {
    "byte level": byte_level(),
    "NFC": byte_level(normalizer=normalizers.NFC()),
    "stripping": byte_level(added=[AddedToken("<|user|>", lstrip=True, rstrip=True, special=True)]),
    "SentencePiece": sentence_piece(),
}
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from([*CORPUS, "<|user|>", "   ", "e\u0301", "\u1112\u1161\u11ab", "α\u0313\u0301\u0345"]),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer = Tokenizer(TOKENIZERS[name])
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_seams_between_pieces_of_a_text_count_nothing_twice(name: str) -> None:
    tokenizer = Tokenizer(TOKENIZERS[name])
    for unit in ("e\u0301", "\u1112\u1161\u11ab", "中", "the cat "):
        text = "x" + unit * 70_000
        fewest = tokenizer.fewest_tokens(text)
        assert 1000 < fewest <= len(tokenizer.encode(text, add_special_tokens=False))


def test_digits_that_are_tokens_by_themselves_are_counted_exactly() -> None:
    tokenizer = Tokenizer(sentence_piece())
    assert tokenizer.fewest_tokens("7" * 100_000) == 100_000


def test_where_characters_may_vanish_nothing_is_said() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    stripped = byte_level(normalizer=normalizers.Strip())
    removing = byte_level()
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    for inner in (words, stripped, removing):
        assert token_floor(inner, {}) is None
        assert Tokenizer(inner).fewest_tokens("word " * 1000) == 0
