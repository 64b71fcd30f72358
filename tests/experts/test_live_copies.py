"""CUDA's driver as live placement calls it, with a driver that is not there: what it is told, and what becomes of its
refusals. The real one: test_gpu_live.py."""

from __future__ import annotations

import ctypes
import enum
import gc
import sys
from collections.abc import Iterable

import pytest
import torch

from fake_copies import CopyAsync
from tandem.errors import EngineError
from tandem.experts.live import copies as live_copies
from tandem.experts.live.copies import CudaCopies, hold_all
from tandem.experts.streaming.copy_stream import CudaCopyStream
from tandem.experts.streaming.transfers import Run, Transfers
from tandem.spec.gpu_scratch import StagingRing


class Stream:
    """Of torch, without a GPU."""

    made: int = 0
    calls: list[tuple[object, ...]]  # the driver's

    def __init__(self, device: torch.device) -> None:
        Stream.made += 1
        self.cuda_stream = 100 + Stream.made

    def synchronize(self) -> None:
        self.calls.append(("wait", self.cuda_stream))

    def wait_event(self, event: object) -> None: ...

    record_event = wait_event


class Driver:
    """`cuda.bindings.driver`."""

    class CUresult(enum.IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_OUT_OF_MEMORY = 2

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.refused: set[str] = set()
        self._function = CopyAsync(self.copy)
        self.function = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _answer(self, *call: object) -> tuple[Driver.CUresult]:
        self.calls.append(call)
        refused = call[0] in self.refused
        return (self.CUresult.CUDA_ERROR_OUT_OF_MEMORY if refused else self.CUresult.CUDA_SUCCESS,)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        return int(self._answer("copy", target, source, nbytes, stream)[0])

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Driver.CUresult]:
        return self._answer("register", address, nbytes)

    def cuMemHostUnregister(self, address: int) -> tuple[Driver.CUresult]:
        return self._answer("unregister", address)


class Layer:
    """Of `PackedExperts`, what registering needs."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._memory = address, nbytes

    def own_memory(self) -> tuple[int, int]:
        return self._memory

    cpu_slots = 1

    def runs(self, cpu_slots: Iterable[int]) -> list[Run]:
        """As a layer that is streamed has them."""
        return [(self._memory[0], 0, 64)]


def made(driver: Driver) -> CudaCopies:
    return CudaCopies(torch.device("cuda"), driver, (driver.function, 0))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    monkeypatch.setattr(live_copies, "_current_stream", lambda device: lambda: 103)
    found = Driver()
    monkeypatch.setattr(Stream, "made", 0)
    monkeypatch.setattr(Stream, "calls", found.calls, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return found


def test_each_direction_has_a_stream_of_its_own(driver: Driver) -> None:
    copies = made(driver)
    assert copies.directions == (101, 102)
    copies.in_order(5, 6, 70)
    assert driver.calls == [("copy", 6, 5, 70, 103)]


def test_a_refused_copy_says_so(driver: Driver) -> None:
    copies = made(driver)
    driver.refused.add("copy")
    with pytest.raises(EngineError, match="a copy of 30 bytes .* failed with CUDA's error 2"):
        copies.in_order(1, 2, 30)


def test_what_is_held_is_kept_and_given_back_when_copies_have_ended(driver: Driver) -> None:
    copies = made(driver)
    hold_all([Layer(4096, 1 << 20), Layer(1 << 30, 1 << 21)], copies)
    assert driver.calls == [("register", 4096, 1 << 20), ("register", 1 << 30, 1 << 21)]
    driver.calls.clear()
    del copies
    gc.collect()
    assert driver.calls[:2] == [("wait", 101), ("wait", 102)]
    assert sorted(driver.calls[2:]) == [("unregister", 4096), ("unregister", 1 << 30)]


@pytest.mark.parametrize("ended", [False, True])
def test_memory_of_streamed_experts_is_given_back_when_copies_have_ended(driver: Driver, ended: bool) -> None:
    """In a cycle of references their holder is finalized first. A step that took its copies may lag, too."""
    copies, layer = made(driver), Layer(4096, 1 << 20)
    hold_all([layer], copies)
    bus = CudaCopyStream(torch.device("cuda"), copies, driver.function)
    ring = Transfers([layer], StagingRing(1, 1, 64), bus, torch.device("cpu"))
    ring.begin({0: 1}, whole=False)
    if ended:
        ring.read(0)
    assert ring.failed != ended
    driver.calls.clear()
    cycle: list[object] = [copies, bus, ring]
    copies.cycle = cycle  # type: ignore[attr-defined]
    del copies, bus, ring, cycle
    gc.collect()
    calls = [call[0] for call in driver.calls]
    assert {call for call in driver.calls if call[0] == "wait"} == {("wait", 101), ("wait", 102), ("wait", 103)}
    assert driver.calls.index(("wait", 103)) < calls.index("unregister") and calls.count("unregister") == 1


def test_memory_that_cannot_be_registered_is_used_as_it_is(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    copies = made(driver)
    driver.refused.add("register")
    hold_all([Layer(4096, 3 << 30), Layer(1 << 40, 1 << 21)], copies)
    assert "does not register 3.0 GiB of CPU memory: CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    assert "ulimit -l" in caplog.text and len(driver.calls) == 1
    copies.in_order(4096, 2, 30)
    copies.close()
    assert [call[0] for call in driver.calls] == ["register", "copy", "wait", "wait"]


def test_without_bindings_it_says_what_to_install(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(EngineError, match="pip install cuda-core cuda-bindings"):
        CudaCopies(torch.device("cuda"))
