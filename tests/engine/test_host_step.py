"""A decode step on the host is cheaper than it was, and its outputs are the same."""

from __future__ import annotations

import hashlib
import random

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from fake_model import EOS, VOCAB, FakeModel, fake_config, fake_plan, run
from tandem.engine.engine import Engine
from tandem.engine.pace import PrefillPace
from tandem.engine.protocol import GenerateRequest, SamplingSettings, TokenOutput
from tandem.engine.start.parts import EngineParts
from tandem.text.detokenizer import IncrementalDecoder, KnowsOwnTexts
from tandem.text.tokenizer import Tokenizer

LETTERS = "aßé日🙂\ufffd b"


def byte_tokenizer() -> Tokenizer:
    """Byte-level, of 64 tokens: single bytes, parts of characters, whole ones, and tokens that are added."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelt = [alphabet.pre_tokenize_str(letter)[0][0] for letter in LETTERS]
    single = sorted({char for word in spelt for char in word})
    whole = [word for word in spelt if len(word) > 1]
    parts = [word[i : i + 2] for word in whole for i in range(len(word) - 1)]
    pieces = ["<pad>", "<eos>", *dict.fromkeys((*single, *parts, *whole))]
    pieces += [f"x{i}" for i in range(VOCAB - 1 - len(pieces))]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<pad>", "<eos>"])
    inner.add_tokens([tokenizers.AddedToken("two words", special=False)])
    assert inner.get_vocab_size() == VOCAB
    return Tokenizer(inner, eos_ids=(EOS,))


TOKENIZER = byte_tokenizer()


class Plain:
    """The same texts, decoded anew each time."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)


@given(st.lists(st.integers(0, VOCAB + 1)), st.lists(st.integers(0, VOCAB - 1)), st.booleans(), st.booleans())
def test_a_token_that_is_looked_up_adds_what_decoding_says(prompt, answer, skip: bool, shown: bool) -> None:
    assert isinstance(TOKENIZER, KnowsOwnTexts) and not isinstance(Plain(), KnowsOwnTexts)
    ours, plain = (IncrementalDecoder(each, prompt, skip, (0,) if shown else ()) for each in (TOKENIZER, Plain()))
    for token_id in answer:
        assert ours.push(token_id) == plain.push(token_id)
    assert ours.flush() == plain.flush()


def test_only_whole_characters_have_texts_of_their_own() -> None:
    own = TOKENIZER.own_texts(True)
    assert own is not None
    texts = {own[i] for i in range(VOCAB)}
    assert {"a", "ß", "é", "日", "🙂", " ", "two words", ""} <= texts and "\ufffd" not in texts
    for decoder in (None, tokenizers.decoders.Metaspace(), tokenizers.decoders.Fuse()):
        inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
        if decoder is not None:
            inner.decoder = decoder
        assert Tokenizer(inner).own_texts(True) is None


def requests(count: int, seed: int) -> list[GenerateRequest]:
    draw = random.Random(seed)
    made = []
    for number in range(count):
        some = {name: value for name, value in OPTIONS.items() if draw.random() < 0.3}
        prompt = [draw.randrange(2, VOCAB) for _ in range(draw.choice((1, 4, 9, 30)))]
        sampling = SamplingSettings(**{"max_tokens": draw.choice((3, 7, 40)), "seed": number} | some)
        made.append(GenerateRequest(id=f"r{number}", prompt_ids=prompt, sampling=sampling))
    return made


OPTIONS = {
    "temperature": 0.0, "top_p": 0.8, "top_k": 12, "min_p": 0.05, "typical_p": 0.9, "xtc_probability": 0.5,
    "repetition_penalty": 1.2, "presence_penalty": 0.5, "dry_multiplier": 0.8, "logit_bias": {5: 2.0, EOS: 1.0},
    "min_tokens": 3, "stop": ("é", "aa", "日a"), "stop_token_ids": (9, 11), "include_stop": True, "ignore_eos": True,
    "skip_special_tokens": False, "n": 3, "logprobs": 2, "prompt_logprobs": 1, "show_tokens": (0,),
}  # fmt: skip

GOLDEN = {
    ("few pages", False): "8f04d575f53092bf",
    ("few pages", True): "10fbfed7865b375a",
    ("many pages", False): "237e307c637f4c01",
    ("many pages", True): "d63d106a3f976809",
}
"""Digests of all outputs, by the code before it was made cheaper."""


@pytest.mark.parametrize(("pages", "cache"), GOLDEN)
def test_outputs_are_those_of_before(monkeypatch, pages: str, cache: bool) -> None:
    """Few pages: some lose theirs, and go on later."""
    monkeypatch.setattr(PrefillPace, "observe", lambda *_, **__: None)  # chunks do not depend on how long steps take
    plan = fake_plan(
        num_pages=24 if pages == "few pages" else 400, radix_cache=cache, max_running_requests=24, max_step_tokens=64,
        context_length=80,
    )  # fmt: skip
    engine = Engine.from_parts(EngineParts(plan, fake_config(), FakeModel(), TOKENIZER))
    outputs = run(engine, *requests(60, 7))
    assert (engine.stats().preemptions > 0) == (pages == "few pages")
    every = [facts(each) for key in sorted(outputs) for each in outputs[key]]
    digest = hashlib.sha256(repr(every).encode()).hexdigest()[:16]
    assert digest == GOLDEN[pages, cache]


def facts(output: TokenOutput) -> list[object]:
    """All that it says, but for times and the last digits of probabilities."""
    probabilities = [
        (one.token_id, one.logprob and round(one.logprob, 3), [(i, round(p, 3)) for i, p in one.top])
        for one in (*(output.logprobs or ()), *(output.prompt_logprobs or ()))
    ]
    others = msgspec.structs.replace(output, first_token=None, logprobs=None, prompt_logprobs=None)
    return [*msgspec.structs.astuple(others), probabilities]
