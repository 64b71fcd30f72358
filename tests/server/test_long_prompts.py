"""Long prompts are refused or read while everybody else goes on; in-process over ASGI."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers

import echo_engine
import echo_tokenizer
from server_harness import LocalServer, local_server
from server_requests import CHAT, error_of, run, user
from tandem.engine.limits import TokenLimit
from tandem.errors import RequestError
from tandem.server.errors import ApiError
from tandem.server.prompts import reader as prompts
from tandem.server.prompts.reader import PromptReader
from tandem.text.tokenizer import Tokenizer

LONG = "0123456789" * 1_000_000
STALL_SECONDS = 0.1


def byte_tokenizer() -> Tokenizer:
    """The real library; each byte is a token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(inner, chat_template="{{ messages[0].content }}")


class LongestGap:
    """How long the event loop, meanwhile, had no time for anybody. What this process did not compute in, the machine
    did other things in."""

    async def __aenter__(self) -> LongestGap:
        self.seconds = 0.0
        self._task = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.002)  # the last gap counts, too
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            before, used = time.monotonic(), time.process_time()
            await asyncio.sleep(0.001)
            self.seconds = max(self.seconds, min(time.monotonic() - before, time.process_time() - used))


REFUSED = {
    CHAT: {"messages": user(LONG)},
    "/v1/completions": {"prompt": LONG},
    "/generate": {"text": LONG},
    "/generate ids": {"input_ids": [200] * 2_000_000},
    "/v1/completions ids": {"prompt": [200] * 2_000_000},
    "/v1/completions lists of ids": {"prompt": [[200] * 700_000] * 3},
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("real", [True, False], ids=["library", "echo"])
def test_others_do_not_wait_while_ten_megabytes_are_refused(name: str, real: bool, monkeypatch) -> None:
    """The best of three: what a busy host does to one of them is not ours."""
    if real:
        monkeypatch.setattr(echo_tokenizer, "load_tokenizer", lambda _: byte_tokenizer())
    content = json.dumps(REFUSED[name]).encode()
    gaps = []

    async def scenario(server: LocalServer):
        for _ in range(3):
            async with LongestGap() as gap:
                response = await server.client.post(name.split()[0], content=content)
            error = error_of(response, 400)
            assert error["code"] == "context_length_exceeded", error
            gaps.append(gap.seconds)
            if gap.seconds < STALL_SECONDS:
                break
        assert min(gaps) < STALL_SECONDS

    run(scenario)


def test_others_do_not_wait_while_a_megabyte_is_tokenised() -> None:
    """It fits, so every token of it is made."""
    text = LONG[:1_000_000]

    async def scenario() -> None:
        reader, gaps = PromptReader(byte_tokenizer()), []
        reader.limit = TokenLimit(1 << 21, "context_length")
        for _ in range(3):
            async with LongestGap() as gap:
                [ids] = await reader.encode_all([text], False)
            assert len(ids) == len(text)
            gaps.append(gap.seconds)
        assert min(gaps) < STALL_SECONDS

    asyncio.run(scenario())


class SlowTokenizer:
    """Tokenises while `gate` is shut."""

    chat_template = guard = None

    def special_ids_in(self, texts: set[str]) -> tuple[int, ...]:
        return ()

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.texts: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.texts.append(text)
        self.gate.wait(60)
        return [1]

    def fewest_tokens(self, text: str) -> int:
        return 1


def test_a_client_that_leaves_takes_its_prompt_with_it(monkeypatch) -> None:
    async def scenario() -> None:
        tokenizer = SlowTokenizer()
        reader = PromptReader(tokenizer)
        reader._long = ThreadPoolExecutor(1)
        first, second = "a" * 10_000, "b" * 10_000
        running = asyncio.create_task(reader.encode_all([first, "c" * 10_000], True))
        while not tokenizer.texts:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(reader.encode_all([second], True))
        await asyncio.sleep(0.01)
        for task in (waiting, running):
            task.cancel()
        await asyncio.wait([waiting, running])
        assert reader.busy  # one cannot be stopped
        tokenizer.gate.set()
        while reader.busy:
            await asyncio.sleep(0.001)
        assert tokenizer.texts == [first]  # neither its second text nor what waited behind it

    asyncio.run(scenario())


def test_too_many_characters_that_wait_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(prompts, "MAX_WAITING_CHARS", 25_000)

    async def scenario() -> None:
        tokenizer = SlowTokenizer()
        reader = PromptReader(tokenizer)
        tasks = [asyncio.create_task(reader.encode_all(["a" * 10_000], True)) for _ in range(3)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        [refused] = done
        error = refused.exception()
        assert isinstance(error, ApiError) and error.status == 429
        tokenizer.gate.set()
        await asyncio.wait(tasks)
        assert not reader.busy

    asyncio.run(scenario())


def test_a_request_is_dropped_when_its_client_leaves_before_the_prompt_is_read(monkeypatch) -> None:
    tokenizer = SlowTokenizer()
    tokenizer.decode = lambda *_: ""
    monkeypatch.setattr(echo_tokenizer, "load_tokenizer", lambda _: tokenizer)

    async def go() -> None:
        async with local_server(echo_engine.build()) as server:
            messages = [{"type": "http.request", "body": json.dumps({"text": "a" * 10_000}).encode()}]
            left = asyncio.Event()

            async def receive():
                if messages:
                    return messages.pop()
                await left.wait()
                return {"type": "http.disconnect"}

            sent = []
            scope = {
                "type": "http", "method": "POST", "path": "/generate", "raw_path": b"/generate", "headers": [],
                "query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("tandem", 80),
            }  # fmt: skip

            async def send(message):
                sent.append(message)

            request = asyncio.create_task(server.app(scope, receive, send))
            while not tokenizer.texts:
                await asyncio.sleep(0.001)
            left.set()
            await asyncio.wait_for(request, 60)
            assert sent == [] and server.state.http_active == 0
            tokenizer.gate.set()

    asyncio.run(go())


def test_an_invalid_text_is_the_client_s_fault() -> None:
    async def scenario() -> None:
        with pytest.raises(RequestError, match="Unicode"):
            await PromptReader(byte_tokenizer()).encode_all(["\ud800" * 10_000], True)

    asyncio.run(scenario())
