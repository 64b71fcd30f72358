"""Experts that are streamed to stages: each stage brings its own layers, numbered through all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sessions import prompts
from staged_sessions import StagedSession
from tandem.engine.stages.hooks import StagedStart
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.experts.usage.staged_usage import StagedUsage
from tandem.kernels.reference import TorchOps


class NotedStream:
    def __init__(self, calls: list[tuple[Any, ...]], number: int) -> None:
        self.calls, self.number = calls, number

    def begin(self, rows: int, shared: bool = False) -> None:
        self.calls.append((self.number, rows, shared))

    def begin_only(self, rows: int, layers: Any) -> None:
        self.calls.append((self.number, rows, list(layers)))


def test_every_stream_begins_before_a_step(tiny_models) -> None:
    """In graphs nothing is streamed; rows that decode beside a prompt wait for it."""
    session = StagedSession(tiny_models["qwen3_moe"], 2, [TorchOps(), TorchOps()])
    batch = session.batch([(0, prompts()[0][:9])])
    calls: list[tuple[Any, ...]] = []
    start = StagedStart(session.model.stages, [NotedStream(calls, number) for number in range(2)])
    start(batch, False)
    start(batch, True)
    batch.single_rows = 1
    start(batch, False)
    start.load_kernels(batch, [1, 3])
    assert calls == [
        (0, 9, False), (1, 9, False), (0, 0, False), (1, 0, False), (0, 9, True), (1, 9, True),
        (0, 9, [1, 3]), (1, 9, [1, 3]),
    ]  # fmt: skip


def test_a_stream_begins_on_the_device_of_its_stage() -> None:
    """Triton launches on the current device, which is the last stage's elsewhere."""
    current, noted = list[int](), list[tuple[int, ...]]()

    class OnDevice:
        def __init__(self, number: int) -> None:
            self.number, self.ops = number, None

        @contextmanager
        def current(self) -> Iterator[None]:
            current.append(self.number)
            yield
            current.pop()

    class Stream(NotedStream):
        def begin(self, rows: int, shared: bool = False) -> None:
            noted.append((self.number, *current))

        def begin_only(self, rows: int, layers: Any) -> None:
            noted.append((self.number, *current))

    start = StagedStart([OnDevice(0), OnDevice(1)], [Stream([], 0), Stream([], 1)])  # type: ignore[list-item]
    batch: Any = SimpleNamespace(input_ids=[1], single_rows=0)
    start(batch, False)
    start.load_kernels(batch, [1])
    assert noted == [(0, 0), (1, 1)] * 2 and not current


def test_counts_of_a_stage_stand_where_its_layers_are() -> None:
    usage = StagedUsage([ExpertUsage(2, 4), ExpertUsage(3, 4)], torch.zeros(5, 4, dtype=torch.bool))
    for layer in range(5):
        usage.tally(layer).tokens.fill_(layer + 1)
    for number, expected in enumerate(([1, 2, 0, 0, 0], [0, 0, 3, 4, 5])):
        assert usage.ask_part(number).tokens()[:, 0].tolist() == expected


@pytest.mark.parametrize("fails", [None, 1])
@pytest.mark.parametrize("resident", [(1,), (0, 1, 2)])
def test_each_stage_brings_its_own_layers_or_none_does(
    monkeypatch, resident: tuple[int, ...], fails: int | None
) -> None:
    """Layers 0 to 2 are on the first stage, 3 and 4 on the second; resident ones have no expert on the CPU."""
    streams = pytest.importorskip("tandem.engine.stages.streams", reason="Triton is missing", exc_type=ImportError)
    numbers, made = [0, 0, 0, 1, 1], list[list[int | None]]()
    layers = [SimpleNamespace(cpu=None if i in resident else i, gpu=None, stream=None, index=0) for i in range(5)]

    def stream_of(_plan, device, given, *_: object) -> object:
        made.append(given)
        return None if device == fails else f"stream {device}"

    monkeypatch.setattr(streams, "GpuOps", object)
    monkeypatch.setattr(streams, "GpuSide", lambda *parts: parts)
    monkeypatch.setattr(streams, "registered", lambda *_: "registered")
    monkeypatch.setattr(streams, "streamed_layer", lambda cpu, _gpu, _device: cpu)
    monkeypatch.setattr(streams, "stream_of", stream_of)
    handoff = SimpleNamespace(sizes=SimpleNamespace(top_k=2))
    stage = [SimpleNamespace(ops=None, device=number, current=np.errstate) for number in range(2)]
    store = SimpleNamespace(stages=numbers, layers=layers, stores=["store"] * 2)
    sides: Any = SimpleNamespace(
        stages=stage, store=store, handoffs=SimpleNamespace(stages=[handoff] * 2), placement=None
    )
    plan: Any = SimpleNamespace(gpu=SimpleNamespace(streams_experts=True))
    found = streams.stage_streams(plan, sides, None)
    whole, calls = resident == (0, 1, 2), list[tuple[Any, ...]]()
    assert made == ([] if whole else [[0, None, 2, None, None]]) + [[None, None, None, 3, 4]]
    assert found == ([] if fails == 1 else [None if whole else "stream 0", "stream 1"])
    expected = [None] * 5 if fails == 1 else [found[number] for number in numbers]
    assert [each.stream for each in layers] == expected
    assert fails == 1 or [each.index for each in layers if each.stream] == [i for i in range(5) if expected[i]]
    noted = [None if each is None else NotedStream(calls, number) for number, each in enumerate(found)]
    StagedStart(stage, noted)(SimpleNamespace(input_ids=[1], single_rows=0), False)  # type: ignore[arg-type]
    assert [number for number, *_ in calls] == [number for number, each in enumerate(found) if each]
