"""`CpuExperts`: one layer's experts in CPU memory, computed by the packed kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.formats.codes import Weight, WeightCodes
from tandem.formats.cut import weight_bytes
from tandem.kernels.ops import ExpertLayer, Routing, SureRead
from tandem.kernels.packed_cache import KeptLayer

CHUNK_BYTES = 256 << 20  # of weights made ahead
VIEW_CHUNKS = 4  # as many may be views, which take no memory: workers share a long run more evenly
GROWTH = 4  # from one run to the next: the first ones are there soon
PREPARING_THREADS = 8  # codes are unpacked and reordered at some GB/s by one thread, which packing outruns
MADE_BYTES = 4 << 20  # of an expert whose codes take longer than Python's part of making them

ExpertMatrices = tuple[Weight, Weight, Weight]
"""gate and up [width, hidden], down [hidden, width]."""


class Experts(Protocol):
    """A layer's experts, wherever they live."""

    def load(
        self, count: int, matrices: Callable[[int], ExpertMatrices], kept: KeptLayer | None = None
    ) -> None:
        """Packs experts 0 ... count - 1, with few of them unpacked at a time (`runs`). Those that are kept from an
        earlier start are not packed again."""
        ...

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert."""
        ...

    @property
    def places(self) -> Tensor | None:
        """int32 [experts]: the slot on the GPU, or -1; what `submit` likes to find in its routing. None: no GPU."""
        ...

    def sure_read(self, experts: int) -> SureRead:
        """The last `experts` of the layer, which every token chooses."""
        ...

    def submit(self, x: Tensor, routing: Routing) -> Any:
        """x [T, hidden], routing [T, k] -> a ticket for `wait`."""
        ...

    def wait(self, ticket: Any) -> Tensor:
        """sum over k of weight * expert(x), [T, hidden]."""
        ...


class ExpertStore(Protocol):
    """Decides where each routed expert lives."""

    def layer(self, index: int, count: int, width: int, fmt: str) -> Experts:
        """The experts of the index-th MoE layer; ids beyond the routed ones are shared experts."""
        ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """A batch's pending partial sum."""

    result: Tensor


def _prepared(
    threads: ThreadPoolExecutor, matrices: Callable[[int], ExpertMatrices], experts: range, made: bool
) -> Callable[[], list[ExpertMatrices]]:
    """Begins to ask for these; the result waits for them. Views and small codes are made by one thread: they
    are Python's work, in which more threads would only take turns."""
    if made:
        each = [threads.submit(matrices, expert) for expert in experts]
        return lambda: [future.result() for future in each]
    return threads.submit(lambda: [matrices(expert) for expert in experts]).result


def runs(count: int, matrices: Callable[[int], ExpertMatrices]) -> Iterator[tuple[int, list[ExpertMatrices]]]:
    """Experts 0 … count - 1 as (first, their matrices), while threads ask `matrices` for those that follow.

    What they get is a view of the mapped file, or codes and numbers made from it: at most 2 * CHUNK_BYTES of those at
    a time, unless one expert is larger.
    """
    with ThreadPoolExecutor(PREPARING_THREADS, "tandem-load") as threads:
        example = threads.submit(matrices, 0).result()
        size = max(1, sum(map(weight_bytes, example)))
        made = size > MADE_BYTES and any(isinstance(w, WeightCodes) for w in example)
        most = max(1, CHUNK_BYTES * (VIEW_CHUNKS if _are_views(example) else 1) // size)

        def chunk(first: int, length: int) -> Callable[[], list[ExpertMatrices]]:
            return _prepared(threads, matrices, range(first, min(first + min(length, most), count)), made)

        first, ready = 1, [example]
        ahead = chunk(first, GROWTH)
        while ready:
            yield first - len(ready), ready
            ready = ahead()
            first += len(ready)
            ahead = chunk(first, GROWTH * len(ready))


def _are_views(matrices: ExpertMatrices) -> bool:
    """Numbers as most files hold them; whatever else there is, is made of what they hold."""
    return all(isinstance(w, Tensor) and w.dtype == torch.bfloat16 and w.is_contiguous() for w in matrices)


class CpuExperts:
    """`submit` a batch, do something else, `wait` for its sum.

    On a machine without a GPU there is nothing else to do: the calling thread is a worker of the pool, and `submit`
    returns when the work is done.
    """

    places = None

    def __init__(self, layer: ExpertLayer) -> None:
        self._layer = layer

    def load(
        self, count: int, matrices: Callable[[int], ExpertMatrices], kept: KeptLayer | None = None
    ) -> None:
        """Packs experts 0 … count - 1 on all workers."""
        if kept is not None and kept.fill(self._layer):
            return
        for first, run in runs(count, matrices):
            self._layer.load_all(first, run)
        if kept is not None:
            kept.keep(self._layer)

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert."""
        return self._layer.bytes_per_expert

    def sure_read(self, experts: int) -> SureRead:
        """The last `experts` of the layer, which every token chooses."""
        return SureRead(self._layer, experts)

    def submit(self, x: Tensor, routing: Routing) -> Ticket:
        """x [T, hidden], routing [T, k]."""
        return Ticket(self._layer.forward(x, routing.ids, routing.weights))

    def wait(self, ticket: Ticket) -> Tensor:
        """sum over k of weight * expert(x), [T, hidden]."""
        return ticket.result
