"""`serve(config)`: the API process from start to exit. What `kt serve` and `tandem.launch_server` call."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from tandem.errors import ConfigError, TandemError, exit_status
from tandem.flags import env
from tandem.flags.engine_config import EngineConfig
from tandem.process.garbage import loaded_is_kept
from tandem.server.app import create_app
from tandem.server.chat.chat_flags import check_chat_flags
from tandem.server.guard.key import check_key, readable_by_others, with_key
from tandem.server.guard.protocol import GuardedProtocol
from tandem.server.state import ServerState, TokenizerLoader
from tandem.server.supervisor import REAL_ENGINE, EngineSupervisor
from tandem.text.tokenizer import Tokenizer

log = logging.getLogger("tandem.server")

_CLOSE_SECONDS = 2  # for connections that are still open after the drain
_POLL_SECONDS = 0.05
_BACKLOG = 2048


def serve(
    config: EngineConfig, *, loader: str = REAL_ENGINE, load_tokenizer: TokenizerLoader = Tokenizer.load
) -> int:
    """Runs until SIGTERM or Ctrl+C, then drains. Returns the exit code; errors are one line on stderr.

    `loader` and `load_tokenizer` are for tests: another engine ("module:function") and its tokenizer.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    env.tokenize_on_one_thread()
    allow_many_files()
    try:
        check_chat_flags(config)
        config = with_key(config)
        if readable_by_others(config):
            log.warning("every user of this machine can read the key in %s", config.api_key_file)
        with listening(config) as sock, event_loop() as runner:
            warn_of_open_door(config, sock)
            server = _Server(config, sock, loader, load_tokenizer)
            code = runner.run(server.run())
        server.leave(code)
        return code
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return exit_status(error)


def check_start(config: EngineConfig) -> None:
    """Flags that a start refuses whatever the model is, checked before that is fetched for hours. Raises ConfigError,
    CheckpointError."""
    check_chat_flags(config)
    check_key(config)
    with listening(config):  # and let go: nobody should wait on the port meanwhile
        pass


def allow_many_files() -> None:
    """Each connection is one; the usual limit is 1,024."""
    with contextlib.suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def listening(config: EngineConfig) -> Iterator[socket.socket]:
    """The socket that the flags name. Raises ConfigError."""
    if config.uds is None:
        with listen(config.host, config.port) as sock:
            yield sock
        return
    with listen_unix(Path(config.uds)) as sock:
        try:
            yield sock
        finally:
            Path(config.uds).unlink(missing_ok=True)


def listen_unix(path: Path) -> socket.socket:
    """For this user alone. A socket that nobody listens to any more is replaced. Raises ConfigError."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on --uds {path} ({_reason(error)}); try another path") from error
    return sock


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def listen(host: str, port: int) -> socket.socket:
    """Bound at once, so that a taken port is known before a model is loaded. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({_reason(error)}); try another --port or --host"
        ) from error


def warn_of_open_door(config: EngineConfig, sock: socket.socket) -> None:
    """Other machines reach a socket that is none of the loopback's."""
    if sock.family == socket.AF_UNIX:
        return
    address = ipaddress.ip_address(sock.getsockname()[0].partition("%")[0])
    if config.api_key is None and not address.is_loopback:
        text = "without a key everybody who reaches %s may use this server; give --api-key-file, or --host 127.0.0.1"
        log.warning(text, f"{config.host}:{config.port}")


def _reason(error: OSError) -> str:
    """Python adds the address to the system's words, which it then says twice."""
    number = error.errno or 0
    return os.strerror(number) if number in errno.errorcode else str(error.strerror or error)


