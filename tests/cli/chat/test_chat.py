"""`kt chat` in a real terminal (a pty) against a server, and its client by itself."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from chat_terminal import CTRL_C, CTRL_D, kt_chat
from fake_chat_server import fake_chat_server
from tandem.cli.chat import _url
from tandem.cli.chat_client import ChatClient, ChatError, ReasoningText


def test_conversation_with_history_and_commands() -> None:
    with (
        fake_chat_server() as server,
        kt_chat(server.port, "--max-tokens", "9", "--system", "Be brief.") as terminal,
    ):
        terminal.expect("fake-model")
        terminal.expect("you ›")
        terminal.type("hello\r")
        terminal.expect("m2 word1 word2 word3 word4")  # system prompt + question
        terminal.expect("5 tokens")
        terminal.type("again\r")
        terminal.expect("m4 word1")
        terminal.type("/reset\r")
        terminal.expect("forgotten")
        terminal.type("/system Be kind.\r")
        terminal.expect("system prompt: Be kind.")
        terminal.type("third\r")
        terminal.expect("m2 word1")
        terminal.type("/help\r")
        terminal.expect("/reset +forget")
        terminal.type("/nonsense\r")
        terminal.expect("/nonsense is no command")
        terminal.type("/exit\r")
        assert terminal.process.wait(60) == 0
    assert [m["content"] for m in server.bodies[1]["messages"]] == [
        "Be brief.", "hello", "m2 word1 word2 word3 word4", "again"
    ]  # fmt: skip
    assert server.bodies[2]["messages"][0]["content"] == "Be kind."
    assert server.bodies[0]["max_tokens"] == 9
    assert "temperature" not in server.bodies[0]


def test_ctrl_c_stops_only_the_answer() -> None:
    with fake_chat_server(words=10_000, seconds_per_word=0.02) as server, kt_chat(server.port) as terminal:
        terminal.expect("you ›")
        terminal.type("tell me a long story\r")
        terminal.expect("word3")
        terminal.type(CTRL_C)
        terminal.expect("stopped")
        assert server.client_left.wait(60), "the server went on generating"
        server.words, server.seconds_per_word = 3, 0.0
        terminal.expect("you ›")
        terminal.type("go on\r")
        terminal.expect("m3 word1 word2")  # the part that was said is in the history
        terminal.expect("you ›")
        terminal.press(CTRL_C, shows="Ctrl.D or /exit leaves")
        terminal.expect("you ›")
        terminal.type(CTRL_D)
        assert terminal.process.wait(60) == 0


def test_errors_are_shown_and_the_chat_goes_on() -> None:
    with fake_chat_server(fails="400") as server, kt_chat(server.port) as terminal:
        terminal.expect("you ›")
        terminal.type("too much\r")
        terminal.expect("error: the prompt is too long; /reset forgets what was said")
        server.fails = "midway"
        terminal.type("hello\r")
        terminal.expect("m1")  # the refused question was taken back
        terminal.expect("error: the engine died")
        server.fails = ""
        terminal.type("hello\r")
        terminal.expect("m3 word1")


def test_no_server_says_how_to_start_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "chat", "--port", "1"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "no server answers at http://127.0.0.1:1; start one with: kt serve demo" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_loads_its_model_is_waited_for() -> None:
    """ "error: the engine is starting" was all that was said."""
    with fake_chat_server(loading=3) as server, kt_chat(server.port) as terminal:
        terminal.expect("the server is loading its model")
        terminal.expect("you ›")
        terminal.type("hello\r")
        terminal.expect("m1 word1")
        terminal.type("/exit\r")
        assert terminal.process.wait(60) == 0
    assert server.loading < 0


def test_a_server_that_is_gone_while_its_model_is_loaded_is_said() -> None:
    client = ChatClient("http://127.0.0.1:1")
    with pytest.raises(ChatError, match="no server answers"):
        client.not_ready()


def test_piped_input_works_without_a_terminal() -> None:
    with fake_chat_server() as server:
        command = [sys.executable, "-m", "tandem", "chat", "--port", str(server.port)]
        done = subprocess.run(command, input="hello\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "m1 word1 word2 word3 word4" in done.stdout


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_a_word_that_others_use_leaves_too(word: str) -> None:
    with fake_chat_server() as server:
        command = [sys.executable, "-m", "tandem", "chat", "--port", str(server.port)]
        done = subprocess.run(command, input=f"{word}\nhello\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "no command" not in done.stdout and not server.bodies


def test_api_key() -> None:
    with fake_chat_server(api_key="secret") as server:
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(ChatError, match="--api-key"):
            ChatClient(url).model_name()
        assert ChatClient(url, api_key="secret").model_name() == "fake-model"


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_addresses_with_and_without_brackets(host: str) -> None:
    command = [sys.executable, "-m", "tandem", "chat", "--host", host, "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "http://[::1]:1" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("gpu-box", "http://gpu-box:30000"),
        ("gpu-box:8000", "http://gpu-box:8000"),
        ("10.0.0.2:8000", "http://10.0.0.2:8000"),
        ("::1", "http://[::1]:30000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("fe80::1:8000", "http://[fe80::1:8000]:30000"),
        ("https://gpu-box/", "https://gpu-box"),
        ("http://gpu-box:8000/v1/", "http://gpu-box:8000"),
    ],
)
def test_an_address_may_have_its_port(host: str, url: str) -> None:
    assert _url(host, 30000) == url


def test_a_whole_url_is_taken_as_it_is() -> None:
    command = [sys.executable, "-m", "tandem", "chat", "--host", "http://127.0.0.1:1/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "no server answers at http://127.0.0.1:1;" in done.stderr


def test_what_is_no_address_is_named() -> None:
    with pytest.raises(ChatError, match="--host"):
        ChatClient("http://[nonsense]:1")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"data": []}', b'{"data": [7]}'])
def test_another_server_is_named_as_such(body: bytes) -> None:
    client = ChatClient("http://elsewhere")
    client._http = httpx.Client(
        base_url=client.url, transport=httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    )
    with pytest.raises(ChatError, match="elsewhere is not Tandem"):
        client.model_name()


def test_speed_counts_the_servers_tokens() -> None:
    with fake_chat_server(words=4, seconds_per_word=0.01) as server:
        client = ChatClient(f"http://127.0.0.1:{server.port}", temperature=0.5)
        assert "".join(client.ask("hi")) == "m1 word1 word2 word3"
    assert client.speed.tokens == 4
    assert 0 < client.speed.first_token_seconds < client.speed.seconds
    assert client.speed.tokens_per_second > 0
    assert server.bodies[0]["temperature"] == 0.5


def test_reasoning_is_shown_and_not_sent_again() -> None:
    with fake_chat_server(thoughts=2, words=1) as server:
        client = ChatClient(f"http://127.0.0.1:{server.port}")
        pieces = list(client.ask("hi"))
        assert [(str(piece), isinstance(piece, ReasoningText)) for piece in pieces] == [
            ("hm ", True), ("hm ", True), ("m1", False),
        ]  # fmt: skip
        assert client.history[-1] == {"role": "assistant", "content": "m1"}


def test_one_of_several_models_is_named():
    cards = {"a": {"id": "a", "aliases": ["x"]}, "b": {"id": "b", "status": {"value": "loaded"}}}
    for asked, named in ((None, "b"), ("a", "a"), ("x", "x")):
        client = ChatClient("http://127.0.0.1:1", model=asked)
        client._choose(cards)
        assert client._body()["model"] == named
    alone = ChatClient("http://127.0.0.1:1")
    alone._choose({"a": {}})
    assert "model" not in alone._body()
    with pytest.raises(ChatError, match="there are a, b"):
        ChatClient("http://127.0.0.1:1", model="c")._choose(cards)
