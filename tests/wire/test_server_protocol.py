"""What clients may send, how fast, and how slowly they may read; over real sockets, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import echo_engine
from quiet_clock import PATIENCE
from server_harness import LocalServer, listening_server, local_state
from server_requests import error_of, pages_are_back
from tandem.engine.protocol import GenerateRequest, SamplingSettings, TokenOutput
from tandem.errors import TandemError
from tandem.server import request_stream
from tandem.server.guard import answering, bodies, protocol
from tandem.server.limits import MAX_BODY_BYTES

LONG = {"input_ids": [97], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}, "stream": True}
HEAD = b"POST /generate HTTP/1.1\r\nHost: tandem\r\n"


def run(scenario: Callable[[LocalServer], Coroutine[Any, Any, None]], **flags: Any) -> None:
    """Nothing that is sent may be an error of ours."""
    errors: list[dict[str, Any]] = []

    async def go() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with listening_server(**flags) as server:
            await asyncio.wait_for(scenario(server), PATIENCE)

    asyncio.run(go())
    assert not errors


class Connection:
    """Raw bytes to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, server: LocalServer, first: bytes = b"") -> Connection:
        """first: here before the server sees the connection, so in time for any limit."""
        port = int(str(server.client.base_url).rstrip("/").rpartition(":")[2])
        sock = socket.create_connection(("127.0.0.1", port))  # by the system, whatever the event loop does
        sock.sendall(first)
        sock.setblocking(False)
        return cls(*await asyncio.open_connection(sock=sock))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def answer(self, seconds: float = PATIENCE) -> tuple[int, dict]:
        """Until the server closes: status, and the error of the body."""
        status, body = await self.whole_answer(seconds)
        return status, body["error"]

    async def next_answer(self) -> dict:
        """Body of a kept connection's next answer."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE)
        assert head.startswith(b"HTTP/1.1 200 "), head
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        return json.loads(await asyncio.wait_for(self.reader.readexactly(length), PATIENCE))

    async def whole_answer(self, seconds: float = PATIENCE) -> tuple[int, dict]:
        data = await asyncio.wait_for(self.reader.read(), seconds)
        head, _, body = data.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)


def test_header_lines_have_a_limit_before_the_key_is_looked_at(monkeypatch) -> None:
    monkeypatch.setattr(answering, "LINGER_SECONDS", PATIENCE)  # sending a megabyte may take long

    async def scenario(server: LocalServer) -> None:
        for lines in (b"x: y\r\n" * 200, b"x: " + b"y" * 100_000, (b"x: " + b"y" * 1000 + b"\r\n") * 1000):
            connection = await Connection.to(server)
            await connection.send(HEAD + lines)
            status, error = await connection.answer()
            assert (status, error["code"]) == (431, "headers_too_large")
        assert server.state.http_active == 0
        headers = {f"x-{i}": "y" * 400 for i in range(100)} | {"authorization": "Bearer right"}
        assert (await server.client.get("/get_model_info", headers=headers)).status_code == 200

    run(scenario, api_key="right")


def test_one_header_line_that_never_ends_is_not_kept(monkeypatch) -> None:
    monkeypatch.setattr(answering, "LINGER_SECONDS", PATIENCE)  # sending eight megabytes may take long

    async def scenario(server: LocalServer) -> None:
        connection = await Connection.to(server)
        await connection.send(HEAD + b"x: ")
        for _ in range(8):
            await connection.send(b"y" * (1 << 20))
        assert (await connection.answer())[0] == 431

    run(scenario)


def test_trailers_after_a_body_have_the_same_limit() -> None:
    async def scenario(server: LocalServer) -> None:
        connection = await Connection.to(server)
        await connection.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n" + b"a: b\r\n" * 200)
        assert (await connection.answer())[0] == 431

    run(scenario)


def test_an_address_has_a_limit() -> None:
    async def scenario(server: LocalServer) -> None:
        error = error_of(await server.client.get("/health?" + "x" * 20_000), 414)
        assert error["code"] == "url_too_long"
        assert (await server.client.get("/health?" + "x" * 8_000)).status_code == 200

    run(scenario)


FORMS = {"/v1/messages": {"type", "error", "request_id"}, "/api/chat": {"error"}, "/v1/responses": {"error"}}


@pytest.mark.parametrize("path", FORMS)
def test_every_refusal_has_its_dialects_form(path: str, monkeypatch) -> None:
    """Whether the route, the gate or the protocol refuses."""
    key = {"authorization": "Bearer right"}

    def check(body: dict, what: int) -> None:
        assert set(body) == FORMS[path], what
        assert isinstance(body["error"], str) == (path == "/api/chat"), what
        assert ("code" in body["error"]) == (path == "/v1/responses"), what
        if path == "/v1/messages":
            assert body["type"] == "error" and body["error"]["type"] == KINDS[what]

    async def scenario(server: LocalServer) -> None:
        post, large = server.client.post, b" " * (MAX_BODY_BYTES + 1)
        answers = {
            401: await post(path, json={}),
            403: await post(path, json={}, headers=key | {"origin": "https://x.example", "host": "evil"}),
            400: await post(path, content=b"{", headers=key),
            404: await post(path + "/nothing/here", json={}, headers=key),
            405: await server.client.put(path, json={}, headers=key),
            413: await post(path, content=large, headers=key),
            414: await post(f"{path}?{'x' * 20_000}", json={}, headers=key),
            431: await post(path, json={}, headers=key | {"x-long": "x" * 70_000}),
        }
        for status, answer in answers.items():
            assert answer.status_code == status, answer.text
            check(answer.json(), status)
        monkeypatch.setattr(protocol, "BODY_SECONDS", 0.2)  # the large body above may take longer
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nx-api-key: right\r\nContent-Length: 9\r\n\r\n{{"
        connection = await Connection.to(server, head.encode())
        status, body = await connection.whole_answer()
        assert status == 408
        check(body, status)

    run(scenario, api_key="right", allowed_hosts=("127.0.0.1",))


KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "request_too_large", 414: "request_too_large",
    431: "request_too_large",
}  # fmt: skip


def test_what_is_not_http_gets_an_error_of_the_usual_form() -> None:
    async def scenario(server: LocalServer) -> None:
        connection = await Connection.to(server)
        await connection.send(b"\x00\xff\n\n")
        status, error = await connection.answer()
        assert (status, error["code"]) == (400, "invalid_http")

    run(scenario)


@pytest.mark.parametrize("sent", [HEAD, HEAD + b"Content-Length: 100\r\n\r\n{", HEAD + b"x"])
def test_a_request_that_never_ends_is_cut(sent: bytes, monkeypatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(protocol, "BODY_SECONDS", 0.2)

    async def scenario(server: LocalServer) -> None:
        connection = await Connection.to(server, sent)
        status, error = await connection.answer()
        assert (status, error["code"]) == (408, "request_too_slow")
        while server.state.http_active:
            await asyncio.sleep(0.005)

    run(scenario)


def test_a_connection_that_is_never_used_is_closed(monkeypatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)

    async def scenario(server: LocalServer) -> None:
        connection = await Connection.to(server)
        assert await asyncio.wait_for(connection.reader.read(), PATIENCE) == b""
        monkeypatch.setattr(protocol, "HEAD_SECONDS", PATIENCE)
        quick = [await server.client.get("/health") for _ in range(3)]  # one connection, kept
        assert [r.status_code for r in quick] == [200] * 3

    run(scenario)


def test_a_long_answer_takes_its_time(monkeypatch) -> None:
    """The limits are about requests."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(protocol, "BODY_SECONDS", 0.5)

    async def scenario(server: LocalServer) -> None:
        sampling = {"max_new_tokens": 30, "ignore_eos": True}
        body = json.dumps(LONG | {"sampling_params": sampling, "stream": False}).encode()
        request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        connection = await Connection.to(server, request)
        assert len((await connection.next_answer())["output_ids"]) == 30
        await asyncio.sleep(0.6)
        await connection.send(request)
        assert len((await connection.next_answer())["output_ids"]) == 30
        connection.writer.close()

    run(scenario, loaded=echo_engine.build(seconds_per_step=0.02))


