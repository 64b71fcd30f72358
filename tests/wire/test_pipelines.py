"""Several requests on one connection, clients that close their side, and HTTP/1.0; over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from quiet_clock import PATIENCE
from server_harness import LocalServer, listening_server
from server_requests import pages_are_back
from tandem.server.guard import answering, half_closed, protocol

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
HEALTH = b"GET /health HTTP/1.1\r\nHost: tandem\r\n\r\n"


def post(tokens: int, version: str = "1.1", **fields: Any) -> bytes:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": [97], "sampling_params": sampling} | fields).encode()
    head = f"POST /generate HTTP/{version}\r\nHost: tandem\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Callable[..., None]:
    """On each kind of event loop. Nothing that is sent may be an error of ours."""

    def go(scenario: Callable[[LocalServer], Coroutine[Any, Any, None]], **flags: Any) -> None:
        errors: list[dict[str, Any]] = []

        async def served() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
            async with listening_server(**flags) as server:
                await asyncio.wait_for(scenario(server), PATIENCE)
                await asyncio.wait_for(pages_are_back(server), PATIENCE)

        with caplog.at_level(logging.WARNING), asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(served())
        assert not errors and "Traceback" not in caplog.text
        assert len(caplog.records) <= 1, caplog.text

    return go


async def connected(server: LocalServer, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if (path := server.state.config.uds) is not None:
        reader, writer = await asyncio.open_unix_connection(path)
    else:
        port = int(str(server.client.base_url).rstrip("/").rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def exchanged(server: LocalServer, data: bytes, half_close: bool = False) -> bytes:
    """All that comes back until the server closes."""
    reader, writer = await connected(server, data)
    if half_close:
        writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()


def statuses(data: bytes) -> list[int]:
    return [int(part.split()[0]) for part in data.split(b"HTTP/1.1 ")[1:]]


REFUSED = {
    "garbage": (b"\x00\x01garbage\r\n\r\n", 400),
    "a head without end": (b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 200_000, 431),
    "an address": (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 414),
    "a body": (b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
}


@pytest.mark.parametrize("earlier", [1, 3])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_comes_behind_the_answers_to_earlier_requests(run, kind: str, earlier: int):
    data, status = REFUSED[kind]

    async def scenario(server: LocalServer) -> None:
        said = await exchanged(server, post(300) * earlier + data)
        assert statuses(said) == [200] * earlier + [status]
        assert said.count(b'"completion_tokens":300') == earlier

    run(scenario)


def test_a_refusal_does_not_cut_a_stream(run):
    async def scenario(server: LocalServer) -> None:
        reader, writer = await connected(server, post(300, stream=True))
        begin = await reader.readuntil(b"data: ")
        writer.write(b"\x00garbage\r\n\r\n")
        said = begin + await reader.read()
        assert statuses(said) == [200, 400] and b"[DONE]" in said
        writer.close()

    run(scenario)


def test_a_head_is_counted_from_where_it_begins(run):
    """Small requests are not the head of the next one, whose rest comes later."""

    async def scenario(server: LocalServer) -> None:
        reader, writer = await connected(server, HEALTH * 3000 + HEALTH[:7])
        begin = await reader.readuntil(b'{"status":"ok"}')  # all was read by then
        writer.write(HEALTH[7:-2] + b"Connection: close\r\n\r\n")
        assert statuses(begin + await reader.read()) == [200] * 3001
        writer.close()

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_side_gets_its_answers(run, stream: bool):
    async def scenario(server: LocalServer) -> None:
        said = await exchanged(server, post(200, stream=stream) * 2 + HEALTH, half_close=True)
        assert [status for status in statuses(said) if status != 102] == [200] * 3
        assert said.count(b'"finish_reason":{"type":"length","length":200}') == 2
        assert said.endswith(b'{"status":"ok"}')

    run(scenario)


@pytest.mark.parametrize("soon", [True, False])
def test_a_client_that_closes_its_side_when_its_answer_has_begun(run, monkeypatch, soon: bool):
    """A short answer begins before the end behind its request is read; later, the end means that the client left."""
    monkeypatch.setattr(answering, "EOF_SECONDS", PATIENCE if soon else -1.0)

    async def scenario(server: LocalServer) -> None:
        reader, writer = await connected(server, post(500 if soon else 2000, stream=True))
        begin = await reader.readuntil(b"data: ")
        writer.write_eof()
        said = begin + await reader.read()
        assert (b"[DONE]" in said) == soon
        writer.close()

    run(scenario)


def test_one_that_closes_its_side_and_leaves_is_found_by_its_answer(run, monkeypatch):
    monkeypatch.setattr(answering, "EOF_SECONDS", PATIENCE)

    async def scenario(server: LocalServer) -> None:
        reader, writer = await connected(server, post(4000, stream=True))
        await reader.readuntil(b"data: ")
        writer.close()
        while server.state.client.open_answers:
            await asyncio.sleep(0.005)
        assert 'finish_reason="abort"} 1.0' in (await server.client.get("/metrics")).text

    run(scenario)


def test_an_answer_that_stands_still_is_not_worked_on_for_one_that_left(run, monkeypatch):
    """Nothing is written that could find out: it begins, and then waits for a step that takes long."""
    monkeypatch.setattr(answering, "EOF_SECONDS", PATIENCE)
    monkeypatch.setattr(half_closed, "QUIET_SECONDS", 0.2)

    async def scenario(server: LocalServer) -> None:
        reader, writer = await connected(server, post(4000, stream=True))
        await reader.readuntil(b"data: ")
        with monkeypatch.context() as halted:
            halted.setattr(server.state.client, "deliver", lambda message: None)
            writer.close()
            while server.state.client.open_answers:
                await asyncio.sleep(0.005)

    run(scenario)


@pytest.mark.parametrize("begun", [True, False])
def test_a_unix_socket_tells_a_client_that_waits_from_one_that_left(run, monkeypatch, tmp_path: Path, begun: bool):
    """It knows no TCP_INFO. What a client has not read yet says nothing of it: it may come to that later."""
    monkeypatch.setattr(answering, "EOF_SECONDS", PATIENCE)
    monkeypatch.setattr(half_closed, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(half_closed, "QUIET_SECONDS", 0.05)

    async def scenario(server: LocalServer) -> None:
        for leaves in (False, True):
            reader, writer = await connected(server, post(4000 if leaves else 1000, stream=begun))
            if begun:
                await reader.readuntil(b"data: ")
            while not server.state.client.open_answers:
                await asyncio.sleep(0.005)
            writer.write_eof()
            if leaves:
                writer.close()
            else:
                assert b'"length":1000' in await reader.read()
            while server.state.client.open_answers:
                await asyncio.sleep(0.005)
            writer.close()
        assert 'finish_reason="abort"} 1.0' in (await server.client.get("/metrics")).text

    run(scenario, uds=str(tmp_path / "socket"))


def test_a_client_that_waits_long_is_told_that_its_request_runs(run):
    """What HTTP/1.1's clients skip. Nobody could tell otherwise whether it is still there."""

    async def scenario(server: LocalServer) -> None:
        said = statuses(await exchanged(server, post(3000), half_close=True))
        assert said[-1] == 200 and set(said[:-1]) <= {102}

    run(scenario)


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("abruptly", [False, True])
def test_a_client_that_leaves_is_not_worked_for(run, abruptly: bool, requests: int):
    """Also where a later request waits behind the one that runs."""

    async def scenario(server: LocalServer) -> None:
        _, writer = await connected(server, post(4000) * requests)
        while server.state.client.open_answers != 1:
            await asyncio.sleep(0.005)
        if abruptly:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        writer.close()
        while server.state.client.open_answers:
            await asyncio.sleep(0.005)
        text = (await server.client.get("/metrics")).text
        assert 'tandem_answers_total{finish_reason="abort"} 1.0' in text

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_old_http_gets_no_chunks(run, stream: bool):
    async def scenario(server: LocalServer) -> None:
        said = await exchanged(server, post(20, "1.0", stream=stream))
        head, _, body = said.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower() and head.lower().count(b"connection: close") == 1
        if stream:
            events = [line for line in body.split(b"\n\n") if line]
            assert events[-1] == b"data: [DONE]" and all(line.startswith(b"data: ") for line in events)
        else:
            assert json.loads(body)["meta_info"]["completion_tokens"] == 20
        again = await exchanged(server, b"HEAD /health HTTP/1.0\r\n\r\n")
        assert again.startswith(b"HTTP/1.1 200") and again.endswith(b"\r\n\r\n")

    run(scenario)


def test_a_request_that_is_refused_by_its_body_has_no_second_answer(run, monkeypatch):
    monkeypatch.setattr(protocol, "BODY_SECONDS", 0.1)

    async def scenario(server: LocalServer) -> None:
        assert statuses(await exchanged(server, post(5) + post(5)[:-3])) == [200, 408]
        assert statuses(await exchanged(server, post(5)[:-3])) == [408]

    run(scenario)
