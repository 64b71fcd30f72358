"""A made-up machine whose bus and CPU share the experts of prompts, as `ExpertStream` decides. Nothing is computed: it
is known how long each side takes, and steps say so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tandem.experts.streaming.measured import cpu_rates
from tandem.experts.streaming.stream import ExpertStream, Layers, StreamReadings
from tandem.planner.forecast.stream_rates import (
    BUS_BESIDE,
    GRAPH_BASE,
    GRAPH_ROW,
    HOST_BASE,
    HOST_ROW,
    HOST_SECONDS,
    SPLIT_SECONDS,
    StreamRates,
)
from tandem.spec.gpu_scratch import StagingRing

LAYERS, EXPERTS, TOP_K = 4, 64, 4  # in CPU memory; of a token's experts so many are there
EXPERT_BYTES = 2_654_208  # Qwen3-30B-A3B in int4
TILE_ROWS = 16  # of an expert, from which on a row takes the CPU less
NOISE = 0.1  # both sides' times are between 1 - NOISE and 1 + NOISE of their mean
GRAPH_ROWS = 2048  # of the largest graph in which both sides have a part
SHOWN = 3  # prompts in a row that are within a tenth of the best: the share is found then


class FakeCopies:
    """A bus whose copies need not be made."""

    def copy(self, source: int, target: int, nbytes: int) -> None: ...

    def copies_given(self) -> None: ...

    def computing_given(self) -> None: ...

    def compute_after(self, copies: Any) -> None: ...

    def copy_after(self, computing: Any) -> None: ...

    def finish(self) -> None: ...


class FakeLayer:
    """`EXPERTS` experts in CPU memory, each in the place of its number."""

    cpu_slots, first_key = EXPERTS, 0
    cpu = SimpleNamespace(num_experts=EXPERTS, bytes_per_expert=EXPERT_BYTES)

    def expert_cpu_slots(self, moving: bool = False) -> list[int]:
        return list(range(EXPERTS))

    def runs(self, cpu_slots: Iterable[int]) -> list[tuple[int, int, int]]:
        return []


@dataclass(frozen=True, slots=True)
class Sides:
    """True seconds. bus: of all of a layer's experts; read: of one expert by the CPU; row: of each of its rows, in
    tiles; few_rows: of one that is in none."""

    bus: float = EXPERTS * EXPERT_BYTES / 55e9
    read: float = 18e-6
    row: float = 1.2e-6
    few_rows: float = 1.7e-6
    call: float = 4e-5

    def times(self, factor: float) -> Sides:
        """Those of larger experts."""
        return Sides(*(factor * each for each in astuple(self)))

    def cpu(self, pairs: np.ndarray) -> float:
        """The CPU's for experts of so many rows each."""
        if not pairs.any():
            return 0.0
        rows = np.minimum(pairs, TILE_ROWS) * self.few_rows + np.maximum(0, pairs - TILE_ROWS) * self.row
        return float(self.call + (self.read * (pairs > 0) + rows).sum())

    def layer(self, rows: int, streamed: int, cpu: float, in_graphs: bool) -> float:
        """Seconds of a layer of which so many experts are streamed; cpu: of the CPU's part."""
        bus = streamed / EXPERTS * self.bus
        if streamed == EXPERTS:
            return bus
        if in_graphs:
            return max(bus * BUS_BESIDE, GRAPH_BASE + rows * GRAPH_ROW + cpu)
        if streamed == 0:
            return cpu + min(HOST_SECONDS, HOST_BASE + rows * HOST_ROW)
        return max(bus + SPLIT_SECONDS, HOST_SECONDS + cpu)


def start_rates(sides: Sides, wrong: float) -> StreamRates:
    """As the start measures them, in which the CPU takes `wrong` times as long."""
    rates = cpu_rates(lambda rows: wrong * sides.cpu(np.full(EXPERTS, rows * TOP_K / EXPERTS)))
    return replace(rates, bus=sides.bus)


