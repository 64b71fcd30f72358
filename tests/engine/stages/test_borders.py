"""Rows of chunks between two GPUs, whose streams are played: whatever order the driver takes, each stage reads its own
chunk, and none waits for more than it must."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.engine.stages import borders
from tandem.engine.stages.borders import BUFFERS, BetweenGpus, SameDevice, border
from tandem.engine.stages.pipeline import Pipeline

CHUNKS, ROWS = 7, 4
FIRST, SECOND = "gpu 0", "gpu 1"


class Event:
    """`torch.cuda.Event`."""

    def __init__(self) -> None:
        self.passed = False

    def record(self, stream: Stream) -> None:
        stream.give(lambda: setattr(self, "passed", True))


class Stream:
    """`torch.cuda.Stream`: what it was given, in order."""

    def __init__(self, device: str) -> None:
        self.device, self.work = device, deque[tuple[Event | None, Callable[[], object]]]()
        GPUS.streams.append(self)

    def give(self, work: Callable[[], object]) -> None:
        self.work.append((None, work))

    def wait_event(self, event: Event) -> None:
        self.work.append((event, lambda: None))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    @property
    def ready(self) -> bool:
        return bool(self.work) and (self.work[0][0] is None or self.work[0][0].passed)

    def go_on(self) -> None:
        self.work.popleft()[1]()


class Gpus:
    """Current stream of each device, and all streams."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current: dict[str, Stream] = {}

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        before, self.current[stream.device] = self.current[stream.device], stream
        yield
        self.current[stream.device] = before


GPUS = Gpus()


class Memory:
    """A tensor of rows that all have one number; `copy_` is ordered as PyTorch's: behind the current streams of both
    devices, and the target's goes on behind it."""

    dtype = "bfloat16"

    def __init__(self, device: str, rows: int = ROWS) -> None:
        self.device, self.shape, self.number = device, (rows, 8), -1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Memory:
        assert rows.stop <= len(self)
        return self

    def contiguous(self) -> Memory:
        return self

    def copy_(self, source: Memory, non_blocking: bool) -> None:
        assert non_blocking
        copying, target = GPUS.current[source.device], GPUS.current[self.device]
        copying.wait_stream(target)
        copying.give(lambda: setattr(self, "number", source.number))
        target.wait_stream(copying)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    GPUS.streams, GPUS.current = [], {}
    GPUS.current = {device: Stream(device) for device in (FIRST, SECOND)}
    cuda = SimpleNamespace(
        Stream=Stream, Event=Event, stream=GPUS.entered, current_stream=lambda device: GPUS.current[device]
    )
    empty = lambda shape, dtype, device: Memory(device, shape[0])  # noqa: E731
    monkeypatch.setattr(borders, "torch", SimpleNamespace(cuda=cuda, empty=empty))
    return GPUS


class TwoStages:
    """Each computes chunk after chunk on its GPU's current stream. The first one uses the same memory for all."""

    def __init__(self, tensors: int = 2) -> None:
        self.border = BetweenGpus(FIRST, SECOND, ROWS)  # type: ignore[arg-type]
        self.left = [Memory(FIRST) for _ in range(tensors)]
        self.begun, self.ended, self.read = list[tuple[int, int]](), list[tuple[int, int]](), list[list[int]]()

    def give(self, chunk: int) -> None:
        for memory in self.left:
            GPUS.current[FIRST].give(lambda memory=memory: setattr(memory, "number", chunk))
        GPUS.current[FIRST].give(lambda: self.ended.append((chunk, 0)))
        with self.border.crossing() as carry:
            there = [carry(memory) for memory in self.left]  # type: ignore[arg-type]
        second = GPUS.current[SECOND]
        second.give(lambda: self.read.append([memory.number for memory in there]))  # type: ignore[attr-defined]
        second.give(lambda: self.ended.append((chunk, 1)))
        second.give(lambda: [setattr(memory, "number", -2) for memory in there])  # sums are added in place
        self.border.passed()


def run(gpus: Gpus, order: random.Random, stopped: Stream | None = None) -> None:
    """Until nothing is ready. stopped: it does nothing."""
    while ready := [stream for stream in gpus.streams if stream.ready and stream is not stopped]:
        order.choice(ready).go_on()