def event_loop() -> asyncio.Runner:
    """uvloop where it is installed (not on every platform)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


class Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers: a signal first drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """HTTP, the engine's supervisor, and what connects them to the process: signals, greeting, exit code."""

    def __init__(
        self, config: EngineConfig, sock: socket.socket, loader: str, load_tokenizer: TokenizerLoader
    ) -> None:
        self._config = config
        self._socket = sock
        self._state = ServerState(config, load_tokenizer)
        self._supervisor = EngineSupervisor(config, self._state.client, self._state.engine_ready, loader)
        self._state.restarts = lambda: self._supervisor.restarts
        self._http = Uvicorn(uvicorn_config(create_app(self._state), config))
        self._stop = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        self._catch_signals()
        http = asyncio.create_task(self._http.serve(sockets=[self._socket]))
        engine = asyncio.create_task(self._supervisor.run())
        greeting = asyncio.create_task(self._greet())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([http, engine, stop], return_when=asyncio.FIRST_COMPLETED)
        greeting.cancel()
        if not engine.done():
            await self._drain()
        self._http.should_exit = True
        await self._supervisor.stop()  # at the same time
        await http
        stop.cancel()
        await engine  # raises why the engine could not be started
        return 0

    def leave(self, code: int) -> None:
        """Python waits for threads, and one that tokenises cannot be stopped: the process then ends here."""
        if self._state.close():
            log.info("leaving a long prompt half tokenised")
            logging.shutdown()
            os._exit(code)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """The first signal drains, the second does not wait."""
        self._signals += 1
        self._stop.set()

    async def _drain(self) -> None:
        """New requests get 503; running ones may finish, for `--shutdown-timeout` at most."""
        self._state.drains.set()
        tell_service_manager("STOPPING=1")
        log.info("stopping%s", _who_may_finish(self._state.http_active, self._config.shutdown_timeout))
        ends = asyncio.get_running_loop().time() + self._config.shutdown_timeout
        while self._state.http_active and self._signals < 2 and asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(_POLL_SECONDS)
        self._state.client.detach("the server is stopping")

    async def _greet(self) -> None:
        while not (self._state.client.ready and self._http.started):
            await asyncio.sleep(_POLL_SECONDS)
        with loaded_is_kept():
            tell_service_manager("READY=1")
            print(greeting(self._config, self._state.model_name, port_of(self._socket)), flush=True)
            await self._stop.wait()


def tell_service_manager(state: str) -> None:
    """A unit of `Type=notify` has started when the model is loaded, so units after it find a server that answers."""
    where = env.service_manager()
    if where is None:
        return
    address = f"\0{where[1:]}" if where.startswith("@") else where
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(state.encode(), address)


def _who_may_finish(requests: int, seconds: float) -> str:
    if not requests:
        return ""
    some = f"{requests} request{'s' * (requests > 1)}"
    return f"; {some} may finish within {seconds:g} s (a second signal, or Ctrl+C: stop now)"


def uvicorn_config(app: ASGIApp, config: EngineConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=GuardedProtocol,
        log_level="warning" if config.log_level != "debug" else "debug",
        access_log=config.log_level == "debug",
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )


def port_of(sock: socket.socket) -> int:
    """0: it has none."""
    return 0 if sock.family == socket.AF_UNIX else int(sock.getsockname()[1])


def greeting(config: EngineConfig, model_name: str, port: int, *, example_model: str | None = None) -> str:
    """Text that is printed when the first request may come. example_model: of several models, the one that
    the example names: without it the example would be refused."""
    if config.uds is not None:
        return f"{model_name} is ready at {config.uds}"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = "" if config.api_key is None else " -H 'Authorization: Bearer KEY'"
    name = "" if example_model is None else f'"model": {json.dumps(example_model, ensure_ascii=False)}, '
    body = f'{{{name}"messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 64}}'
    options = "" if port == 30000 and host == "127.0.0.1" else f" --host {host} --port {port}"
    options += "" if config.api_key is None else " --api-key KEY"
    verb = "is" if example_model is None else "are"
    return (
        f"\n{model_name} {verb} ready at {url} (a browser finds a page to chat there)\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n"
        f"  kt chat{options}\n"
    )
