"""What is fetched into a GPU's cache while the CPU computes a layer's experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tandem.kernels.ops import SureRead, Waiting

pytest.importorskip("triton")
from tandem.kernels.gpu.memory import ahead


class Experts:
    def __init__(self, elsewhere: bool) -> None:
        self.elsewhere, self.meanwhile = elsewhere, lambda: None


def matrix(nbytes: int, name: str = "pool") -> SureRead:
    return SureRead(cast(Any, SimpleNamespace(**{name: torch.zeros(nbytes, dtype=torch.uint8)})))


def memory(read: SureRead) -> torch.Tensor:
    return next(value for value in vars(read.weights).values() if isinstance(value, torch.Tensor))


def test_what_lies_between_two_layers_experts_is_fetched_up_to_a_limit() -> None:
    codes, numbers, behind = matrix(4096), matrix(640, "weight"), matrix(4096)
    experts = [SureRead(cast(Any, Experts(True))) for _ in range(2)]
    reads = [experts[0], codes, SureRead(cast(Any, SimpleNamespace(bias=None))), numbers, experts[1], behind]
    found = list(ahead._following(reads, 0))
    assert [each.data_ptr() for each in found] == [memory(codes).data_ptr(), memory(numbers).data_ptr()]
    starts = [each.data_ptr() for each in found]
    for most, sizes in ((1 << 20, [4096, 640]), (4100, [4096]), (4096 + 100, [4096, 96]), (1000, [992]), (8, [])):
        assert ahead._first(iter(found), most) == list(zip(starts, sizes, strict=False))
    assert [each.data_ptr() for each in ahead._following(reads, 4)] == [memory(behind).data_ptr()]


def test_only_those_that_wait_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "can_overlap", lambda device: True)
    monkeypatch.setattr(ahead, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1 << 20))
    monkeypatch.setattr(ahead.torch, "tensor", lambda ranges, device: ranges)
    fetched: list[Any] = []
    monkeypatch.setattr(ahead, "_fetch", fetched.append)
    waits, alone = Experts(True), Experts(False)
    assert isinstance(waits, Waiting)
    first, second = matrix(64), matrix(128)
    reads = [SureRead(cast(Any, waits)), first, SureRead(cast(Any, alone)), second]
    ahead.plan_ahead(reads, torch.device("cuda"))
    waits.meanwhile()
    alone.meanwhile()
    assert fetched == [[(memory(first).data_ptr(), 64)]]
    ahead.plan_ahead(reads, torch.device("cpu"))
