"""For tests of the supervisor, which starts real engine processes that hold no model."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from quiet_clock import PATIENCE
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.server import supervisor
from tandem.server.engine_client import EngineClient

SUPPORT = Path(__file__).parent


def engine_path() -> str:
    """PYTHONPATH with which an engine process finds `idle_engine`."""
    return os.pathsep.join(map(str, (SUPPORT, SUPPORT / "fakes", Path(supervisor.__file__).parents[2])))


def request(name: str, prompt: list[int], **sampling) -> GenerateRequest:
    return GenerateRequest(id=name, prompt_ids=prompt, sampling=SamplingSettings(**sampling))


async def until(condition, seconds: float = PATIENCE) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def answer(client: EngineClient, one: GenerateRequest) -> str:
    stream = client.submit([one])
    try:
        return "".join([output.text for output in await asyncio.wait_for(stream.next(), PATIENCE)])
    finally:
        client.release(stream)
