"""Streams of engines in one process, without a GPU: each has its own, and one that is made anew those of the last."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tandem.engine.step import streams
from tandem.engine.step.streams import Streams

DEVICE = torch.device("cuda", 0)


class Stream:
    """Stand-in for torch's."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.priority = priority


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(streams, "reserved_stream", lambda device, count: Stream(device, -count))
    monkeypatch.setattr(streams, "_idle", {})
    yield


def three(engine: Streams) -> list[object]:
    return [engine.steps, engine._others, engine._tasks]


def test_two_engines_share_no_stream() -> None:
    """One's graphs would be recorded with what the other gives meanwhile."""
    first, second = (Streams(DEVICE, overlap=True, reserved_sms=8) for _ in range(2))
    assert len({*three(first), *three(second)}) == 6
    assert [stream.priority for stream in three(first)] == [-1, 0, -8]  # type: ignore[attr-defined]


def test_an_engine_that_is_made_anew_has_the_streams_of_the_last() -> None:
    """Memory that one stream has freed is of no use on another."""
    engine = Streams(DEVICE, overlap=True, reserved_sms=8)
    before = three(engine)
    del engine
    gc.collect()
    assert three(Streams(DEVICE, overlap=True, reserved_sms=8)) == before
    plain = Streams(DEVICE, overlap=True)
    assert plain._tasks is plain._others


def test_streams_that_another_thread_takes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Taken(list[object]):
        """Looks as if it had some."""

        def __len__(self) -> int:
            return 1

    monkeypatch.setitem(streams._idle, (DEVICE,), Taken())
    assert isinstance(Streams(DEVICE, overlap=True).steps, Stream)
