"""A front for tests: its own HTTP in this process, its models stub processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from quiet_clock import PATIENCE
from tandem.flags.engine_config import EngineConfig
from tandem.server import launch
from tandem.server.front.app import FrontApp
from tandem.server.front.child import Child
from tandem.server.front.models import Models
from tandem.server.front.models_file import ModelEntry, ModelsFile
from tandem.server.front.room import Verdict
from tandem.server.front.state import FrontState
from tandem.server.guard.gate import around

STUB = Path(__file__).parent / "stub_model.py"


@dataclass
class Places:
    """Implements `Room`: so many models fit."""

    most: int = 2
    seen: list[int] = field(default_factory=list)

    async def check(self, entry: ModelEntry, loaded: Sequence[Child]) -> Verdict:
        self.seen.append(len(loaded))
        if "huge" in entry.name:
            return Verdict("it needs 99 GiB of 7", possible=False)
        return Verdict() if len(loaded) < self.most else Verdict(f"{self.most} fit")


def entry(name: str, **more: Any) -> ModelEntry:
    return ModelEntry(name, ("--model", f"/models/{name}"), **more)


@dataclass
class Front:
    models: Models
    room: Places
    client: httpx.AsyncClient
    folder: Path

    async def chat(self, model: str | None, text: str = "hi", **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **more} | ({"model": model} if model else {})
        return await self.client.post("/v1/chat/completions", json=body)

    def log(self, name: str, file: str = "log") -> list[str]:
        """Lines that the model's process notes: what happened, or which processes "halted"."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"{name}.{file}").read_text().split()
        return []


@contextlib.asynccontextmanager
async def front(
    *entries: ModelEntry, places: int = 2, stay_seconds: float = 0.0, **flags: Any
) -> AsyncIterator[Front]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)

        def command(one: ModelEntry, socket: str) -> tuple[Sequence[str], bytes]:
            return [sys.executable, str(STUB), socket, one.name, scratch], b""

        config, room = EngineConfig(models="stubs", **flags), Places(places)
        file, most = ModelsFile(entries, stay_seconds), config.max_queued_requests
        models = Models(file, room, folder, command, config.shutdown_timeout, most)
        state = FrontState(config, models)
        http = launch.Uvicorn(launch.uvicorn_config(around(FrontApp(state), state), config))
        sock = launch.listen("127.0.0.1", 0)
        serving = asyncio.create_task(http.serve(sockets=[sock]))
        while not http.started:
            await asyncio.sleep(0.005)
        try:
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, verify=False) as client:
                yield Front(models, room, client, folder)
        finally:
            await models.close()
            http.should_exit = True
            await serving


def events(response: httpx.Response) -> list[Any]:
    """Events of a stream: its data, and "" for comments."""
    parts = [part for part in response.text.split("\n\n") if part]
    return [json.loads(p[6:]) if p.startswith("data: {") else p.removeprefix("data: ") for p in parts]
