"""What the driver says when multiprocessors are to be spared; a stand-in for it answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tandem.engine.step.streams import _create
from tandem.errors import EngineError

KINDS = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm")


class Driver:
    """Of a GPU with so many multiprocessors, which it divides by eight."""

    CUdevResourceType = KINDS

    def __init__(self, count: int) -> None:
        self.count, self.flags = count, list[tuple[int, ...]]()

    def cuDeviceGetDevResource(self, number, kind):
        assert (number, kind) == (0, "sm")
        return 0, SimpleNamespace(sm=SimpleNamespace(smCount=self.count))

    def cuDevSmResourceSplitByCount(self, groups, whole, flags, least):
        taken = -(-least // 8) * 8
        return 0, [("taken", taken)], groups, ("rest", whole.sm.smCount - taken)

    def cuDevResourceGenerateDesc(self, resources, count):
        assert count == len(resources) == 1
        return 0, resources[0]

    def cuGreenCtxCreate(self, described, number, flags):
        self.flags.append((flags,))
        return 0, described

    def cuGreenCtxStreamCreate(self, context, flags, priority):
        self.flags.append((flags, priority))
        kind, count = context
        assert kind == "rest"
        return 0, 1000 + count


@pytest.mark.parametrize(("count", "left"), [(8, 124), (24, 108), (20, 108)])
def test_the_rest_is_the_streams(count, left) -> None:
    driver = Driver(132)
    assert _create(driver, 0, count) == 1000 + left
    assert driver.flags == [(1,), (1, 0)]


@pytest.mark.parametrize("count", [132, 500])
def test_all_of_them_cannot_be_spared(count) -> None:
    with pytest.raises(EngineError, match=f"--prefill-reserved-sms {count}: this GPU has 132; give fewer"):
        _create(Driver(132), 0, count)


def test_an_old_driver_is_named() -> None:
    def missing(*arguments):
        raise RuntimeError("Function cuGreenCtxCreate not found")

    driver = Driver(132)
    driver.cuGreenCtxCreate = missing
    with pytest.raises(EngineError, match="cuGreenCtxCreate is missing. It needs CUDA 12.4"):
        _create(driver, 0, 8)


def test_an_error_of_the_driver_is_told() -> None:
    driver = Driver(132)
    driver.cuDevSmResourceSplitByCount = lambda *arguments: (914, None, None, None)
    with pytest.raises(EngineError, match="cuDevSmResourceSplitByCount fails with error 914"):
        _create(driver, 0, 8)
