"""`ShmGroup`: ranks on one host that compute on CPUs, joined by memory that they share."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref

import torch
from torch import Tensor

from tandem import _core
from tandem.errors import EngineError, RankLost

PATIENCE_SECONDS = 60.0  # ranks are apart by what one computes longer than another, and loading is not waited for
_PIECE_BYTES = 32 << 10  # of a message that is sent at once; it stays in caches
_MOST_RECEIVED_BYTES = 128 << 10  # of such pieces by all ranks
_LINE_BYTES = 64
_LANE_TYPES = (torch.bfloat16, torch.float32)


class ShmGroup:
    """`Group`. A rank that ends, or sends nothing for `seconds`, makes the others' call raise RankLost, which names it.

    The memory belongs to no file system: nothing is left when all ranks have ended, however they end, and a
    container's /dev/shm may be small. `path` is where other ranks of this host open it, while the first rank lives.
    Not thread-safe.
    """

    def __init__(
        self, rank: int, ranks: int, path: str = "", seconds: float = PATIENCE_SECONDS, *, call: int = 0
    ) -> None:
        """path: "" makes new memory. call: the number before the first one's, the same on all ranks. Raises
        EngineError where there is no memory, RankLost where the rank that has made it is gone."""
        piece = min(_PIECE_BYTES, _MOST_RECEIVED_BYTES // ranks) // _LINE_BYTES * _LINE_BYTES
        size = _core.shm_lane_bytes(ranks, piece)
        file = _opened(path) if path else _memory_file(size)
        weakref.finalize(self, os.close, file)
        self.path = path or f"/proc/{os.getpid()}/fd/{file}"
        memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        yields = ranks > len(os.sched_getaffinity(0))
        self._ranks, self._rank = ranks, rank
        lock = file if _locked(file, rank) else -1
        self._lane = _core.ShmLane(memory, rank, ranks, piece, lock, seconds, yields, call)

    def sum(self, rows: Tensor) -> Tensor:
        if rows.dtype not in _LANE_TYPES:
            return self._gathered_sum(rows)
        rows = rows.contiguous()
        self._lane.sum(rows)
        return rows

    def gather(self, columns: Tensor, whole: int) -> Tensor:
        columns, out = columns.contiguous(), columns.new_empty((len(columns), whole))
        each = -(-whole // self._ranks) * columns.element_size()
        self._lane.gather(columns.view(torch.uint8), out.view(torch.uint8), each)
        return out

    def _gathered_sum(self, rows: Tensor) -> Tensor:
        whole = self.gather(rows, self._ranks * rows.shape[1])
        first, *others = whole.split(rows.shape[1], dim=1)
        total: Tensor = first.float()
        for each in others:
            total = total + each
        return total.to(rows.dtype)


def _memory_file(size: int) -> int:
    try:
        file = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(file, 0, size)
        except OSError:
            os.close(file)
            raise
    except OSError as error:
        raise EngineError(
            f"{size >> 10} KiB of memory that ranks share cannot be had ({error.strerror}); "
            "allow more memory, or leave --tp out"
        ) from error
    return file


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RankLost(f"rank 0 has ended, or its memory cannot be opened ({path}: {error.strerror})") from error


def _locked(file: int, rank: int) -> bool:
    """Locks the rank's byte, until its process ends. False: this system has no such locks."""
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
    except OSError:
        return False
    return True
