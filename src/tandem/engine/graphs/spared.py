"""`spared_stream`: a stream whose kernels leave some of a GPU's multiprocessors to others.

A kernel of high priority waits until a block before it has ended. On multiprocessors that a prompt never has, it waits
for nobody. CUDA calls a share of them a green context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from tandem.errors import EngineError

_DEFAULT_STREAM, _NON_BLOCKING = 1, 1  # CU_GREEN_CTX_DEFAULT_STREAM, CU_STREAM_NON_BLOCKING


@cache
def spared_stream(device: torch.device, count: int, driver: Any = None) -> torch.cuda.Stream:
    """Of a process, like the streams of `gpu_pass`. count: multiprocessors that are left alone, at least; the GPU
    divides them in groups of its own. driver: `cuda.bindings.driver`, or what stands for it in a test. Raises
    EngineError where the driver is too old, or the GPU too small."""
    if driver is None:
        driver = _driver()
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        stream = _made(driver, _called(driver, "cuDeviceGet", index), count)
    return torch.cuda.ExternalStream(stream, device=torch.device("cuda", index))


@contextmanager
def products_leave(count: int) -> Iterator[None]:
    """What is captured meanwhile has products of libraries with that many blocks fewer. Blocks for a whole GPU would
    take two rounds: half of the experts on an H100, 16 spared, prompts at 0.74 of their speed in place of 0.67."""
    leave = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if leave is None or not count:
        yield
        return
    leave(count)
    try:
        yield
    finally:
        leave(None)


def _made(driver: Any, number: Any, count: int) -> int:
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _called(driver, "cuDeviceGetDevResource", number, kind)
    if not 0 < count < whole.sm.smCount:
        raise EngineError(
            f"--spared-multiprocessors {count}: this GPU has {whole.sm.smCount}; give fewer, or leave it out"
        )
    _, _, rest = _called(driver, "cuDevSmResourceSplitByCount", 1, whole, 0, count)
    described = _called(driver, "cuDevResourceGenerateDesc", [rest], 1)
    context = _called(driver, "cuGreenCtxCreate", described, number, _DEFAULT_STREAM)
    return int(_called(driver, "cuGreenCtxStreamCreate", context, _NON_BLOCKING, 0))


def _called(driver: Any, name: str, *arguments: Any) -> Any:
    """What a function of the driver returns besides its error. Raises EngineError."""
    try:
        error, *found = getattr(driver, name)(*arguments)
    except (AttributeError, RuntimeError) as missing:  # it has no such function
        raise EngineError(_refused(f"{name} is missing")) from missing
    if int(error):
        raise EngineError(_refused(f"{name} fails with error {int(error)}"))
    return found[0] if len(found) == 1 else found


def _refused(why: str) -> str:
    return (
        f"--spared-multiprocessors: {why}. It needs CUDA 12.4 or newer, in the driver and in cuda-bindings; "
        "update them, or leave the flag out"
    )


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EngineError(_refused("the package cuda-bindings is missing")) from error
    return driver