@dataclass
class MadeUpMachine:
    """Prompts one after the other, alone. wrong: times as slow as it is the start finds the CPU; skew: of the routers,
    0.0: all experts are chosen alike; graphs: layers are; busy: times as long as usual the CPU takes now."""

    wrong: float = 1.0
    seed: int = 0
    skew: float = 0.0
    graphs: bool = True
    sides: Sides = field(default_factory=Sides)
    busy: float = 1.0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        popular = (1 + np.arange(EXPERTS)) ** -self.skew
        self.popular = np.stack([self._random.permutation(popular / popular.sum()) for _ in range(LAYERS)])
        self._tokens = np.zeros((LAYERS, EXPERTS), np.int64)
        self._served, self._best = 0.0, dict[int, float]()
        self.rates = start_rates(self.sides, self.wrong)
        readings = StreamReadings(served=lambda: self._served, ask=lambda: self, moves=lambda: 0)
        layers: Any = [FakeLayer() for _ in range(LAYERS)]
        ring = StagingRing(6, 50, 256)
        self.stream = ExpertStream(layers, ring, FakeCopies(), self.rates, torch.device("cpu"), readings)
        self.stream._tables._send = lambda: None  # type: ignore[method-assign]  # there is no GPU

    def tokens(self) -> np.ndarray:
        """Rows of each expert since the start, as the GPU counts them."""
        return self._tokens

    def prompt(self, rows: int) -> tuple[float, float]:
        """Seconds of a prompt's experts without noise, and the share that was streamed."""
        pairs = np.stack([self._random.multinomial(rows * TOP_K, each) for each in self.popular])
        split = self.graphs and rows <= GRAPH_ROWS and self.stream.splits(rows)
        self.stream.begin(rows, layers=Layers.SPLIT if split else Layers.GIVEN)
        self._tokens = self._tokens + pairs
        seconds = sum(self._layer(index, rows, pairs[index], split) for index in range(LAYERS))
        for number in range(len(self.stream.deliveries._list)):
            self.stream._read(number)
        return seconds, sum(self.stream.counts.values()) / (LAYERS * EXPERTS)

    def ratio(self, rows: int) -> float:
        """Seconds of another prompt ÷ those with the best share."""
        return self.prompt(rows)[0] / self.best(rows)

    def _layer(self, index: int, rows: int, pairs: Any, in_graphs: bool) -> float:
        count = self.stream.counts.get(index, 0)
        left = self.stream.deliveries._order_of(index)[count:]
        cpu = self.sides.cpu(pairs[left])
        self._served += cpu * self.busy * (1 + NOISE * self._random.uniform(-1, 1))
        return self.sides.layer(rows, count, cpu, in_graphs)

    def best(self, rows: int) -> float:
        """Seconds of a prompt of so many rows with the best share and the best order, on average."""
        if rows not in self._best:
            self._best[rows] = self._best_of(rows)
        return self._best[rows]

    def _best_of(self, rows: int) -> float:
        pairs = -np.sort(-self.popular) * rows * TOP_K
        graphs = self.graphs and rows <= GRAPH_ROWS
        counts = range(1 if graphs else 0, EXPERTS + 1)
        return sum(
            min(self.sides.layer(rows, count, self.sides.cpu(each[count:]), graphs) for count in counts)
            for each in pairs
        )  # fmt: skip


def found_after(machine: MadeUpMachine, sizes: Sequence[int], most: int = 40) -> dict[int, int]:
    """Prompts of each of these sizes, in turn, before the first of `SHOWN` in a row that take a tenth more than the
    best at most; `most`: none was."""
    ratios = {rows: list[float]() for rows in sizes}
    for _ in range(most):
        for rows in sizes:
            ratios[rows].append(machine.ratio(rows))
    return {rows: next(_near_the_best(each), most) for rows, each in ratios.items()}


def _near_the_best(ratios: Sequence[float]) -> Iterator[int]:
    for first in range(len(ratios) - SHOWN + 1):
        if max(ratios[first : first + SHOWN]) <= 1.1:
            yield first


@contextmanager
def busy(machine: MadeUpMachine, times: float) -> Iterator[None]:
    """Meanwhile the CPU takes so many times as long."""
    machine.busy = times
    try:
        yield
    finally:
        machine.busy = 1.0
