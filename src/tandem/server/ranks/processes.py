"""`RankProcesses`: the processes of all ranks but the first, which is the engine process. All end with one of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator

from tandem.process.children import exit_reason
from tandem.server.endpoint import private_endpoint


class RankProcesses:
    """endpoint: where they and the engine process meet; "" where there are no others."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self._started = endpoint, asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._processes: dict[int, Process] = {}

    async def start(self, ranks: int) -> None:
        """ranks: with the engine's. Raises OSError where a process cannot be started. Who no longer waits for it leaves
        none that `end` does not know."""
        self._starting = asyncio.create_task(self._start(ranks))
        await asyncio.shield(self._starting)

    async def _start(self, ranks: int) -> None:
        for rank in range(1, ranks):
            self._processes[rank] = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "tandem.server.ranks.process",
                "--endpoint", self.endpoint, "--rank", str(rank), "--parent", str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        if ranks > 1:
            self._started.set()

    async def lost(self) -> None:
        """Until one of them has ended, which none does by itself."""
        await self._started.wait()
        waiting = [asyncio.create_task(process.wait()) for process in self._processes.values()]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def why_ended(self, first: int | None, missing: str = "") -> str:
        """Which rank ended the others, and how; "": there is one. first: the engine process's exit code, if it has one.
        missing: what that said of another rank before it was ended for it. Ranks exit by themselves when they miss one,
        so one that a signal has ended comes first."""
        codes = {0: None if missing else first} | {rank: each.returncode for rank, each in self._processes.items()}
        ended = sorted((code, rank) for rank, code in codes.items() if code is not None)
        if not self._processes or not (ended or missing):
            return ""
        if missing and not (ended and ended[0][0] < 0):
            return missing
        code, rank = ended[0]
        return f"rank {rank} ended: {exit_reason(code)}"

    async def end(self) -> None:
        if self._starting is not None:
            with contextlib.suppress(OSError):
                await self._starting
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes.values():
            await process.wait()


@contextlib.contextmanager
def rank_processes(possible: bool) -> Iterator[RankProcesses]:
    """possible: several may share the model. Raises EngineError."""
    with private_endpoint() if possible else contextlib.nullcontext("") as endpoint:
        yield RankProcesses(endpoint)
