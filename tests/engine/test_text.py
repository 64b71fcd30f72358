"""Ids to text: partial characters, spaces, stop strings across token borders; tokenizer and chat templates."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from fake_model import EOS, fake_engine, greedy_reference, request, run, text, token_ids
from tandem.architectures.load import load_config
from tandem.engine.protocol import SamplingSettings, TokenLogprob
from tandem.errors import CheckpointError, ConfigError, RequestError
from tandem.server.logprobs import CompletionOffsets
from tandem.text.chat_template import ChatTemplate
from tandem.text.detokenizer import IncrementalDecoder, TextStream
from tandem.text.stop_strings import StopMatcher
from tandem.text.tokenizer import Tokenizer


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level: each token is one byte, so every character outside ASCII arrives in parts."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return inner


def word_tokenizer() -> tokenizers.Tokenizer:
    """SentencePiece style: "▁" marks spaces, and decoding strips the one at the beginning of the text."""
    vocab = {"<unk>": 0, "▁Hello": 1, "▁big": 2, "▁world": 3, "s": 4, "▁": 5}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    inner.decoder = tokenizers.decoders.Metaspace()
    return inner


@given(st.text(max_size=40))
def test_characters_never_arrive_in_parts(content) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    stream = IncrementalDecoder(tokenizer, tokenizer.encode("prompt: "), True)
    pieces = [stream.push(i) for i in tokenizer.encode(content)]
    assert "".join(pieces) + stream.flush() == content
    if "\ufffd" not in content:
        assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_never_become_a_character_do_not_wait_for_ever() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    stream = IncrementalDecoder(tokenizer, [], True)
    [bad] = [i for i in range(256) if tokenizer.token_bytes(i) == b"\xff"]
    pieces = [stream.push(bad) for _ in range(30)]
    assert any(pieces[:12])
    assert set("".join(pieces)) == {"\ufffd"}


def test_spaces_between_words() -> None:
    tokenizer = Tokenizer(word_tokenizer())
    stream = IncrementalDecoder(tokenizer, [1], True)
    assert [stream.push(i) for i in (2, 3, 4)] == [" big", " world", "s"]
    assert IncrementalDecoder(tokenizer, [], True).push(1) == "Hello"


def test_a_token_s_text_is_what_it_adds_to_a_text() -> None:
    """Also where decoding strips the space at the beginning: Llama's and Mixtral's vocabularies."""
    tokenizer = Tokenizer(word_tokenizer())
    assert [tokenizer.token_text(i) for i in (1, 2, 4, 5)] == [" Hello", " big", "s", " "]
    assert tokenizer.token_bytes(2) == b" big"


def test_offsets_of_an_echoed_prompt() -> None:
    """The begin token and the first space are none of the prompt's text."""
    inner = word_tokenizer()
    inner.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(inner)
    offsets = CompletionOffsets(tokenizer, "Hello  big")
    tokens = [TokenLogprob(i, -1.0) for i in (tokenizer.encode("<s>")[0], 1, 5, 2, 3, 4)]
    assert offsets.build(tokens, with_top=False).text_offset == [0, 0, 5, 6, 10, 16]


def test_a_rule_that_gives_up_on_a_text_costs_that_text() -> None:
    """The library panics, which is no Exception."""
    inner = byte_tokenizer()
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), "isolated")
    tokenizer = Tokenizer(inner)
    with pytest.raises(RequestError, match="cannot read this text"):
        tokenizer.encode("x" * 30)
    with pytest.raises(RequestError, match="cannot read this text"):
        tokenizer.encode_guarded("x" * 30, "\ufdd0")
    assert tokenizer.encode("a")


def test_a_rule_that_gives_up_on_tokens_costs_their_answer() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x" * 30: 0, "a": 1}, unk_token="a"))
    inner.decoder = tokenizers.decoders.Replace(tokenizers.Regex("(x+x+)+y"), "z")
    tokenizer = Tokenizer(inner)
    for ids in ([0], [0] * 2000):
        with pytest.raises(RequestError, match="cannot write these tokens"):
            tokenizer.decode(ids)
    assert tokenizer.decode([1]) == "a"


