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
from tandem.kernels.gpu.dependent_launch import can_overlap
from tandem.kernels.gpu.nvrtc import compiled, cuda_source, launch
from tandem.kernels.gpu.ranks.lane_memory import LaneMemory
from tandem.kernels.ranks.meeting import Meeting
from tandem.planner.ranks.ranked import MOST_GPU_RANKS

THREADS, LINES, LINE_BYTES = 512, 2048, 16  # of a block, and of a piece of a long message, as in lane.cu
SHORT_BLOCKS, LONG_BLOCKS = 128, 128
SHORT_BYTES = {"peer": 512 << 10, "host": 128 << 10}
"""Messages up to here carry a number in every line: twice the bytes, one way less. SHORT_BLOCKS have room for them."""
TWO_SHOT_BYTES = 4 << 20
"""Sums of more than two ranks from here on go in two shots: each rank sums its part, then all gather the parts."""
COPY, BF16, F32 = range(3)
PATIENCE, STATE_WORDS = 2, 4


def source(rank: int, ranks: int) -> str:
    return f"enum {{ kRank = {rank}, kRanks = {ranks} }};\n{cuda_source(__file__)}"


@cache
def kernels(device_index: int | None, rank: int, ranks: int) -> list[Any]:
    """short_sum, long_sum and scatter_sum, on a device; None: the current one."""
    return compiled(source(rank, ranks), ("short_sum", "long_sum", "scatter_sum"), device_index)


def graph_seconds(run: Callable[[], object], times: int, replays: int = 5) -> float:
    """Seconds of one of so many runs in a CUDA graph; the best replay counts."""
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
        """It has no patience before `be_patient`. Raises EngineError on every rank where one of them cannot use it."""
        self.name, self.ranks, self.rank, self.device = lane, meeting.ranks, meeting.rank, device
        self._short, self._long, self._scatter = kernels(device.index, self.rank, self.ranks)
        pieces = 2 * self.ranks * LINE_BYTES  # of a block, and a line
        self._numbers = LONG_BLOCKS * LINES * pieces
        self._long_at = SHORT_BLOCKS * THREADS * pieces
        nbytes = self._long_at + self._numbers + LONG_BLOCKS * 2 * self.ranks * 4
        self._memory = LaneMemory(lane, nbytes, meeting)
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        self._counts = torch.zeros(2, max(SHORT_BLOCKS, LONG_BLOCKS), dtype=torch.int32, device=device)
        self._stopped = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def be_patient(self, seconds: float) -> None:
        """So long does a sum wait for other ranks from now on, those in recorded graphs as well."""
        self._state[PATIENCE:] = torch.tensor([int(seconds * 1e9)]).view(torch.int32).to(self.device)

    def send(self, x: Tensor, out: Tensor, kind: int) -> None:
        """x: contiguous, of a multiple of 16 bytes. COPY: x [rows, n], each row a multiple of 16 bytes, too, and out
        [rows, ranks, n]. Starts kernels on the current stream."""
        nbytes = x.numel() * x.element_size()
        part, row = nbytes // self.ranks, x.shape[-1] * x.element_size()
        if nbytes <= SHORT_BYTES[self.name]:
            sizes = np.uint32(nbytes // 8), np.int32(kind), np.uint32(row // 8)
            self._launch(self._short, -(-nbytes // (8 * THREADS)), 0, x.data_ptr(), out.data_ptr(), sizes)
        elif kind == COPY or not self.in_two_shots(nbytes):
            self._launch_long(self._long, x.data_ptr(), out.data_ptr(), nbytes, kind, row)
        else:
            self._launch_long(self._scatter, x.data_ptr(), out.data_ptr(), part, kind, part)
            self._launch_long(self._long, out.data_ptr() + self.rank * part, out.data_ptr(), part, COPY, part)

    def in_two_shots(self, nbytes: int) -> bool:
        """Whether a sum so long is. With two ranks one shot moves as many bytes."""
        return self.ranks > 2 and nbytes >= TWO_SHOT_BYTES and nbytes % (16 * self.ranks) == 0

    def _launch_long(self, kernel: Any, x: int, out: int, nbytes: int, kind: int, row: int) -> None:
        """row: bytes that lie side by side where they are gathered."""
        blocks = min(LONG_BLOCKS, -(-nbytes // (16 * THREADS)))
        sizes = np.uint64(nbytes // 16), np.int32(kind), np.uint32(row // 16), np.uint64(self._numbers)
        self._launch(kernel, blocks, self._long_at, x, out, sizes)

    def _launch(self, kernel: Any, blocks: int, start: int, x: int, out: int, sizes: tuple[Any, ...]) -> None:
        """x, out: addresses. start: of the messages' memory in a lane's."""
        memories = [each + start for each in self._memory.addresses] + [0] * (MOST_GPU_RANKS - self.ranks)
        launch(
            kernel, blocks, THREADS, torch.cuda.current_stream(self.device).cuda_stream,
            x, out, *memories, self._state.data_ptr(), self._counts[0 if start == 0 else 1].data_ptr(),
            self._stopped.data_ptr(), *sizes, overlap=can_overlap(self.device),
        )  # fmt: skip

    def check(self) -> None:
        """Raises RankLost where a sum was not answered."""
        if rank := int(self._stopped[0]):
            raise RankLost(f"rank {rank - 1} did not answer a sum of rank {self.rank} in time")
