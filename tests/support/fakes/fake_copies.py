"""What live placement needs of a GPU, on the CPU: slots in ordinary memory, and copies that arrive late, in any order,
or not at all."""

from __future__ import annotations

import ctypes
import random

import torch
from torch import Tensor

from tandem import _core
from tandem.errors import EngineError
from tandem.experts.live.exchange import ExchangeOutcome, LiveExchange
from tandem.kernels.packed.experts import PackedExperts


def at_once(work: _core.Meanwhile) -> None:
    """As a step with time for all of it."""
    while piece(work):
        pass


def piece(work: _core.Meanwhile) -> bool:
    """By whichever thread may do it."""
    return work.next_of_step() or work.next()


def advance(exchange: LiveExchange) -> ExchangeOutcome:
    """All that happens from the end of a step up to that of the next."""
    parts = exchange.end(), exchange.prepare()
    exchange.begin()
    names = ("done", "dropped", "stranded", "ended")
    return ExchangeOutcome(*([each for part in parts for each in getattr(part, name)] for name in names))


class FakeSlots:
    """A layer's experts "on the GPU", which sees `table`."""

    def __init__(self, slot_of: Tensor, cpu: PackedExperts, originals: list[Tensor]) -> None:
        self.slot_of, self.table = slot_of.int().clone(), slot_of.clone()
        self.bytes_per_expert, self.slots = cpu.bytes_per_expert, int(slot_of.max()) + 1
        self.memory = torch.zeros(self.slots, self.bytes_per_expert, dtype=torch.uint8)
        for expert, slot in enumerate(slot_of.tolist()):
            if slot >= 0:
                self.memory[slot] = originals[expert]

    def address(self, slot: int) -> int:
        return self.memory[slot].data_ptr()


class FakeTables:
    """Tables of these layers. `failing`: copies that fail, counted from the next one."""

    copied = 1, 2, 3  # nothing's address

    def __init__(self, layers: list[FakeSlots]) -> None:
        self._layers = layers
        self.failing: set[int] = set()

    def publish(self) -> int:
        failed, self.failing = 0 in self.failing, {turn - 1 for turn in self.failing if turn > 0}
        if failed:
            return NOT_PERMITTED
        for layer in self._layers:
            layer.table.copy_(layer.slot_of)
        return 0


CopyAsync = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
StreamQuery = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
UP, DOWN, COMPUTING = 1, 2, 3
NOT_READY, ILLEGAL_ADDRESS, NOT_PERMITTED = 600, 700, 800  # of CUDA's errors


class FakeCopies:
    """Every copy reads and writes when it arrives, which is when `arrive` says so."""

    def __init__(self, seed: int = 0, holds: int = 1 << 60) -> None:
        self.random = random.Random(seed)
        self.tables: FakeTables | None = None
        self.pending: list[tuple[int, int, int, int]] = []  # source, target, bytes, stream
        self.bytes = 0
        self.failed: set[int] = set()  # streams
        self.prompt = False  # everything arrives before anybody asks
        self.refuse = False  # uploads and downloads fail, or
        self.refuse_downloads = False
        self.fail_in_order = False  # the next copy in the GPU's order does
        self._holds = holds  # bytes
        self.held: list[tuple[int, int]] = []
        self._functions = CopyAsync(self._copy), StreamQuery(self._query)
        copy, query = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self._functions)
        self.functions = copy, query
        self.directions = UP, DOWN

    def computing(self) -> int:
        return COMPUTING

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        if stream == COMPUTING:
            return self._in_order(target, source, nbytes)
        if nbytes <= 0 or self.refuse or (self.refuse_downloads and stream == DOWN):
            return NOT_PERMITTED
        self.bytes += nbytes
        self.pending.append((source, target, nbytes, stream))
        return 0

    def _query(self, stream: int) -> int:
        if self.prompt:
            self.arrive(1.0)
        if stream in self.failed:
            self.failed.clear()
            return ILLEGAL_ADDRESS
        return NOT_READY if any(given == stream for *_, given in self.pending) else 0

    def _in_order(self, target: int, source: int, nbytes: int) -> int:
        if self.tables is not None and (source, target, nbytes) == self.tables.copied:
            return self.tables.publish()
        if self.fail_in_order:
            self.fail_in_order = False
            return NOT_PERMITTED
        ctypes.memmove(target, source, nbytes)
        return 0

    def hold(self, owner: object, address: int, nbytes: int) -> None:
        if sum(held for _, held in self.held) + nbytes > self._holds:
            raise EngineError("no more memory can be locked")
        self.held.append((address, nbytes))

    def device_buffer(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def follow(self) -> None: ...

    def in_order(self, source: int, target: int, nbytes: int) -> None:
        if self._in_order(target, source, nbytes):
            raise RuntimeError("no copy")

    def arrive(self, share: float) -> None:
        """Some of what is under way, in any order."""
        self.random.shuffle(self.pending)
        count = round(share * len(self.pending))
        for source, target, nbytes, _ in self.pending[:count]:
            ctypes.memmove(target, source, nbytes)
        self.pending = self.pending[count:]

    def fail(self) -> None:
        """Copies under way never arrive, and its streams say so once."""
        self.failed |= {stream for *_, stream in self.pending}
        self.pending = []
