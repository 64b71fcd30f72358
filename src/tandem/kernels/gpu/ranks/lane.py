"""`Lane`: one way between the GPUs of several ranks, and the kernels that go it (lane.cu)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.errors import RankLost
from tandem.kernels.gpu.nvrtc import compiled, cuda_source, launch
from tandem.kernels.gpu.ranks.lane_memory import LaneMemory
from tandem.kernels.ranks.meeting import Meeting

MOST_RANKS = 8
THREADS, LINES, LINE_BYTES = 512, 2048, 16  # of a block and of one of its pieces, as in lane.cu
SHORT_BLOCKS, LONG_BLOCKS = 32, 128
SHORT_BYTES = {"peer": 512 << 10, "host": 128 << 10}
"""Messages up to here carry a number in every line: twice the bytes, one way less."""
COPY, BF16, F32 = range(3)
PATIENCE, STATE_WORDS = 2, 4
START_SECONDS = 120.0  # of patience, until every rank has compiled its kernels


@cache
def kernels(device_index: int | None) -> list[Any]:
    """short_sum and long_sum, on a device; None: the current one."""
    return compiled(cuda_source(__file__), ("short_sum", "long_sum"), device_index)


def graph_seconds(run: Callable[[], object], times: int, replays: int = 5) -> float:
    """Of one of so many runs in a CUDA graph; the best replay counts."""
    run()
    graph, best = torch.cuda.CUDAGraph(), float("inf")
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(times):
            run()
    for _ in range(replays):
        torch.cuda.synchronize()
        started = perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        best = min(best, perf_counter() - started)
    return best / times


class Lane:
    """One way between ranks: its memories, and what this rank's GPU counts."""

    def __init__(self, lane: str, meeting: Meeting, device: torch.device) -> None:
        """Raises EngineError on every rank where one of them cannot use it."""
        self.name, self.ranks, self.rank, self.device = lane, meeting.ranks, meeting.rank, device
        self._short, self._long = kernels(device.index)
        pieces = 2 * self.ranks * LINES * LINE_BYTES  # of a block
        self._numbers = LONG_BLOCKS * pieces
        self._long_at = SHORT_BLOCKS * pieces
        nbytes = self._long_at + self._numbers + LONG_BLOCKS * 2 * self.ranks * 4
        self._memory = LaneMemory(lane, nbytes, meeting)
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        self._counts = torch.zeros(2, max(SHORT_BLOCKS, LONG_BLOCKS), dtype=torch.int32, device=device)
        self._told = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.be_patient(START_SECONDS)

    def be_patient(self, seconds: float) -> None:
        """So long does a sum wait for other ranks from now on, those in recorded graphs as well."""
        self._state[PATIENCE:] = torch.tensor([int(seconds * 1e9)]).view(torch.int32).to(self.device)

    def send(self, x: Tensor, out: Tensor, kind: int) -> None:
        """x: contiguous, of a multiple of 16 bytes. Starts the kernel on the current stream."""
        nbytes = x.numel() * x.element_size()
        short = nbytes <= SHORT_BYTES[self.name]
        kernel, unit, most = (self._short, 8, SHORT_BLOCKS) if short else (self._long, 16, LONG_BLOCKS)
        units = nbytes // unit
        blocks = min(most, -(-units // (THREADS if short else LINES)))
        start = 0 if short else self._long_at
        memories = [each + start for each in self._memory.addresses]
        launch(
            kernel, blocks, THREADS, torch.cuda.current_stream(self.device).cuda_stream,
            x.data_ptr(), out.data_ptr(), *memories, *[0] * (MOST_RANKS - self.ranks), self._state.data_ptr(),
            self._counts[0 if short else 1].data_ptr(), self._told.data_ptr(), np.uint64(units), np.int32(self.rank),
            np.int32(self.ranks), np.int32(kind), *([] if short else [np.uint64(self._numbers)]),
        )  # fmt: skip

    def check(self) -> None:
        """Raises RankLost where a sum was not answered."""
        if rank := int(self._told[0]):
            raise RankLost(f"rank {rank - 1} did not answer a sum of rank {self.rank} in time")
