"""`serve_models(config)`: a front of several models from start to exit. What `kt serve --models` calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tandem.errors import ConfigError, TandemError, exit_status
from tandem.flags.engine_config import EngineConfig
from tandem.server import launch
from tandem.server.front.app import FrontApp
from tandem.server.front.child import Command, serve_command
from tandem.server.front.models import Models
from tandem.server.front.models_file import ModelsFile, read_models
from tandem.server.front.room import PlanRoom, Room
from tandem.server.front.state import FrontState
from tandem.server.guard.gate import around
from tandem.server.guard.key import readable_by_others, with_key

log = logging.getLogger("tandem.server")

_POLL_SECONDS = 0.05
_MOST_SOCKET_CHARS = 107  # of a path, to the system
_NAME_CHARS = 16

MakeRoom = Callable[[ModelsFile], Room]


def plan_room(file: ModelsFile) -> Room:
    return PlanRoom(file.max_loaded)


def serve_models(
    config: EngineConfig, *, command: Command = serve_command, make_room: MakeRoom = plan_room
) -> int:
    """Runs until SIGTERM or Ctrl+C, then drains. Returns the exit code; errors are one line on stderr.

    `command` and `make_room` are for tests: what starts a model, and what says whether it fits.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    launch.allow_many_files()
    try:
        file = read_models(config)
        config = with_key(config)
        if readable_by_others(config):
            log.warning("every user of this machine can read the key in %s", config.api_key_file)
        with launch.listening(config) as sock, socket_folder() as folder, launch.event_loop() as runner:
            launch.warn_of_open_door(config, sock)
            return runner.run(_FrontServer(config, sock, file, folder, command, make_room).run())
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return exit_status(error)


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder of mode 700, whose path leaves room for a socket's name. Raises ConfigError."""
    most = _MOST_SOCKET_CHARS - 2 * _NAME_CHARS
    parents = [parent for parent in (tempfile.gettempdir(), "/tmp") if len(parent) < most]
    try:
        folder = Path(tempfile.mkdtemp(prefix="tandem-", dir=parents[0]))
    except (OSError, IndexError) as error:
        text = f"no folder for sockets can be made ({error}); set TMPDIR to one that can be written"
        raise ConfigError(text) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _FrontServer:
    """HTTP, the models, and what connects them to the process: signals, greeting, exit code."""

    def __init__(
        self, config: EngineConfig, sock: socket.socket, file: ModelsFile, folder: Path, command: Command,
        make_room: MakeRoom,
    ) -> None:  # fmt: skip
        self._config, self._socket = config, sock
        most = config.max_queued_requests
        self._models = Models(file, make_room(file), folder, command, config.shutdown_timeout, most)
        self._state = FrontState(config, self._models)
        app = around(FrontApp(self._state), self._state)
        self._http = launch.Uvicorn(launch.uvicorn_config(app, config))
        self._stop = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        self._catch_signals()
        http = asyncio.create_task(self._http.serve(sockets=[self._socket]))
        self._models.preload()
        greeting = asyncio.create_task(self._greet())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([http, stop], return_when=asyncio.FIRST_COMPLETED)
        for task in (greeting, stop):
            task.cancel()
        await self._drain()
        self._http.should_exit = True
        await self._models.close()
        await http
        return 0

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._read_again)

    def _on_signal(self) -> None:
        """The first signal drains, the second does not wait."""
        self._signals += 1
        self._stop.set()

    def _read_again(self) -> None:
        """A file that is wrong changes nothing."""
        try:
            self._models.replace(read_models(self._config))
            log.info("read again: %s", self._config.models)
        except ConfigError as error:
            log.error("the models stay as they are: %s", error)

    async def _drain(self) -> None:
        self._state.draining = True
        launch.tell_service_manager("STOPPING=1")
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._config.shutdown_timeout
        while self._state.http_active and self._signals < 2 and loop.time() < ends:
            await asyncio.sleep(_POLL_SECONDS)
        self._models.hurry()

    async def _greet(self) -> None:
        while not self._http.started:
            await asyncio.sleep(_POLL_SECONDS)
        launch.tell_service_manager("READY=1")
        print(greeting(self._config, [c.name for c in self._models.all()], launch.port_of(self._socket)), flush=True)


def greeting(config: EngineConfig, names: Sequence[str], port: int) -> str:
    """As a server's. Where there are several models, its example names one."""
    return launch.greeting(config, ", ".join(names), port, example_model=names[0] if len(names) > 1 else None)