def test_connections_have_a_limit(monkeypatch) -> None:
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 2)

    async def scenario(server: LocalServer) -> None:
        held = [await Connection.to(server) for _ in range(2)]
        status, error = await (await Connection.to(server)).answer()
        assert (status, error["code"]) == (503, "overloaded")
        for connection in held:
            connection.writer.close()
            await connection.writer.wait_closed()
        while (answer := await server.client.get("/health")).status_code == 503:  # until the server has seen that
            assert answer.json()["error"]["code"] == "overloaded"
        assert answer.status_code == 200

    run(scenario)


def test_unfinished_bodies_share_a_limit_and_small_ones_are_free(monkeypatch) -> None:
    monkeypatch.setattr(bodies, "MAX_UNFINISHED_BYTES", 1 << 20)

    async def scenario(server: LocalServer) -> None:
        bodies = server.app.state.bodies
        held = await Connection.to(server)
        await held.send(HEAD + b"Content-Length: 900000\r\n\r\n" + b" " * 800_000)
        while bodies._bytes < 700_000:
            await asyncio.sleep(0.005)
        refused = await server.client.post("/generate", content=b" " * 800_000)
        assert error_of(refused, 503)["code"] == "overloaded" and refused.headers["retry-after"]
        assert (await server.client.post("/generate", json={"text": "x"})).status_code == 200
        held.writer.close()
        while bodies._bytes:
            await asyncio.sleep(0.005)

    run(scenario)


def test_a_client_that_reads_nothing_is_disconnected(monkeypatch) -> None:
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", 0.2)

    async def scenario(server: LocalServer) -> None:
        connection = await Connection.to(server)
        connection.writer.transport.pause_reading()
        body = json.dumps(LONG | {"sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}).encode()
        await connection.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while not server.state.client.open_answers:
            await asyncio.sleep(0.005)
        while server.state.http_active:
            await asyncio.sleep(0.02)
        await pages_are_back(server)
        connection.writer.close()

    run(scenario)


def test_a_stream_that_is_read_too_slowly_ends_with_its_reason(monkeypatch) -> None:
    monkeypatch.setattr(request_stream, "MAX_UNREAD_OUTPUTS", 50)
    monkeypatch.setattr(request_stream, "MAX_UNREAD_PER_ANSWER", 1)

    async def go() -> None:
        state, loop, _ = local_state()
        sampling = SamplingSettings(max_tokens=3000, ignore_eos=True)
        stream = state.client.submit([GenerateRequest(id="slow", prompt_ids=[97], sampling=sampling)])
        for _ in range(200):
            loop.turn()
        assert state.client.open_answers == 0 and not loop.has_work()  # it was aborted
        outputs: list[TokenOutput] = await stream.next()
        assert len(outputs) == 51
        with pytest.raises(TandemError, match="read faster"):
            await stream.next()
        state.client.release(stream)

    asyncio.run(go())
