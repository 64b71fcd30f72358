"""Requests to a server of this process, over ASGI, and what must be true of every answer."""

from __future__ import annotations

import asyncio
import json
import time

from quiet_clock import PATIENCE
from server_harness import LocalServer, local_server

CHAT = "/v1/chat/completions"


def run(scenario, **flags):
    """One scenario on one fresh server; afterwards no answer may be left over."""

    async def go():
        async with local_server(**flags) as server:
            await asyncio.wait_for(scenario(server), PATIENCE)
            assert server.state.client.open_answers == 0

    asyncio.run(go())


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def events(text: str) -> list:
    """Server-sent events → decoded JSON; the last must be [DONE]."""
    frames = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


async def pages_are_back(server: LocalServer) -> None:
    """The engine's last report says: nothing runs, every page is available."""
    ends = time.monotonic() + PATIENCE
    while True:
        await asyncio.sleep(0.005)
        stats = (await server.client.get("/get_server_info")).json()["stats"]
        if stats["running"] == stats["waiting"] == 0 and stats["pages_free"] == stats["pages_total"]:
            return
        assert time.monotonic() < ends, stats
