"""Hooks of a step: what operations prepare before its layers run, and what the host does between graphs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from tandem.models.batch import ForwardBatch

BeginStep = Callable[[ForwardBatch, bool], None]
"""Before the layers of a step run; True: before its graph is captured or replayed."""

HostWork = Callable[[], object]
"""Hooks of the host at each replay: of a graph, or between two."""


def nothing_begins(batch: ForwardBatch, captured: bool) -> None:
    """Where no backend plans its steps."""


class Recorder:
    """Records graphs in one pool of memory. steps: their replays, and what the host does between them."""

    def __init__(self, pool: Any = None) -> None:
        """None: a new one."""
        self.pool, self.steps = pool, list[HostWork]()
        self._graph: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records all that is given to the current stream meanwhile."""
        self._begin()
        try:
            yield
        finally:
            if self._graph is not None:
                self._end()

    def cut(self, then: HostWork) -> None:
        """A graph ends here, and another begins; `then` is called between the two."""
        self._end()
        self.steps.append(then)
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        self._graph = graph

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        graph.capture_end()
        self.pool = self.pool or graph.pool()
        self.steps.append(graph.replay)


class StepHooks(Protocol):
    """Preparations of operations for a step, and for a prefill that steps overtake."""

    def __call__(self, batch: ForwardBatch, captured: bool) -> None:
        """As `BeginStep`."""
        ...

    def of_drafts(self, batch: ForwardBatch, captured: bool) -> None:
        """As a call, for a draft layer."""
        ...

    def slot_copied(self, source: int, target: int) -> None:
        """A sequence's slot became another's copy."""
        ...

    def load_kernels(self, batch: ForwardBatch, streamed: Sequence[int]) -> None:
        """Before a step kernel by kernel, in which only the experts of these layers are streamed."""
        ...

    def pausable(self) -> bool:
        """Whether they keep nothing that a step would change."""
        ...

    def begin_task(self, batch: ForwardBatch, split: bool = False) -> bool:
        """Before a task. What it prepares stays until `end_task`, whatever graphs are replayed. Whether the GPU can
        compute it alone: the CPU has no part in it. split: it has one, in graphs that were recorded so."""
        ...

    def end_task(self) -> None: ...

    def replayable(self, split: bool = False) -> bool:
        """Whether layers of tasks can be CUDA graphs where the GPU computes them alone; split: or with the CPU."""
        ...

    def may_split(self, rows: int) -> bool:
        """Whether `splits` may say so later."""
        ...

    def splits(self, rows: int) -> bool:
        """Whether it is best that CPU and bus share the experts of so many rows, in layers that are graphs."""
        ...

    def recording(self, recorder: Recorder) -> AbstractContextManager[None]:
        """Around the capture of a layer, which it cuts where it has something to do at each replay."""
        ...
