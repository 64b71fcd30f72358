"""`TransferOrder`: which experts are streamed first. Those that had most rows lately; so the CPU has those with few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.experts.streaming.key_tables import StreamableLayer

NEWEST = 0.5  # of what is known, that one step tells
WORSE = 0.02  # of a layer's rows, too many for the CPU, before its order changes: copies are listed anew then
GRID = 100  # equal steps of the share of the experts that is streamed, for each of which the rows left are told

CpuSlots = npt.NDArray[np.int32]
Shares = npt.NDArray[np.float64]


class TransferOrder:
    """Order in which the slots of all layers are streamed. It learns between steps, from counts since the start."""

    def __init__(self, layers: Sequence[StreamableLayer | None]) -> None:
        self._layers = layers
        self._last_tokens: npt.NDArray[np.int64] | None = None
        self._recent_shares: Shares | None = None  # [layers, experts]: of a layer's rows
        self._best = [np.arange(0 if layer is None else layer.cpu_slots, dtype=np.int32) for layer in layers]
        self._arranged: dict[int, int] = {}  # for so many that are streamed
        self.left: list[float] | None = None
        """Share of the rows that the CPU has where 0, 1 / GRID, ... 1 of the experts are streamed, a mean over the
        layers. None: nothing is known."""

    def learn(self, tokens: npt.NDArray[Any], cpu_slots: CpuSlots) -> None:
        """tokens [layers, experts]: rows of each since the start, modulo 2^32; slots [layers, experts]: where each is
        in CPU memory, or -1."""
        new, self._last_tokens = self.new_rows(tokens), tokens.astype(np.int64)
        if not new.any():
            return
        shares, previous = new / np.maximum(1, new.sum(1, keepdims=True)), self._recent_shares
        if previous is not None:
            shares = np.where(new.any(1, keepdims=True), NEWEST * shares + (1 - NEWEST) * previous, previous)
        self._recent_shares = shares
        self._renew(cpu_slots)

    def new_rows(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Rows of each expert since `learn` was told, [layers, experts]. tokens: as there."""
        counts = tokens.astype(np.int64)
        return counts if self._last_tokens is None else (counts - self._last_tokens) % (1 << 32)

    def arranged(self, layer: int, count: int) -> CpuSlots | None:
        """Its slots, such that the first `count` had most rows. Within both parts they ascend, for neighbours are one
        copy, and each copy costs the bus 3 us. None: they are as they were when this was asked before."""
        if self._arranged.get(layer) == count:
            return None
        self._arranged[layer], best = count, self._best[layer]
        return np.concatenate((np.sort(best[:count]), np.sort(best[count:])))

    def _renew(self, cpu_slots: CpuSlots) -> None:
        cpu_shares = []
        for index, layer in enumerate(self._layers):
            if layer is None:
                continue
            of_slot = self._of_slots(index, cpu_slots[index], layer.cpu_slots)
            best = np.argsort(-of_slot, kind="stable").astype(np.int32)
            current, candidate = (np.cumsum(of_slot[each]) for each in (self._best[index], best))
            if candidate[-1] <= 0:
                continue
            if (candidate - current).max() > WORSE * candidate[-1]:
                self._best[index], current = best, candidate
                self._arranged.pop(index, None)
            at = np.linspace(0, len(current), GRID + 1)
            sums = np.concatenate(([0.0], current))
            cpu_shares.append(1 - np.interp(at, np.arange(len(current) + 1), sums) / current[-1])
        self.left = np.mean(cpu_shares, axis=0).tolist() if cpu_shares else self.left

    def _of_slots(self, index: int, cpu_slots: CpuSlots, count: int) -> Shares:
        """Share of the layer's rows that each place's expert had, [count]."""
        assert self._recent_shares is not None
        shares = self._recent_shares[index]
        of_slot, experts = np.zeros(count), np.flatnonzero(cpu_slots[: len(shares)] >= 0)
        of_slot[cpu_slots[experts]] = shares[experts]
        return of_slot
