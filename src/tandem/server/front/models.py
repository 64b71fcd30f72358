"""`Models`: which models are loaded. One is loaded when a request names it, and the one that was used least lately goes
where memory is needed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from pathlib import Path
from typing import Any

from tandem.errors import TandemError
from tandem.server.errors import ApiError, overloaded, unavailable
from tandem.server.front.child import Child, Command, Life, socket_name
from tandem.server.front.models_file import ModelEntry, ModelsFile, changed, entry_named
from tandem.server.front.room import Room
from tandem.server.limits import MAX_OPEN_ANSWERS

log = logging.getLogger("tandem.server")


class Models:
    """Lives on the event loop."""

    def __init__(
        self, file: ModelsFile, room: Room, folder: Path, command: Command, shutdown_timeout: float,
        most_waiting: int | None = None,
    ) -> None:  # fmt: skip
        """folder: of the sockets; nobody else may enter it. shutdown_timeout: seconds for requests of a model that
        goes. most_waiting: requests for one load."""
        self._most_waiting = MAX_OPEN_ANSWERS if most_waiting is None else most_waiting
        self.stay_seconds = file.stay_seconds
        self._room, self._folder, self._command, self._drain_seconds = room, folder, command, shutdown_timeout
        self._count = 0
        self._children: dict[str, Child] = {}
        self._loading = asyncio.Lock()  # one at a time, in turn: a plan counts on the memory that is free
        self._loads: dict[Child, asyncio.Task[None]] = {}
        self._tasks = set[asyncio.Task[None]]()
        self.waits = 0  # of requests for a load
        for entry in file.entries:
            self._add(entry)

    # --- by name

    def all(self) -> list[Child]:
        return list(self._children.values())

    def loaded(self) -> list[Child]:
        """The one that was used last comes first."""
        children = [child for child in self.all() if child.life is Life.LOADED]
        return sorted(children, key=lambda child: -child.used_at)

    def named(self, name: str | None) -> Child:
        """None: the only one there is, or that is loaded. Raises ApiError 404, 400."""
        if not name and len(loaded := self.loaded()) == 1:
            return loaded[0]
        return self._children[entry_named([child.entry for child in self.all()], name).name]

    # --- use

    @contextlib.asynccontextmanager
    async def using(self, child: Child) -> AsyncIterator[Child]:
        """`child`, loaded, and it stays so meanwhile. Raises ApiError 503 with the reason."""
        await self.acquire(child)
        try:
            yield child
        finally:
            child.done()

    async def acquire(self, child: Child) -> None:
        """Returns once it is loaded; `child.done()` ends the use. Raises ApiError 503, 429. A caller that is cancelled
        stops no load: others may wait for it."""
        if child.life is Life.LOADED:
            child.use()
            return
        if child.waiting >= self._most_waiting:
            raise overloaded(f"{child.waiting} requests wait for {child.name} to be loaded; try again later")
        child.waiting += 1
        try:
            await self._acquire(child)
        finally:
            child.waiting -= 1

    async def _acquire(self, child: Child) -> None:
        while child.life is Life.DRAINING:
            await child.gone.wait()
        if self._children.get(child.name) is not child:
            raise unavailable(f"{child.name} is not served any more")
        child.use()  # now: it must not go again before its first request has come through
        try:
            if child.life is not Life.LOADED:
                child.check_pause()
                self.waits += 1
                await asyncio.shield(self._loads.get(child) or self._begin(child))
        except BaseException:
            child.done()
            raise

    def _begin(self, child: Child) -> asyncio.Task[None]:
        task = asyncio.create_task(self._load(child))
        self._loads[child] = task
        task.add_done_callback(lambda done: self._forget_load(child, done))
        return task

    def _forget_load(self, child: Child, done: asyncio.Task[None]) -> None:
        del self._loads[child]
        if not done.cancelled():
            done.exception()  # whoever waited has it

    async def _load(self, child: Child) -> None:
        async with self._loading:
            try:
                await self._make_room(child)
                await child.start()
            except TandemError as error:
                child.failed(str(error))
                log.error("%s", error)
                raise error if isinstance(error, ApiError) else unavailable(str(error)) from error
            for watcher in child.watchers:
                watcher.cancel()
            child.watchers = [
                asyncio.create_task(work) for work in (child.ended(), self._sleep_in_time(child))
            ]

    async def _make_room(self, child: Child) -> None:
        """Raises ApiError 503 with the plan's reason."""
        while True:
            await self._until_drained()
            others = self.loaded()
            verdict = await self._room.check(child.entry, others)
            if verdict.fits:
                return
            if not verdict.possible or not others:
                raise unavailable(f"{child.name} cannot be loaded: {verdict.why}")
            await self._unload_least_used(child, verdict.why)

    async def _until_drained(self) -> None:
        """Models that are on their way out still hold their memory."""
        while draining := [child for child in self.all() if child.life is Life.DRAINING]:
            await draining[0].gone.wait()

    async def _unload_least_used(self, child: Child, why: str) -> None:
        """One that was loaded only just stays a while: two models that take turns would do nothing but load."""
        victim = self.loaded()[-1]
        stays = victim.loaded_at + self.stay_seconds - time.monotonic()
        if stays > 0:
            log.info("%s waits %.0f s: %s was loaded only just", child.name, stays, victim.name)
            await asyncio.sleep(stays)
            return
        log.info("%s goes for %s: %s", victim.name, child.name, why)
        await self.unload(victim)

    async def unload(self, child: Child) -> None:
        """Requests that run finish first, and those that come wait for the next load."""
        if child.life is Life.LOADED:
            child.drain()
            await child.stop(self._drain_seconds)
        elif child.life is Life.DRAINING:
            await child.gone.wait()

    async def _sleep_in_time(self, child: Child) -> None:
        """Its time without a request is over."""
        await child.sleep.until_due()
        log.info("nobody uses %s", child.name)
        await self.unload(child)

    def _follow(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- all of them

    def preload(self) -> None:
        for child in self.all():
            if child.entry.preload:
                self._loads.get(child) or self._begin(child)

    def replace(self, file: ModelsFile) -> None:
        """The file was read again. What has gone from it, or is another model now, is unloaded."""
        self.stay_seconds = file.stay_seconds
        new = {entry.name: entry for entry in file.entries}
        for name, child in list(self._children.items()):
            if name in new and not changed(child.entry, new[name]):
                child.entry = new.pop(name)
                child.sleep.usually(child.entry.sleep_idle_seconds)
                continue
            del self._children[name]
            self._follow(self._remove(child))
        for entry in new.values():
            self._add(entry)
        self._children = {entry.name: self._children[entry.name] for entry in file.entries}
        self.preload()

    async def _remove(self, child: Child) -> None:
        if (load := self._loads.get(child)) is not None:
            load.cancel()
            await asyncio.wait({load})
        await self.unload(child)

    def _add(self, entry: ModelEntry) -> None:
        self._count += 1
        self._children[entry.name] = Child(entry, self._folder / socket_name(self._count), self._command)

    def hurry(self) -> None:
        """Requests that still run have had their time."""
        self._drain_seconds = 0.0

    async def close(self) -> None:
        """The server ends, after its requests."""
        for load in list(self._loads.values()):
            load.cancel()
        await _all(self._loads.values())
        await _all([asyncio.create_task(self.unload(child)) for child in self.all()])
        await _all(self._tasks)
        for child in self.all():
            for watcher in child.watchers:
                watcher.cancel()


async def _all(tasks: Iterable[asyncio.Task[None]]) -> None:
    if tasks := list(tasks):
        await asyncio.wait(tasks)


