"""One line for each request, with its id and without its contents."""

from __future__ import annotations

import logging

import pytest

from server_harness import LocalServer
from server_requests import CHAT, run, user


def test_a_line_and_an_id_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: LocalServer) -> None:
        given = {"x-request-id": "trace-7:a"}
        body = {"messages": user("my secret"), "stream": True}
        answer = await server.client.post(CHAT + "?q=hidden", json=body, headers=given)
        assert answer.headers["x-request-id"] == "trace-7:a"
        refused = await server.client.post(CHAT, content="{", headers=given)
        assert refused.status_code == 400 and refused.headers["x-request-id"] == "trace-7:a"
        made = [(await server.client.get("/nowhere")).headers["x-request-id"] for _ in range(2)]
        assert made[0] != made[1] and len(made[0]) == 32

    with caplog.at_level(logging.INFO, "tandem.server.requests"):
        run(scenario)
    lines = [record.getMessage() for record in caplog.records if record.name == "tandem.server.requests"]
    assert [line.split(" in ")[0].split(" ", 1)[1] for line in lines] == [
        f"POST '{CHAT}': 200", f"POST '{CHAT}': 400", "GET '/nowhere': 404", "GET '/nowhere': 404",
    ]  # fmt: skip
    assert lines[0].startswith("trace-7:a ") and not any("secret" in line or "hidden" in line for line in lines)


@pytest.mark.parametrize("given", ["x" * 129, "two words", "a\tb", "é", ""])
def test_an_id_that_could_forge_a_line_is_replaced(given: str) -> None:
    async def scenario(server: LocalServer) -> None:
        answer = await server.client.get("/v1/models", headers={"x-request-id": given.encode()})
        assert answer.headers["x-request-id"] not in (given, "")

    run(scenario)


def test_what_programs_ask_all_the_time_is_told_only_to_those_who_debug(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: LocalServer) -> None:
        for path in ("/health", "/metrics", "/tandem/live", "/page/main.js"):
            assert (await server.client.get(path)).headers["x-request-id"]

    with caplog.at_level(logging.INFO, "tandem.server.requests"):
        run(scenario)
    assert not [record for record in caplog.records if record.name == "tandem.server.requests"]
