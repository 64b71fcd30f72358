"""`Child`: one model of the front, and its `kt serve` on a unix socket while it is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import EngineError
from tandem.flags import env
from tandem.flags.ways import argv_on_one_gpu
from tandem.process.children import exit_reason
from tandem.server.errors import unavailable
from tandem.server.front.models_file import ModelEntry
from tandem.server.front.wire import Wire
from tandem.server.sleep import Sleep
from tandem.server.supervisor import STABLE_SECONDS, pause_seconds

log = logging.getLogger("tandem.server")

KILL_SECONDS = 10.0  # beyond --shutdown-timeout, for an exit
POLL_SECONDS = 0.05, 0.5  # between two looks whether a model is loaded, at first and at last
_READ_BYTES = 1 << 16
_MOST_REASON_CHARS = 2000

Command = Callable[[ModelEntry, str], tuple[Sequence[str], bytes]]


class Life(enum.Enum):
    """As /v1/models tells them."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    DRAINING = "unloading"


def serve_command(entry: ModelEntry, socket: str) -> tuple[Sequence[str], bytes]:
    """The process that serves a model, and what it reads from stdin: its command line is nobody's business. It takes
    one GPU, unless its flags say otherwise: other models want the others."""
    words = [*argv_on_one_gpu(entry.flags), "--served-model-name", entry.name, "--uds", socket]
    command = [sys.executable, "-P", "-m", "tandem.cli.served_model", "--parent", str(os.getpid())]
    return command, json.dumps(words).encode()


class Child:
    """Lives on the event loop. `use` and `done` count requests; `start` and `stop` are called by `Models` alone."""

    def __init__(self, entry: ModelEntry, socket: Path, command: Command) -> None:
        self.entry = entry
        self.life = Life.UNLOADED
        self.facts: dict[str, Any] = {}  # routes' answers when it was loaded last
        self.in_flight = self.waiting = self.loads = self.failures = 0
        self.why = ""  # it could not be loaded, or died
        self.used_at = self.loaded_at = self.not_before = 0.0
        self.idle, self.gone = asyncio.Event(), asyncio.Event()
        self.sleep = Sleep(entry.sleep_idle_seconds, lambda: self.in_flight > 0)
        self.wire = Wire(str(socket))
        self._socket, self._command = socket, command
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._output: list[str] = []
        self.watchers: list[asyncio.Task[None]] = []  # of the process that is loaded
        self.idle.set()
        self.gone.set()

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def use(self) -> None:
        self.in_flight += 1
        self.used_at = time.monotonic()
        self.idle.clear()

    def done(self) -> None:
        self.in_flight -= 1
        self.used_at = time.monotonic()
        if not self.in_flight:
            self.idle.set()
        self.sleep.used()

    def check_pause(self) -> None:
        """Raises ApiError 503 while it is too early for another try."""
        left = self.not_before - time.monotonic()
        if left > 0:
            raise unavailable(f"{self.why}; the next try is in {left:.0f} s")

    def failed(self, why: str) -> None:
        """The next try waits: 0, 1, 2, 4 … seconds."""
        self.failures += 1
        self.why = why
        self.not_before = time.monotonic() + pause_seconds(self.failures)

    async def start(self) -> None:
        """Until it takes requests. Raises EngineError with the reason; nothing is left running then."""
        self.life, self._output = Life.LOADING, []
        log.info("%s is being loaded", self.name)
        began = time.monotonic()
        self.sleep.starts()
        try:
            self._process = await self._spawn()
            self._reading = asyncio.create_task(self._read(self._process))
            await self._until_healthy(self._process)
            self.facts = {path: await self._json(path) for path in ("/v1/models", "/api/ps", "/api/show")}
        except BaseException:
            await self._end(signal.SIGKILL, 0.0)
            self.life = Life.UNLOADED
            raise
        self.life, self.loaded_at = Life.LOADED, time.monotonic()
        self.used_at = self.loaded_at
        self.loads += 1
        self.sleep.loaded()
        log.info("%s is loaded after %.1f s", self.name, self.loaded_at - began)

    async def ended(self) -> None:
        """Until a loaded process ends by itself; `stop` is no such end."""
        process = self._process
        assert process is not None
        code = await process.wait()
        if self._process is not process or self.life is not Life.LOADED:
            return
        await self._end(signal.SIGKILL, 0.0)
        self.life = Life.UNLOADED
        if time.monotonic() - self.loaded_at > STABLE_SECONDS:
            self.failures = 0
        self.failed(f"the server of {self.name} ended ({exit_reason(code)}); try again")
        log.error("%s", self.why)

    async def noticed(self, seconds: float | None) -> None:
        """Its process has ended, it seems: until that is known here, or so many seconds are over."""
        if self.watchers:
            await asyncio.wait(self.watchers[:1], timeout=seconds)

    def drain(self) -> None:
        """From here on requests wait for the next load."""
        self.life = Life.DRAINING
        self.gone.clear()

    async def stop(self, seconds: float) -> None:
        """Requests that run may finish within `seconds`; then its memory is free."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), seconds)
        if time.monotonic() - self.loaded_at > STABLE_SECONDS:
            self.failures = 0
        await self._end(signal.SIGTERM, KILL_SECONDS)
        self.sleep.begins()
        self.life = Life.UNLOADED
        self.gone.set()
        log.info("%s is unloaded", self.name)

    async def _spawn(self) -> asyncio.subprocess.Process:
        command, words = self._command(self.entry, str(self._socket))
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, env=env.of_a_model(),
            )  # fmt: skip
        except OSError as error:
            raise EngineError(f"no process can be started for {self.name}: {error}") from error
        assert process.stdin is not None
        process.stdin.write(words)
        process.stdin.close()
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Its lines are ours, with its name before them. From "error:" on they are the reason of a failed start."""
        assert process.stdout is not None
        while output := await process.stdout.read(_READ_BYTES):
            for line in output.decode(errors="replace").splitlines():
                if line.startswith("error: ") or self._output:
                    self._output.append(line.removeprefix("error: "))
                if line.strip():
                    print(f"[{self.name}] {line}", flush=True)

    async def _until_healthy(self, process: asyncio.subprocess.Process) -> None:
        pause, longest = POLL_SECONDS
        ended = asyncio.create_task(process.wait())
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=pause)
                pause = min(1.2 * pause, longest)
                with contextlib.suppress(EngineError):
                    if (await self.wire.get("/health"))[0] == 200:
                        return
        finally:
            ended.cancel()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=1.0)  # its last words
        reason = " ".join(part.strip() for part in self._output)[:_MOST_REASON_CHARS]
        raise EngineError(f"{self.name} cannot be loaded: {reason or exit_reason(ended.result())}")

    async def _json(self, path: str) -> Any:
        if path == "/api/show":
            answer = await self.wire.ask("POST", path, [(b"content-type", b"application/json")], b"{}")
            await answer.head()
            return json.loads(await answer.whole())
        return json.loads((await self.wire.get(path))[1])

    async def _end(self, number: signal.Signals, seconds: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            await asyncio.wait_for(process.wait(), seconds or None)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self.wire.close()
        if self._reading is not None:
            self._reading.cancel()
        self._socket.unlink(missing_ok=True)


def socket_name(index: int) -> str:
    """Short: the system takes 107 characters of a path."""
    return f"{index}.sock"
