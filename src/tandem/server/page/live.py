"""`LiveView`: what the page's map shows. The engine is asked once a second at most, however many look."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import msgspec
import numpy as np

from tandem.engine.protocol import ExpertTraffic
from tandem.errors import EngineError
from tandem.server.state import ServerState

LOOK_SECONDS = 1.0  # between two questions to the engine
ANSWER_SECONDS = 0.5  # a viewer waits no longer for the answer: a step may take seconds


class LiveView:
    """Lives on the event loop."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._asked_at = -math.inf
        self._asking: asyncio.Task[ExpertTraffic] | None = None
        self._experts: dict[str, Any] | None = None

    async def body(self) -> bytes:
        """JSON. An engine that is down, asleep or busy with a long step leaves the last known counts."""
        await self._look()
        state = self._state
        return msgspec.json.encode(
            {
                "at": time.monotonic(),
                "model": state.model_name,
                "engine": self._engine(),
                "vision": state.images is not None,
                "open_answers": state.client.open_answers,
                "stats": state.client.stats,
                "experts": self._experts,
            }
        )

    def _engine(self) -> dict[str, Any]:
        client, draining = self._state.client, self._state.draining
        up = client.ready and not draining
        why = "the server is shutting down" if draining else client.why_down
        return {
            "up": up, "why_down": "" if up else why, "restarts": self._state.restarts(),
            "asleep": client.takes_requests and not client.ready and not draining, "wakes": client.sleep.wakes,
        }  # fmt: skip

    async def _look(self) -> None:
        """One question at a time: an answer that is late is for all who have asked since."""
        now = time.monotonic()
        if self._asking is None and self._state.client.ready and now - self._asked_at >= LOOK_SECONDS:
            self._asked_at = now
            self._asking = asyncio.create_task(self._state.client.look_at_experts())
        if self._asking is None:
            return
        await asyncio.wait({self._asking}, timeout=ANSWER_SECONDS)
        if self._asking is not None and self._asking.done():
            self._take(self._asking)

    def _take(self, task: asyncio.Task[ExpertTraffic]) -> None:
        self._asking = None
        try:
            self._experts = _plain(task.result())
        except EngineError:  # it has died meanwhile; `engine` says so
            self._experts = None


def _plain(traffic: ExpertTraffic) -> dict[str, Any] | None:
    """As JSON has it; None for a dense model."""
    if not traffic.layers:
        return None
    shape = len(traffic.layers), traffic.experts
    digits = np.frombuffer(traffic.gpu_experts, np.uint8).reshape(shape) + ord("0")
    return {
        "layers": traffic.layers,
        "tokens": np.frombuffer(traffic.tokens, "<i8").reshape(shape).tolist(),
        "on_gpu": [row.tobytes().decode("ascii") for row in digits],
    }
