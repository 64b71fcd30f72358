"""What live placement needs of a GPU, on the CPU: slots in ordinary memory, and copies that arrive late, in any order,
or not at all."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tandem.kernels.packed_experts import PackedExperts


class FakeSlots:
    """A layer's experts "on the GPU"."""

    def __init__(self, slot_of: Tensor, cpu: PackedExperts, originals: list[Tensor]) -> None:
        self.table = slot_of.clone()
        self.bytes_per_expert = cpu.bytes_per_expert
        self.memory = torch.zeros(int(slot_of.max()) + 1, self.bytes_per_expert, dtype=torch.uint8)
        self.fail_at = ""
        for expert, slot in enumerate(slot_of.tolist()):
            if slot >= 0:
                self.memory[slot] = originals[expert]

    def slot(self, index: int) -> Tensor:
        if self.fail_at == "slot":
            raise RuntimeError("no slot")
        return self.memory[index]

    def point(self, expert: int, slot: int) -> None:
        if self.fail_at == "leaving" and slot < 0:
            raise RuntimeError("no table")
        self.table[expert] = slot

    def slot_of_expert(self, expert: int) -> int:
        return int(self.table[expert])


class FakeCopies:
    """Every copy reads and writes when it arrives, which is when `arrive` says so."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        self.given = self.bytes = 0
        self.failed: set[int] = set()
        self.refuse = False  # uploads raise

    def pinned(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    there = pinned

    def follow(self) -> None: ...

    def upload(self, source: Tensor, target: Tensor) -> None:
        if self.refuse:
            raise RuntimeError("no copy")
        self.given += 1
        self.bytes += source.numel()
        assert source.numel() == target.numel() > 0
        self.pending.append((self.given, source, target))

    def download(self, source: Tensor, target: Tensor) -> None:
        refused, self.refuse = self.refuse, False
        self.upload(source, target)
        self.refuse = refused

    def mark(self) -> FakeMark:
        return FakeMark(self, {number for number, _, _ in self.pending} | self.failed)

    def arrive(self, share: float) -> None:
        """Some of what is under way, in any order."""
        self.random.shuffle(self.pending)
        count = round(share * len(self.pending))
        for _, source, target in self.pending[:count]:
            target.copy_(source)
        self.pending = self.pending[count:]

    def fail(self) -> None:
        """What is under way never arrives, and marks say so from now on, as CUDA's events do."""
        self.failed |= {number for number, _, _ in self.pending}
        self.pending = []


class FakeMark:
    def __init__(self, copies: FakeCopies, before: set[int]) -> None:
        self._copies, self._before = copies, before

    def passed(self) -> bool:
        if self._before & self._copies.failed:
            raise RuntimeError("a copy has failed")
        return not self._before & {number for number, _, _ in self._copies.pending}
