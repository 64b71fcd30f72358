"""What live placement needs of a GPU, on the CPU: slots in ordinary memory, and copies that arrive late, in any order,
or not at all."""

from __future__ import annotations

import ctypes
import random

import torch
from torch import Tensor

from tandem.errors import EngineError
from tandem.experts.live_copies import Copies
from tandem.experts.live_exchange import LiveExchange, Settled
from tandem.kernels.packed_experts import PackedExperts


def advance(exchange: LiveExchange) -> Settled:
    """All that happens from the end of a step to the beginning of the next."""
    ended = exchange.end()
    exchange.follow()
    begun = exchange.begin()
    return Settled(ended.done, ended.dropped + begun.dropped, ended.stranded, ended.ended + begun.ended)


class FakeSlots:
    """A layer's experts "on the GPU", which sees `table`."""

    def __init__(self, slot_of: Tensor, cpu: PackedExperts, originals: list[Tensor]) -> None:
        self.image, self.table = slot_of.clone(), slot_of.clone()
        self.bytes_per_expert = cpu.bytes_per_expert
        self.memory = torch.zeros(int(slot_of.max()) + 1, self.bytes_per_expert, dtype=torch.uint8)
        for expert, slot in enumerate(slot_of.tolist()):
            if slot >= 0:
                self.memory[slot] = originals[expert]

    def address(self, slot: int) -> int:
        return self.memory[slot].data_ptr()

    def point(self, expert: int, slot: int) -> None:
        self.image[expert] = slot

    def slot_of_expert(self, expert: int) -> int:
        return int(self.image[expert])


class FakeTables:
    """Of these layers. `failing`: publications that raise, counted from the next one."""

    def __init__(self, layers: list[FakeSlots]) -> None:
        self._layers = layers
        self.failing: set[int] = set()

    def publish(self, copies: Copies) -> None:
        failed, self.failing = 0 in self.failing, {turn - 1 for turn in self.failing if turn > 0}
        if failed:
            raise RuntimeError("no table")
        for layer in self._layers:
            layer.table.copy_(layer.image)


class FakeCopies:
    """Every copy reads and writes when it arrives, which is when `arrive` says so."""

    def __init__(self, seed: int = 0, holds: int = 1 << 60) -> None:
        self.random = random.Random(seed)
        self.pending: list[tuple[int, int, int, int]] = []
        self.given = self.bytes = 0
        self.failed: set[int] = set()
        self.refuse = False  # uploads and downloads raise, or
        self.refuse_downloads = False
        self.fail_in_order = False  # the next copy in the GPU's order raises
        self._holds = holds  # bytes
        self.held: list[tuple[int, int]] = []

    def hold(self, owner: object, address: int, nbytes: int) -> None:
        if sum(held for _, held in self.held) + nbytes > self._holds:
            raise EngineError("no more memory can be locked")
        self.held.append((address, nbytes))

    def there(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def follow(self) -> None: ...

    def upload(self, source: int, target: int, nbytes: int) -> None:
        if self.refuse:
            raise RuntimeError("no copy")
        assert nbytes > 0
        self.given += 1
        self.bytes += nbytes
        self.pending.append((self.given, source, target, nbytes))

    def download(self, source: int, target: int, nbytes: int) -> None:
        if self.refuse_downloads:
            raise RuntimeError("no download")
        self.upload(source, target, nbytes)

    def in_order(self, source: int, target: int, nbytes: int) -> None:
        if self.fail_in_order:
            self.fail_in_order = False
            raise RuntimeError("no slot")
        ctypes.memmove(target, source, nbytes)

    def mark(self) -> FakeMark:
        return FakeMark(self, {number for number, *_ in self.pending} | self.failed)

    def arrive(self, share: float) -> None:
        """Some of what is under way, in any order."""
        self.random.shuffle(self.pending)
        count = round(share * len(self.pending))
        for _, source, target, nbytes in self.pending[:count]:
            ctypes.memmove(target, source, nbytes)
        self.pending = self.pending[count:]

    def fail(self) -> None:
        """What is under way never arrives, and marks say so from now on, as CUDA's events do."""
        self.failed |= {number for number, *_ in self.pending}
        self.pending = []


class FakeMark:
    def __init__(self, copies: FakeCopies, before: set[int]) -> None:
        self._copies, self._before = copies, before

    def passed(self) -> bool:
        if self._before & self._copies.failed:
            raise RuntimeError("a copy has failed")
        return not self._before & {number for number, *_ in self._copies.pending}
