"""The key on every route that the application has, found by walking them: one that is added is covered at once."""

from __future__ import annotations

import hmac
import json
import logging
import re
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route

from server_harness import LocalServer
from server_requests import run
from tandem.engine.protocol import GenerateRequest, LookAtExperts
from tandem.server.guard import gate

KEY = "s3cret-kee"
RIGHT = {"authorization": f"Bearer {KEY}"}
OPEN = {"/health", "/ping", "/favicon.ico"}  # load balancers and browsers ask them, and have no key
PAGE = re.compile(r"/page/\w+\.\w+")  # files of the package: the page itself asks for the key
WRONG = (
    {}, {"authorization": ""}, {"authorization": "Bearer "}, {"authorization": f"Basic {KEY}"}, {"authorization": KEY},
    {"authorization": f"Bearer{KEY}"}, {"authorization": f"Bearer {KEY[:-1]}"}, {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY.upper()}"}, {"x-api-key": f"Bearer {KEY}"}, {"x-api-key": KEY[:-1]},
    {"cookie": f"key={KEY}"}, {"authorization": b"Bearer \xff\xfe"},
)  # fmt: skip


def walked(app: FastAPI) -> Iterator[tuple[str, str]]:
    """(method, address) of every route; none is of another kind, as a socket or a mounted application."""
    for route in flattened(app.routes):
        assert isinstance(route, APIRoute | Route), f"{route}: does the gate keep it?"
        address = re.sub(
            r"\{(\w+)(:path)?\}", "app.js" if route.path.startswith("/page/") else "some", route.path
        )
        yield from ((method, address) for method in sorted({*route.methods, "HEAD", "OPTIONS", "DELETE"}))


def flattened(routes: list) -> Iterator[object]:
    """FastAPI keeps an included router as one route from 0.140 on."""
    for route in routes:
        inner = getattr(getattr(route, "original_router", None), "routes", None)
        yield from [route] if inner is None else flattened(inner)


async def asked(server: LocalServer, method: str, address: str, headers: dict) -> httpx.Response:
    body = {"content": b"{}"} if method == "POST" else {}
    return await server.client.request(method, address, headers=headers, **body)


def test_every_route_wants_the_key() -> None:
    async def scenario(server: LocalServer) -> None:
        addresses = list(walked(server.app))
        assert len(addresses) > 80
        for method, address in addresses:
            free = address in OPEN or (PAGE.fullmatch(address) and method in ("GET", "HEAD"))
            for headers in WRONG:
                refused = await asked(server, method, address, headers)
                assert (refused.status_code == 401) != bool(free), (method, address, headers)
                assert free or refused.headers["www-authenticate"] == "Bearer"
        for address in ("/docs", "/openapi.json", "/metrics", "/tandem/live", "/v1/models", "/none/such"):
            assert (await server.client.get(address)).status_code == 401, address

    run(scenario, api_key=KEY)


def test_with_the_key_every_route_answers() -> None:
    async def scenario(server: LocalServer) -> None:
        for method, address in walked(server.app):
            for headers in (RIGHT, {"x-api-key": KEY}, {"authorization": "Bearer no", "x-api-key": KEY}):
                assert (await asked(server, method, address, headers)).status_code not in (401, 403), address

    run(scenario, api_key=KEY)


@pytest.mark.parametrize("page", [{}, {"accept": "text/html"}])
def test_the_page_is_open_and_nothing_behind_it(page: dict[str, str]) -> None:
    async def scenario(server: LocalServer) -> None:
        assert (await server.client.get("/", headers=page)).status_code == (200 if page else 401)
        assert (await server.client.post("/", headers=page)).status_code == 401
        for method, address in walked(server.app):
            if address not in OPEN | {"/"} and not PAGE.fullmatch(address):
                assert (await asked(server, method, address, page)).status_code == 401, address

    run(scenario, api_key=KEY)


@pytest.mark.parametrize(
    "address",
    [
        "/health/../metrics", "/page/../metrics", "/page/%2e%2e/metrics", "/page/..%2fmetrics", "/page/../../metrics",
        "/page//metrics", "//metrics", "/./metrics", "/METRICS", "/metrics/", "/metrics%2f", "/page/%00",
        "/health%2f..%2fmetrics", "/health;/metrics", "/metrics%23", "/page/app.js/../../metrics",
    ],
)  # fmt: skip
def test_no_spelling_of_an_address_gets_round_the_gate(address: str) -> None:
    async def scenario(server: LocalServer) -> None:
        url = httpx.URL("http://tandem").copy_with(raw_path=address.encode())
        answer = await server.client.send(httpx.Request("GET", url))
        assert answer.status_code in (401, 404), answer.text
        assert "tandem_" not in answer.text

    run(scenario, api_key=KEY)


def test_a_method_that_is_not_there_is_told_those_that_are() -> None:
    """All of them, as where several routes share an address."""

    async def scenario(server: LocalServer) -> None:
        methods: dict[str, set[str]] = {}
        for route in flattened(server.app.routes):
            methods.setdefault(route.path, set()).update(route.methods)
        for path, allowed in methods.items():
            refused = await server.client.patch(re.sub(r"\{.*\}", "some", path))
            assert refused.status_code == 405, path
            expected = allowed | ({"HEAD"} if "GET" in allowed else set())
            assert set(refused.headers["allow"].split(", ")) == expected, path

    run(scenario)


def test_keys_are_compared_in_constant_time(monkeypatch) -> None:
    """Wherever the first wrong byte is, and however many keys are sent: nothing is compared that says so sooner."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(
        gate.hmac,
        "compare_digest",
        lambda given, right: compared.append((given, right)) or real(given, right),
    )

    async def scenario(server: LocalServer) -> None:
        for given in ("x" * len(KEY), KEY[:-1] + "x", KEY):
            await server.client.get("/v1/models", headers={"x-api-key": given, "authorization": "Bearer y"})
        expected = KEY.encode()
        assert [right for _, right in compared] == [expected] * 6
        assert [given for given, _ in compared].count(expected) == 1

    run(scenario, api_key=KEY)


def test_no_get_reaches_the_engine_but_to_look() -> None:
    """Links, crawlers and images of other pages send GET. `/health_generate` makes one token, which is its purpose."""

    async def scenario(server: LocalServer) -> None:
        told: list[object] = []
        send = server.state.client._send
        server.state.client.attach(lambda message: told.append(message) or send(message))
        for method, address in walked(server.app):
            if method not in ("GET", "HEAD") or address == "/health_generate":
                continue
            await server.client.request(method, address)
            assert all(isinstance(message, LookAtExperts) for message in told), (address, told)
        told.clear()
        assert (await server.client.get("/health_generate")).status_code == 200
        (request,) = told
        assert isinstance(request, GenerateRequest) and request.sampling.max_tokens == 1

    run(scenario)


def test_the_key_is_in_no_log_and_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def scenario(server: LocalServer) -> None:
        for method, address in walked(server.app):
            for headers in (RIGHT, {"authorization": f"Bearer {KEY}-not"}):
                answer = await asked(server, method, address, headers)
                assert KEY not in answer.text + json.dumps(dict(answer.headers)), address

    run(scenario, api_key=KEY)
    assert caplog.records
    assert KEY not in caplog.text