UNKNOWN = {
    "Unigram": tokenizers.models.Unigram([("a", 0.0)]),
    "WordLevel": tokenizers.models.WordLevel({"a": 0}, unk_token="<unk>"),
    "WordPiece": tokenizers.models.WordPiece({"a": 0}, unk_token="<unk>"),
    "BPE": tokenizers.models.BPE({"a": 0}, [], unk_token="<unk>"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_vocabulary_without_its_unknown_token_costs_the_text_that_needs_it(kind: str) -> None:
    """The library raises bare Exceptions."""
    tokenizer = Tokenizer(tokenizers.Tokenizer(UNKNOWN[kind]))
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_guarded(text, "\ufdd0"), tokenizer.fewest_tokens):
        with contextlib.suppress(RequestError):
            encode("zz")
    with pytest.raises(RequestError, match="cannot read this text"):
        tokenizer.encode("zz")
    assert tokenizer.encode("a") == [0]


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_tokenizer_that_cannot_read_a_letter_is_refused_at_the_start(kind: str, tmp_path) -> None:
    inner = tokenizers.Tokenizer.from_str(
        tokenizers.Tokenizer(UNKNOWN[kind]).to_str().replace('"a"', '"b"')
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="cannot read a text.*unknown token must be in its vocabulary"):
        Tokenizer.load(tmp_path)


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(300 << 20)


def put_deep(path: Path) -> None:
    path.write_bytes(b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}")


@pytest.mark.parametrize("put", [put_pipe, put_endless, put_large, put_deep])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_whatever_lies_under_a_file_s_name_is_noticed(put, name: str, tmp_path: Path) -> None:
    """At once, and without reading all of it."""
    for present in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (tmp_path / present).write_text("{}")
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).unlink()
    put(tmp_path / name)
    with pytest.raises((CheckpointError, ConfigError)):
        Tokenizer.load(tmp_path)
        load_config(tmp_path)  # without a model type: it says so where all else is well


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", b"{bad", "tokenizer.json is no tokenizer"),
        ("tokenizer.json", b"{}", "tokenizer.json is no tokenizer"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "chat template is not valid Jinja"),
        ("tokenizer_config.json", b"[1", "tokenizer_config.json is not valid JSON"),
    ],
)
def test_damaged_files_are_named(name, content, says, tmp_path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "templates", [["x"], [{"name": "default"}], [{"template": "x"}], [{"name": "tool_use", "template": "x"}], {}]
)
def test_templates_without_a_default_are_none(templates, tmp_path, caplog) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(RequestError, match="no chat template.*--chat-template FILE"):
        Tokenizer.load(tmp_path).apply_chat_template([])
    assert ("none of the chat templates (tool_use)" in caplog.text) == ("tool_use" in str(templates))


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
BY_NAME = {"default": "plain {{ bos_token }}", "tool_use": "tools {{ tools | length }}", "rag": "{% if %}"}


@pytest.mark.parametrize("kind", ["list", "dict", "files", "files beside a list"])
def test_the_template_for_tools_is_used_for_tools(kind: str, tmp_path) -> None:
    """However it is stored; what Transformers takes, too."""
    listed = [{"name": name, "template": text} for name, text in BY_NAME.items()]
    config = {"list": listed, "dict": BY_NAME, "files": None, "files beside a list": listed}[kind]
    write_tokenizer(tmp_path, bos_token="a", chat_template=config)
    if "files" in kind:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text(BY_NAME["default"])
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(BY_NAME["tool_use"])
    tokenizer = Tokenizer.load(tmp_path)
    auto = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for tools, wanted in ((None, "plain a"), (TOOLS, "tools 1")):
        said = [{"role": "user", "content": "hi"}]
        assert tokenizer.apply_chat_template(said, tools=tools) == wanted
        assert auto.apply_chat_template(said, tools=tools, tokenize=False) == wanted
    tokenizer.use_chat_template("mine")
    assert tokenizer.apply_chat_template([], tools=TOOLS) == "mine"


def test_a_damaged_template_for_tools_is_noticed(tmp_path) -> None:
    write_tokenizer(tmp_path, chat_template=BY_NAME | {"tool_use": "{% if %}"})
    with pytest.raises(CheckpointError, match="not valid Jinja"):
        Tokenizer.load(tmp_path)


def test_whatever_a_template_does_is_the_request_s_error() -> None:
    with pytest.raises(RequestError, match="division"):
        ChatTemplate("{{ 1 // messages|length }}").render([])


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    end = tokenizer.encode("<|end|>")[0]
    for skip, shown in ((True, ""), (False, "<|end|>")):
        stream = TextStream(tokenizer, [], SamplingSettings(skip_special_tokens=skip))
        assert stream.push(end).text == shown


def test_skipped_tokens_cost_no_more_each_and_do_not_eat_the_next_space() -> None:
    inner = word_tokenizer()
    inner.add_special_tokens(["<end>"])
    tokenizer, decoded = Tokenizer(inner), []

    class Counting:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            decoded.append(len(ids))
            return tokenizer.decode(ids, skip_special_tokens)

    stream = IncrementalDecoder(Counting(), [1], True)
    end = tokenizer.encode("<end>")[0]
    assert "".join(stream.push(end) for _ in range(100)) == ""
    assert stream.push(2) == " big"
    assert max(decoded) <= 2 * 9  # most tokens that wait for the rest of a character, and as many before them


def test_a_token_s_text_is_decoded_once(monkeypatch) -> None:
    tokenizer, calls = Tokenizer(byte_tokenizer()), []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda *args, **kw: calls.append(args) or decode(*args, **kw))
    assert [tokenizer.token_text(65), tokenizer.token_text(65)] == [decode([65])] * 2
    assert tokenizer.token_bytes(65) == decode([65]).encode() and len(calls) == 1


