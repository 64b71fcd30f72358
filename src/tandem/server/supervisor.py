"""Keeps one engine process alive: starts it, listens to it, notices when it dies or hangs, starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import os
import sys
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from tandem.errors import ConfigError, EngineError, TandemError
from tandem.flags.engine_config import EngineConfig
from tandem.flags.ways import way_is_open, with_way_kept
from tandem.machine.gpus import may_have_gpus
from tandem.process.children import exit_reason
from tandem.server import engine_client
from tandem.server.endpoint import forget, private_endpoint
from tandem.server.engine_client import EngineClient
from tandem.server.messages import (
    EngineConnected,
    EngineEnds,
    EngineReady,
    StartEngine,
    StartFailed,
    StopEngine,
    ToEngine,
    WayChosen,
)
from tandem.server.ranks.processes import RankProcesses, rank_processes
from tandem.server.sleep import until_any

REAL_ENGINE = "tandem.server.engine_process:load_engine"
START_ATTEMPTS = 5  # consecutive starts that never became ready, after the first success
FIRST_ATTEMPTS = 2  # before it, where a signal from outside ended one: the next would take as long, and as much memory
LONGEST_PAUSE_SECONDS = 30.0
STABLE_SECONDS = 60.0  # an engine that lived this long is restarted at once
LAST_WORDS_SECONDS = 0.1  # after the process ended, for messages still on their way
STOP_SECONDS = 3.0  # for a clean exit, before kill

log = logging.getLogger("tandem.server")


class _EngineLife(enum.Enum):
    """How one engine process ended."""

    STOPPED = "stopped"
    NEVER_READY = "never ready"
    DIED = "died"
    SLEPT = "slept"


class EngineSupervisor:
    """`run` until `stop`. `on_ready` is called with each new engine's facts before it takes requests."""

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        on_ready: Callable[[EngineReady], None],
        loader: str = REAL_ENGINE,
    ) -> None:
        self.restarts = 0
        self._config = config
        self._client = client
        self._on_ready = on_ready
        self._loader = loader
        self._context = zmq.asyncio.Context()
        self._process: asyncio.subprocess.Process | None = None
        self._send: Callable[[ToEngine], None] | None = None
        self._stopping = asyncio.Event()
        self._heard_at = 0.0
        self._start_error, self._killed_because, self._missing_rank = "", "", ""
        self._start_failed: StartFailed | None = None
        self._loaded = self._was_killed = False
        self._way: WayChosen | None = None  # of this engine process; None: flags say it
        self._failed_ways: dict[str, str] = {}  # flags of those that were chosen, and why they did not start

    @property
    def engine_pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Lives, deaths and restarts. Raises EngineError when the engine cannot be started (again), ConfigError when
        what was asked cannot be met."""
        short_lives = failed_starts = lives = failed_wakes = 0
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                how = await self._one_life()
                if how is _EngineLife.STOPPED:
                    return
                if how is _EngineLife.NEVER_READY and self._leaves_way():
                    continue
                if self._client.sleep.asleep:
                    failed_wakes = failed_wakes + 1 if how is _EngineLife.NEVER_READY else 0
                    await self._rest(failed_wakes)
                    continue
                failed_starts = failed_starts + 1 if how is _EngineLife.NEVER_READY else 0
                lives += how is _EngineLife.DIED
                attempts = START_ATTEMPTS if lives else FIRST_ATTEMPTS if self._was_killed else 1
                if failed_starts >= attempts:
                    rejected = self._start_failed is not None and self._start_failed.refused and lives == 0
                    raise (ConfigError if rejected else EngineError)(self._why_not_started())
                if failed_starts:
                    when = "again" if lives else "and is started once more"
                    log.error("the engine could not be started %s: %s", when, self._start_error)
                short_lives = short_lives + 1 if time.monotonic() - began < STABLE_SECONDS else 0
                await self._pause(short_lives)
                self.restarts += 1
        finally:
            self._context.destroy(linger=0)

    def _leaves_way(self) -> bool:
        """Whether the engine is to start otherwise: it did not where it has chosen to use several GPUs, and no other
        flag or file was the reason."""
        way, error = self._way, self._start_failed
        if way is None or way.ranks * way.stages == 1:
            return False
        if error is not None and (error.of_files or (error.refused and not error.of_gpus)):
            return False
        self._failed_ways[way.flag] = self._start_error
        log.warning("%s was chosen and did not start: %s; starting without it", way.flag, self._start_error)
        return True

    def _why_not_started(self) -> str:
        """The reason of the last start, and of those over several GPUs before it."""
        ways = (f"{flag} was chosen and did not start: {why}" for flag, why in self._failed_ways.items())
        return "; ".join((self._start_error, *ways))

    def _keep_way(self) -> None:
        """Later starts do as the one that was ready."""
        if self._way is not None:
            self._config = with_way_kept(self._config, self._way.ranks, self._way.stages)
            self._failed_ways = {}

    async def stop(self) -> None:
        """Let `run` end: the engine is asked to exit, and killed if it does not."""
        self._stopping.set()
        if self._send is not None:
            self._send(StopEngine())

    async def _rest(self, failed_wakes: int) -> None:
        """Until a request wants the engine. One that could not be loaded again: the requests that waited are told why,
        and the next one tries again."""
        sleep = self._client.sleep
        sleep.released.set()
        if failed_wakes:
            why = f"the model could not be loaded again: {self._start_error}"
            log.error("%s", why)
            sleep.failed()
            self._client.detach(why)
            await self._pause(failed_wakes, "%d wakes in a row failed; after %.0f s the next request tries again")
            self._client.fall_asleep()
        await until_any(sleep.wanted, self._stopping)
        if not self._stopping.is_set():
            log.info("a request wakes the engine")

    async def _pause(
        self, failures: int, note: str = "the engine ended %d times in a row; next start in %.0f s"
    ) -> None:
        """No wait after the first, then 1, 2, 4 … seconds. note: for the log, of `failures` and the seconds."""
        seconds = pause_seconds(failures)
        if not seconds:
            return
        log.warning(note, failures, seconds)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _one_life(self) -> _EngineLife:
        self._start_failed = self._way = None
        try:
            with (
                rank_processes(self._may_have_ranks()) as ranks,
                private_endpoint() as endpoint,
                self._context.socket(zmq.DEALER) as socket,
            ):
                socket.set_hwm(0)
                socket.linger = 0
                socket.bind(endpoint)
                self._process = await self._spawn(endpoint)
                return await self._attend(socket, self._process, endpoint, ranks)
        except (OSError, zmq.ZMQError) as error:  # nothing was started: later there may be room for it
            self._start_error = f"no engine process can be started ({error}); free some memory, or end other processes"
        except EngineError as error:
            self._start_error = str(error)
        finally:
            self._send = None
        return _EngineLife.NEVER_READY

    def _may_have_ranks(self) -> bool:
        """Engines of tests and benches choose nothing."""
        chooses = self._loader == REAL_ENGINE and way_is_open(self._config) and may_have_gpus()
        return self._config.tensor_parallel_size > 1 or chooses

    async def _spawn(self, endpoint: str) -> asyncio.subprocess.Process:
        """The child shares the terminal, so its progress and plan lines are seen as they come."""
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "tandem.server.engine_process",  # nothing of the current directory is imported
            "--endpoint", endpoint, "--parent", str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def _attend(
        self, socket: zmq.asyncio.Socket, process: asyncio.subprocess.Process, endpoint: str, ranks: RankProcesses
    ) -> _EngineLife:
        """Listen to one process until it ends, for whatever reason; never leaves it running, nor other ranks."""
        self._send = lambda message: _send_now(socket, message)
        self._start_error, self._killed_because, self._missing_rank = "", "", ""
        self._loaded = self._was_killed = False
        self._client.sleep.starts()
        config = dataclasses.replace(self._config, api_key=None)  # the engine asks nobody for it
        failed = list(self._failed_ways)
        self._send(StartEngine(config=config, loader=self._loader, ranks=ranks.endpoint, failed=failed))
        listening = asyncio.create_task(self._listen(socket, endpoint, ranks))
        watching = asyncio.create_task(self._watch(process))
        stopping = asyncio.create_task(self._stop_in_time(process))
        sleeping = asyncio.create_task(self._sleep_in_time(process))
        try:
            if config.tensor_parallel_size > 1:
                await ranks.start(config.tensor_parallel_size)
            code = await self._outlive(process, listening, ranks)
            return self._ended(code)
        finally:
            for task in (listening, watching, stopping, sleeping):
                task.cancel()
            if process.returncode is None:
                _kill(process)
                await process.wait()
            await ranks.end()

    async def _outlive(
        self, process: asyncio.subprocess.Process, listening: asyncio.Task[None], ranks: RankProcesses
    ) -> int:
        """The exit code. An engine that we cannot understand (any more), or that has lost a rank, is killed."""
        ended, lost = asyncio.create_task(process.wait()), asyncio.create_task(ranks.lost())
        await asyncio.wait({ended, listening, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():  # what it said last may still be on its way
            await asyncio.wait({listening}, timeout=LAST_WORDS_SECONDS)
        if listening.done() and (error := listening.exception()) is not None:
            self._start_error = str(error)
            self._killed_because = "it could not be understood"
            log.error(
                "lost the engine: %s", error, exc_info=None if isinstance(error, TandemError) else error
            )
            _kill(process)
        lost.cancel()
        if not self._killed_because and (why := ranks.why_ended(process.returncode, self._missing_rank)):
            self._killed_because = why
            _kill(process)
        return await ended

    def _ended(self, code: int) -> _EngineLife:
        if self._stopping.is_set():
            self._client.detach("the server is stopping")
            return _EngineLife.STOPPED
        asleep = self._client.sleep.asleep
        if self._loaded and asleep:
            return _EngineLife.SLEPT
        reason = self._killed_because or exit_reason(code)
        if not asleep:  # else what waits is told why it cannot be loaded
            self._client.detach(f"the engine process ended ({reason}) and is being restarted; try again")
        if self._loaded:
            log.error("the engine process ended (%s); restarting it", reason)
            return _EngineLife.DIED
        self._was_killed = not self._start_error and "SIGKILL" in reason  # or a rank was
        self._start_error = self._start_error or f"the engine process ended at start ({reason})"
        return _EngineLife.NEVER_READY

    async def _listen(self, socket: zmq.asyncio.Socket, endpoint: str, ranks: RankProcesses) -> None:
        while True:
            message = engine_client.decode(await socket.recv())
            self._heard_at = time.monotonic()
            match message:
                case EngineConnected():
                    forget(endpoint)
                case WayChosen():
                    self._way = message
                    await ranks.start(message.ranks)
                case EngineReady():
                    self._keep_way()
                    await asyncio.to_thread(self._on_ready, message)
                    self._loaded = True
                    seconds = self._client.sleep.loaded()
                    if self._send is not None:
                        self._client.attach(self._send)
                    if seconds is not None:
                        log.info("the engine is awake after %.1f s", seconds)
                    elif self.restarts:
                        log.info("the engine is ready again")
                case StartFailed():
                    self._start_failed, self._start_error = message, message.message
                    if self._send is not None:
                        self._send(StopEngine())  # it waits until it is heard
                case EngineEnds(message=text):
                    self._missing_rank = text
                    if self._process is not None:  # to take its memory apart would take seconds
                        _kill(self._process)
                case _:
                    self._client.deliver(message)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill an engine that was ready and has said nothing for `--watchdog-timeout`. Time in which this process stood
        still (Ctrl+Z, a container that is paused) does not count: the engine stood still, too."""
        limit = self._config.watchdog_timeout
        pause = min(1.0, limit / 4)
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(pause)
            delay = time.monotonic() - slept_at - pause
            self._heard_at += delay if delay > pause else 0.0
            silent = time.monotonic() - self._heard_at
            if self._client.ready and silent > limit:
                self._killed_because = f"it was stuck for {silent:.0f} s, --watchdog-timeout is {limit:g}"
                log.error("the engine is killed: %s", self._killed_because)
                _kill(process)
                return

    async def _sleep_in_time(self, process: asyncio.subprocess.Process) -> None:
        """With its process all memory of the engine is given back."""
        sleep = self._client.sleep
        await sleep.until_due()
        sleep.begins()
        self._client.fall_asleep()
        log.info("nobody uses the engine: it sleeps until the next request")
        if self._send is not None:
            self._send(StopEngine())
        await asyncio.sleep(STOP_SECONDS)
        _kill(process)

    async def _stop_in_time(self, process: asyncio.subprocess.Process) -> None:
        await self._stopping.wait()
        if self._loaded:  # else it does not listen yet
            await asyncio.sleep(STOP_SECONDS)
        _kill(process)


def pause_seconds(failures: int) -> float:
    """Before the next try, after so many that failed in a row."""
    return 0.0 if failures <= 1 else min(2.0 ** min(failures - 2, 10), LONGEST_PAUSE_SECONDS)


def _kill(process: asyncio.subprocess.Process) -> None:
    """It may have ended."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _send_now(socket: zmq.asyncio.Socket, message: ToEngine) -> None:
    """Without a high-water mark a send never waits, so its future is complete and holds nothing to await."""
    socket.send(engine_client.encode(message))