@pytest.mark.parametrize("seed", range(40))
def test_each_stage_reads_its_own_chunk_in_any_order(gpus: Gpus, seed: int) -> None:
    """The host gives all chunks before anything runs, or some work is done in between."""
    order, stages = random.Random(seed), TwoStages()
    for chunk in range(CHUNKS):
        stages.give(chunk)
        for _ in range(order.randrange(9) if seed % 2 else 0):
            if ready := [stream for stream in gpus.streams if stream.ready]:
                order.choice(ready).go_on()
    run(gpus, order)
    assert stages.read == [[chunk, chunk] for chunk in range(CHUNKS)]
    assert not any(stream.work for stream in gpus.streams)


def test_the_first_stage_goes_on_while_the_second_one_computes(gpus: Gpus) -> None:
    """Until both buffers are full, and one chunk more waits where it is."""
    stages, order = TwoStages(), random.Random(0)
    for chunk in range(CHUNKS):
        stages.give(chunk)
    second = gpus.current[SECOND]
    while second.work and not stages.read:  # chunk 0 is read, and not ended
        order.choice([stream for stream in gpus.streams if stream.ready]).go_on()
    assert (0, 1) not in stages.ended
    run(gpus, order, stopped=second)
    assert [chunk for chunk, stage in stages.ended if stage == 0] == list(range(BUFFERS + 1))
    run(gpus, order)
    assert [chunk for chunk, stage in stages.ended if stage == 1] == list(range(CHUNKS))


def test_memory_is_taken_once(gpus: Gpus) -> None:
    """Two buffers of each tensor, of as many rows as any chunk has."""
    stages, order = TwoStages(tensors=3), random.Random(1)
    stages.give(0)
    run(gpus, order)
    for memory in stages.left:
        memory.shape = (ROWS - 1, 8)
    for chunk in range(1, CHUNKS):
        stages.give(chunk)
    buffers = stages.border._buffers
    assert len(buffers) == 3 and all([len(memory) for memory in each] == [ROWS] * BUFFERS for each in buffers)


def test_stages_on_one_device_share_the_rows() -> None:
    same, rows = border(torch.device("cpu"), torch.device("cpu"), ROWS), torch.ones(2)
    assert isinstance(same, SameDevice)
    with same.crossing() as carry:
        assert carry(rows) is rows
    same.passed()


def test_streams_run_in_order_alone(gpus: Gpus) -> None:
    """The played driver itself: without what waits for events, chunks would be mixed up."""
    stages: Any = TwoStages()
    stages.border._arriving.wait_event = stages.border._leaving.wait_event = lambda _event: None
    mixed = []
    for seed in range(20):
        for chunk in range(CHUNKS):
            stages.give(chunk)
        run(gpus, random.Random(seed))
        mixed.append(stages.read != [[chunk, chunk] for chunk in range(CHUNKS)])
        stages.read.clear()
    assert any(mixed)


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [
        ((True,), ["stage 1", "border 0"]),
        ((True, True), ["stage 1", "border 0", "stage 2", "border 1"]),
        ((True, False), ["stage 1", "stage 2", "border 0", "border 1"]),
        ((False, True), ["stage 1", "border 0", "stage 2", "border 1"]),
    ],
    ids=str,
)
def test_rows_that_stay_on_a_device_keep_their_border_busy(leaves: tuple[bool, ...], expected: list[str]) -> None:
    """A stage behind them reads what came over the border before."""
    said = list[str]()

    class Noted:
        def __init__(self, number: int) -> None:
            self.leaves, self.number = leaves[number], number

        def passed(self) -> None:
            said.append(f"border {self.number}")

    pipeline = object.__new__(Pipeline)
    pipeline._borders, pipeline._num_passed = [Noted(number) for number in range(len(leaves))], 0
    for number in range(1, len(leaves) + 1):
        if leaves[number - 1]:
            pipeline._pass_before(number - 1)
        said.append(f"stage {number}")
    pipeline._pass_before(len(leaves))
    assert said == expected
