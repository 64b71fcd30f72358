"""Pictures in `tandem.LLM.chat`, and in `kt chat`."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from pictures import png
from seeing_model import save_chatting
from seeing_server import url
from tandem import LLM, SamplingParams
from tandem.cli.chat import ChatSession
from tandem.cli.chat_client import ChatClient, ChatError
from tandem.errors import RequestError

RED = png(40, 24, 1)
FLAGS = {"dtype": "float32", "kt_cpuinfer": 2, "device": "cpu", "max_total_tokens": 2048}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeing") / "qwen3_vl_moe"
    save_chatting(path)
    return path


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    llm = LLM(str(path), **FLAGS)
    yield llm
    llm.engine.close()


def asked(given: object, kind: str = "image", key: str = "image") -> list[dict[str, object]]:
    content = [{"type": "text", "text": "See "}, {"type": kind, key: given}, {"type": "text", "text": "?"}]
    return [{"role": "user", "content": content}]


def test_pictures_of_any_kind_are_the_same(llm, tmp_path):
    (tmp_path / "a.png").write_bytes(RED)
    kinds = (
        asked(RED), asked(str(tmp_path / "a.png")), asked(tmp_path / "a.png"), asked(url(RED)),
        asked(Image.open(io.BytesIO(RED))), asked({"url": url(RED)}, "image_url", "image_url"),
    )  # fmt: skip
    first, *others = llm.chat(list(kinds), GREEDY, progress=False)
    assert len(first.prompt_ids) > len("<|turn|>user:See ?<|done|><|turn|>assistant:") + 8
    assert all((one.prompt_ids, one.token_ids) == (first.prompt_ids, first.token_ids) for one in others)
    [text] = llm.chat([{"role": "user", "content": "See ?"}], GREEDY, progress=False)
    assert text.token_ids != first.token_ids or text.prompt_ids != first.prompt_ids
    [other] = llm.chat(asked(png(40, 24, 2)), GREEDY, progress=False)
    assert other.prompt_ids == first.prompt_ids and other.cached_tokens < len("<|turn|>user:See ") + 2


def test_a_stream(llm):
    pieces = list(llm.chat(asked(RED), GREEDY, stream=True))
    assert sum(len(piece.token_ids) for piece in pieces) == 4


def test_what_is_no_picture_is_named(llm, tmp_path):
    for given, said in (
        (b"no", "of no format"), (str(tmp_path / "none.png"), "cannot be read"), (7, "a path, bytes or"),
        ("https://example.org/a.png", "a path, bytes or"), ("data:image/png;base64,!", "no base64"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=r"messages\[0\].content\[1\]: ") as caught:
            llm.chat(asked(given), GREEDY, progress=False)
        assert said in str(caught.value)


def test_a_model_that_is_blind_says_why(path):
    llm = LLM(str(path), **FLAGS, disable_vision=True)
    with pytest.raises(RequestError, match="images are not read: --disable-vision was given"):
        llm.chat(asked(RED), GREEDY, progress=False)
    llm.engine.close()


def test_kt_chat_shows_pictures_with_the_next_message(tmp_path):
    client = ChatClient("http://127.0.0.1:1")
    (tmp_path / "a.jpg").write_bytes(RED)
    assert client.attach(str(tmp_path / "a.jpg")) == 1
    shown, text = client._content("What is this?")
    assert shown == {"type": "image_url", "image_url": {"url": url(RED, "jpeg")}}
    assert text == {"type": "text", "text": "What is this?"}
    assert client._content("And now?") == "And now?"
    client.attach(str(tmp_path / "a.jpg"))
    client.reset()
    assert client._content("Hi") == "Hi"
    for path in ("", str(tmp_path / "none.png"), str(tmp_path)):
        with pytest.raises(ChatError, match="cannot be read"):
            client.attach(path)


def test_the_command_takes_a_path_as_terminals_write_it(tmp_path):
    (tmp_path / "a picture.png").write_bytes(RED)
    client, console = ChatClient("http://127.0.0.1:1"), Console(file=io.StringIO())
    conversation = ChatSession(client, console)
    for path in (f"{tmp_path}/a picture.png", f"'{tmp_path}/a picture.png'", f"{tmp_path}/a\\ picture.png"):
        assert conversation._command(f"/image {path}")
    assert client.images == [url(RED)] * 3
    assert conversation._command("/image none.png") and "none.png cannot be read" in console.file.getvalue()
