"""`PlanRoom`: whether a model fits beside those that are loaded, as its plan says. A process of its own looks."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.server.front.child import Child
from tandem.server.front.models_file import ModelEntry


@dataclass(frozen=True, slots=True)
class Verdict:
    """why: it does not fit now. possible: it would, if the loaded models went."""

    why: str = ""
    possible: bool = True

    @property
    def fits(self) -> bool:
        return not self.why


class Room(Protocol):
    async def check(self, entry: ModelEntry, loaded: Sequence[Child]) -> Verdict: ...


class PlanRoom:
    """Implements `Room` by the plan of `kt serve` with the memory that is free now."""

    def __init__(self, max_loaded: int | None = None) -> None:
        self.max_loaded = max_loaded

    async def check(self, entry: ModelEntry, loaded: Sequence[Child]) -> Verdict:
        if self.max_loaded is not None and len(loaded) >= self.max_loaded:
            return Verdict(f"{self.max_loaded} models are loaded (max_loaded)")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "tandem.server.front.fits", stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        question = {"flags": entry.flags, "loaded": [child.pid for child in loaded]}
        try:
            answer, _ = await process.communicate(json.dumps(question).encode())
        except BaseException:
            process.kill()
            raise
        if process.returncode:
            return Verdict(f"{entry.name} cannot be planned: the process that does it failed", possible=False)
        return Verdict(**json.loads(answer))
