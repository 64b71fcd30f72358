"""A server for tests: in this process over ASGI (fast), or as its own process (real)."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import zmq
from fastapi import FastAPI

import echo_engine
import echo_tokenizer
import tandem
from quiet_clock import PATIENCE
from tandem.flags.engine_config import EngineConfig
from tandem.server import engine_client, launch
from tandem.server.app import create_app
from tandem.server.engine_process import EngineLoop, LoadedEngine
from tandem.server.messages import EngineReady
from tandem.server.state import ServerState

TESTS = Path(__file__).parent
# `httpx.get` loads certificates at each call, in 17 ms: who asks again and again until a server answers would leave it
# half of a core. Each request has a connection of its own, as there.
plain = httpx.Client(verify=False, timeout=PATIENCE, limits=httpx.Limits(max_keepalive_connections=0))
RESERVED: list[socket.socket] = []  # for as long as this process lives


class LocalSocket:
    """Stands in for ZeroMQ between a ServerState and an EngineLoop of the same process; messages are still bytes."""

    def __init__(self, state: ServerState) -> None:
        self.inbox: collections.deque[bytes] = collections.deque()
        self._state = state

    def recv(self, flags: int) -> bytes:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

    def send(self, data: bytes) -> None:
        self._state.client.deliver(engine_client.decode(data))


def local_state(
    loaded: LoadedEngine | None = None, **flags: Any
) -> tuple[ServerState, EngineLoop, LocalSocket]:
    """A state whose engine is attached; somebody must turn the loop."""
    loaded = loaded or echo_engine.build()
    state = ServerState(EngineConfig(model="echo", **flags), echo_tokenizer.load_tokenizer)
    wire = LocalSocket(state)
    facts = EngineReady(plan=loaded.plan, model_path="echo", model_type="echo", vocab_size=loaded.vocab_size)
    state.engine_ready(facts)
    state.client.sleep.released.set()  # there is no process of it
    state.client.attach(lambda message: wire.inbox.append(engine_client.encode(message)))
    return state, EngineLoop(loaded.engine, wire), wire


async def turn_forever(loop: EngineLoop, pause: float = 0.0) -> None:
    while True:
        loop.turn()
        await asyncio.sleep(pause)


class LocalServer:
    """`client` talks HTTP to the application, without a network."""

    def __init__(self, state: ServerState, app: FastAPI, client: httpx.AsyncClient) -> None:
        self.state = state
        self.app = app
        self.client = client

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)


@contextlib.asynccontextmanager
async def local_server(loaded: LoadedEngine | None = None, **flags: Any) -> AsyncIterator[LocalServer]:
    state, loop, _ = local_state(loaded, **flags)
    app = create_app(state)
    turning = asyncio.create_task(turn_forever(loop))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://tandem") as client:
            yield LocalServer(state, app, client)
    finally:
        turning.cancel()
        loop._engine.close()


@contextlib.asynccontextmanager
async def listening_server(loaded: LoadedEngine | None = None, **flags: Any) -> AsyncIterator[LocalServer]:
    """The same behind a real socket: `client` goes through the network, and `port` is open for bytes of any kind.
    uds: a Unix socket instead."""
    state, loop, _ = local_state(loaded, **flags)
    http = launch.Uvicorn(launch.uvicorn_config(create_app(state), state.config))
    path = state.config.uds
    sock = launch.listen("127.0.0.1", 0) if path is None else launch.listen_unix(Path(path))
    serving = asyncio.create_task(http.serve(sockets=[sock]))
    turning = asyncio.create_task(turn_forever(loop, 0.001))
    while not http.started:
        await asyncio.sleep(0.005)
    try:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}" if path is None else "http://localhost"
        transport = httpx.AsyncHTTPTransport(uds=path, verify=False)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, transport=transport) as client:
            yield LocalServer(state, http.config.app, client)
    finally:
        http.should_exit = True
        await serving
        turning.cancel()


class ServerProcess:
    """`kt serve` as users run it, on a free port; or the echo engine behind the same server."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, log: Path, api_key: str | None = None
    ) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def get(self, path: str) -> httpx.Response:
        return plain.get(self.url + path, headers=self.headers)

    def healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.get("/health").status_code == 200
        return False

    def wait_until_ready(self, seconds: float = 180.0) -> None:
        ends = time.monotonic() + seconds
        while not self.healthy():
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()}"
            assert time.monotonic() < ends, f"not ready after {seconds} s:\n{self.log.read_text()}"
            time.sleep(0.05)

    def info(self) -> dict[str, Any]:
        return self.get("/get_server_info").json()

    def engine_pid(self) -> int:
        """The only child of the API process that runs engine_process."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and self._is_engine(folder):
                return int(folder.name)
        raise AssertionError("no engine process")

    def _is_engine(self, folder: Path) -> bool:
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            return parent == self.process.pid and b"engine_process" in (folder / "cmdline").read_bytes()
        return False

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=PATIENCE)


def command_line(process: psutil.Process) -> str:
    """Empty if it has ended since it was listed."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def has_ended(process: psutil.Process) -> bool:
    """Who started it may not have heard of it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # just then
        return True


def free_port() -> int:
    """It stays bound here, where nobody listens. So the system gives it to nobody who asks for any port, until a server
    listens on it and later, too: servers may bind what is bound (SO_REUSEADDR)."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    RESERVED.append(sock)
    return int(sock.getsockname()[1])


def spawn(arguments: list[str], log: Path, output: int | None = None) -> subprocess.Popen[bytes]:
    """A Python process that finds tandem and the modules of tests/. It prints to `log`, or to the file `output`."""
    package = Path(tandem.__file__).parent.parent  # the one under test: installed, or src
    paths = [str(TESTS), str(TESTS / "fakes"), str(package), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, *arguments], stdout=output or out, stderr=subprocess.STDOUT, env=environment
        )


def echo_code(loader: str, load_tokenizer: str = "load_tokenizer", **flags: Any) -> str:
    """Python source of a server around `echo_engine.<loader>`, or "module:loader". It starts dead engines anew at
    once: tests/server/test_server_supervisor.py looks at the pauses."""
    loader = loader if ":" in loader else f"echo_engine:{loader}"
    return (
        "import sys, echo_tokenizer; from tandem.flags.engine_config import EngineConfig; "
        "from tandem.server.launch import serve; "
        "from tandem.server import supervisor; supervisor.LONGEST_PAUSE_SECONDS = 0.05; "
        f"sys.exit(serve(EngineConfig(model='echo', **{flags!r}), "
        f"loader={loader!r}, load_tokenizer=echo_tokenizer.{load_tokenizer}))"
    )


def spawn_echo(log: Path, loader: str = "load", output: int | None = None, **options: Any) -> ServerProcess:
    """The real server process and a real engine process, which loads `echo_engine.<loader>` or "module:loader"."""
    port = free_port()
    return ServerProcess(spawn(["-c", echo_code(loader, port=port, **options)], log, output), port, log)


def spawn_real(model: Path | str, log: Path, *flags: str, api_key: str | None = None) -> ServerProcess:
    port = free_port()
    arguments = ["-m", "tandem.launch_server", "--model", str(model), "--port", str(port), *flags]
    return ServerProcess(spawn(arguments, log), port, log, api_key)


@contextlib.contextmanager
def running(server: ServerProcess) -> Iterator[ServerProcess]:
    try:
        server.wait_until_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