def naive_stop(content: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that ends first; of those ending together, the longest."""
    for end in range(1, len(content) + 1):
        found = [s for s in stops if content[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return content[: end - len(longest)], longest
    return content, None


@given(
    st.lists(st.text("abc", max_size=4), max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5, unique=True),
)
def test_stop_strings_against_a_search(pieces, stops) -> None:
    matcher, final, found, read = StopMatcher(tuple(stops)), "", None, ""
    for piece in pieces:
        read += piece
        added, found = matcher.push(piece)
        final += added
        if found:
            break
        held = read[len(final) :]
        assert held == "" or any(s.startswith(held) for s in stops)  # exactly what may still become one
    if not found:
        final += matcher.flush()
    assert (final, found) == naive_stop("".join(pieces), stops)


def test_many_stop_strings_cost_no_more_per_character() -> None:
    stops = tuple(f"<stop {i}>" for i in range(250))
    matcher = StopMatcher(stops)
    assert matcher.push("text <stop 24")[0] == "text "
    assert matcher.push("9> more") == ("", "<stop 249>")


def test_engine_stops_at_a_string() -> None:
    prompt = [2, 3, 4]
    whole = greedy_reference(prompt, 30)
    letters = "".join(chr(64 + i) for i in whole if i != EOS)
    stop = letters[3:6]
    got = run(fake_engine(), request("a", prompt, max_tokens=30, stop=(stop, "never")))["a", 0]
    assert text(got) == letters[:3] and got[-1].stop_match == stop and got[-1].finish_reason == "stop"
    assert token_ids(got) == whole[:6]
    kept = run(fake_engine(), request("a", prompt, max_tokens=30, stop=(stop,), include_stop=True))["a", 0]
    assert text(kept) == letters[:6]
    late = run(fake_engine(), request("a", prompt, max_tokens=12, stop=(letters[1],), min_tokens=4))["a", 0]
    assert text(late).startswith(letters[:4])


def test_engine_stops_at_a_token_and_at_length() -> None:
    prompt = [2, 3, 4]
    whole = greedy_reference(prompt, 30)
    got = run(fake_engine(), request("a", prompt, max_tokens=30, stop_token_ids=(whole[4],)))["a", 0]
    assert token_ids(got) == whole[:5] and got[-1].stop_match == whole[4]
    assert text(got) == "".join(chr(64 + i) for i in whole[:4])
    short = run(fake_engine(), request("a", prompt, max_tokens=3))["a", 0]
    assert short[-1].finish_reason == "length" and short[-1].completion_tokens == 3
    held = run(fake_engine(), request("a", prompt, max_tokens=3, stop=(text(short)[2] + "?",)))["a", 0]
    assert text(held) == text(short)  # what was held back comes when the length ends the answer


def test_a_truncated_character_is_shown_at_the_end() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    stream = TextStream(tokenizer, [], SamplingSettings(stop=("zz",)))
    first = tokenizer.encode("é")[0]
    assert stream.push(first).text == ""
    assert stream.finish().text == "\ufffd"


# --- tokenizer files and chat templates


def write_tokenizer(directory, **settings) -> None:
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def test_tokenizer_loads_from_a_directory(tmp_path) -> None:
    write_tokenizer(
        tmp_path, eos_token={"content": "<|end|>"}, bos_token="a", chat_template="{{ bos_token }}hi"
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 256]}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == (7, 256) and tokenizer.token_text(256) == "<|end|>"
    assert tokenizer.bos_id == tokenizer.encode("a")[0]
    assert tokenizer.apply_chat_template([]) == "ahi"
    assert tokenizer.decode(tokenizer.encode("grüße 🎉")) == "grüße 🎉"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("🎉"))) == "🎉".encode()


def test_what_is_missing_is_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(byte_tokenizer()).apply_chat_template([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="Unicode"):
        Tokenizer(byte_tokenizer()).encode("\ud800")


TEMPLATES = [
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n<|u|>{{ m.content }}\n{% else %}\n<|a|>"
    "{% generation %}{{ m.content }}{% endgeneration %}\n{% endif %}\n{% endfor %}\n"
    "{% if add_generation_prompt %}<|a|>{% endif %}",
    "{% set ns = namespace(last=none) %}{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{% set ns.last = m.content | trim %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}{{ ns.last }}",
    "{{ tools | tojson if tools else 'no tools' }}{{ documents is none }}{{ messages[0]['content'][::-1] | upper }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates_render_as_in_transformers(template) -> None:
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    messages = [
        {"role": "user", "content": " <b>Grüße</b> & 'quotes' \n"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "more"},
    ]
    [expected], _ = render(conversations=[messages], chat_template=template, add_generation_prompt=True)
    tokenizer = Tokenizer(byte_tokenizer(), chat_template=template)
    assert tokenizer.apply_chat_template(messages) == expected


def test_template_complaints_are_request_errors_and_the_sandbox_holds() -> None:
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        refusing.render([])
    for attack in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.mro() }}",
    ):
        with pytest.raises(RequestError):
            ChatTemplate(attack).render([])
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% if %}")
    assert len(ChatTemplate("{{ strftime_now('%Y') }}").render([])) == 4
