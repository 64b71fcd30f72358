"""`pytest -p random_lag`: a GPU, its copies and the CPU's experts lag behind the host at random, as where several
processes share one GPU. `LAG_SEED` says which; 0 is the default."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

SHARE, MOST_SECONDS = 0.15, 0.02  # of the moments, and how late at most
CYCLES = 2_000_000_000  # of a second, about
_random = random.Random(int(os.environ.get("LAG_SEED", "0")))


def lag(*streams: Any) -> None:
    """Makes these streams late with what they are given from now on, or the current one."""
    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return
    for stream in streams or (torch.cuda.current_stream(),):
        if _random.random() < SHARE:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(_random.random() * MOST_SECONDS * CYCLES))


def after(owner: Any, name: str, streams: Callable[..., tuple[Any, ...]] = lambda *_: ()) -> None:
    around(owner, name, lambda call: (call(), lag(*streams(call.owner)))[0])


def before(owner: Any, name: str, streams: Callable[..., tuple[Any, ...]] = lambda *_: ()) -> None:
    around(owner, name, lambda call: (lag(*streams(call.owner)), call())[1])


class Call:
    """A call that has not been made yet. owner: its first argument."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._function, self._arguments, self._named = function, arguments, named
        self.owner = arguments[0] if arguments else None

    def __call__(self) -> Any:
        return self._function(*self._arguments, **self._named)


def around(owner: Any, name: str, how: Callable[[Call], Any]) -> None:
    function = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: how(Call(function, arguments, named)))


def slowly(call: Call) -> Any:
    if _random.random() < SHARE:
        time.sleep(_random.random() * MOST_SECONDS)
    return call()


@pytest.hookimpl(trylast=True)
def pytest_sessionstart() -> None:
    from tandem.experts.eager_copies import EagerCopies
    from tandem.experts.hybrid_experts import HybridExperts
    from tandem.experts.live.copies import CudaCopies
    from tandem.experts.streaming.copy_stream import CudaCopyStream
    from tandem.kernels.gpu import ops
    from tandem.kernels.gpu.experts import GpuExperts

    after(ops, "uploaded")
    for name in ("load_each", "take"):
        before(GpuExperts, name)
    before(ops.GpuOps, "begin_step")
    before(HybridExperts, "submit")
    before(HybridExperts, "wait")
    before(torch.cuda.CUDAGraph, "replay")
    before(CudaCopyStream, "copies_given", lambda bus: (bus._stream,))
    after(CudaCopyStream, "copy_after", lambda bus: (bus._stream,))
    after(CudaCopies, "follow", lambda copies: (copies._up, copies._down))
    around(EagerCopies, "compute", slowly)
