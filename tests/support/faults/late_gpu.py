"""`make_late`: a GPU that is as late as one that many programs share, for `make test-gpu ARGS="--late-gpu 2"`.

It waits after each weight that is uploaded, for an upload ends with a wait for the GPU, and before each step and each
task. So what one stream or the host writes, and another has still to read, is wrong each time where nothing orders the
two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CYCLES_PER_MS = 1_800_000  # about


def make_late(milliseconds: float) -> None:
    """In this process, from now on; nothing where there is no GPU."""
    if not torch.cuda.is_available():
        return
    import tandem.kernels.gpu.ops as ops
    from tandem.engine.start.gpu_side import StepStart

    cycles = int(milliseconds * CYCLES_PER_MS)
    ops.uploaded = _before_a_wait(ops.uploaded, cycles)
    for name in ("__call__", "begin_task"):
        setattr(StepStart, name, _after_a_wait(getattr(StepStart, name), cycles))


def _wait(cycles: int) -> None:
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda._sleep(cycles)


def _after_a_wait(call: Callable[..., Any], cycles: int) -> Callable[..., Any]:
    def late(*arguments: Any, **named: Any) -> Any:
        _wait(cycles)
        return call(*arguments, **named)

    return late


def _before_a_wait(call: Callable[..., Any], cycles: int) -> Callable[..., Any]:
    def late(*arguments: Any, **named: Any) -> Any:
        made = call(*arguments, **named)
        _wait(cycles)
        return made

    return late
