"""`CpuExperts`: one layer's experts in CPU memory, computed by the packed kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf
from threading import Event
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor

from tandem.config.layers import SILU, Activation
from tandem.experts.look_ahead import ExpertMatrices, are_views
from tandem.formats.codes import WeightCodes
from tandem.formats.cut import weight_bytes
from tandem.kernels.ops import ExpertBiases, ExpertLayer, Routing, SureRead
from tandem.kernels.packed.cache import KeptLayer

CHUNK_BYTES = 256 << 20  # of weights made ahead
VIEW_BYTES = 2 << 30  # of views, which take no memory: workers share a long run more evenly
GATHER_SECONDS = 3e-4  # that views are waited for where more could be packed together
GROWTH = 4  # from one run of what must be made to the next: the first ones are there soon
PREPARING_THREADS = 8  # codes are unpacked and reordered at some GB/s by one thread, which packing outruns
MADE_BYTES = 4 << 20  # of an expert whose codes take longer than Python's part of making them


class Experts(Protocol):
    """A layer's experts, wherever they live."""

    def load(
        self, count: int, matrices: Callable[[int], ExpertMatrices], kept: KeptLayer | None = None
    ) -> None:
        """Packs experts 0 ... count - 1, with few of them unpacked at a time (`runs`). Those that are kept from an
        earlier start are not packed again."""
        ...

    def set_biases(self, biases: ExpertBiases) -> None:
        """Of all experts of the layer, after `load`."""
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

    def takes_hints(self, rows: int) -> bool:
        """Whether `hint` is worth asking the router for so many rows."""
        ...

    def hint(self, routing: Routing) -> None:
        """What the next `submit` will probably be given. No result depends on it."""
        ...

    def submit(self, x: Tensor, routing: Routing) -> Any:
        """x [T, hidden], routing [T, k] -> a ticket for `wait`."""
        ...

    def wait(self, ticket: Any) -> Tensor:
        """sum over k of weight * expert(x), [T, hidden]."""
        ...


class ExpertStore(Protocol):
    """Decides where each routed expert lives."""

    def layer(self, index: int, count: int, width: int, fmt: str, activation: Activation = SILU) -> Experts:
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
    """Experts 0 … count - 1 as (first, their matrices). Threads ask `matrices` for those that follow the first run; for
    that one, a thread would only be waited for.

    What they get is a view of the mapped file, or codes and numbers made from it: at most 2 * CHUNK_BYTES of those at
    a time, unless one expert is larger.
    """
    wanted = Event()
    with ThreadPoolExecutor(PREPARING_THREADS, "tandem-load") as threads:
        first = 0
        wait: Callable[[], list[ExpertMatrices]] = partial(_gathered, count, matrices, 0, wanted)
        while first < count:
            wanted.set()
            ready = wait()
            wanted.clear()
            following = first + len(ready)
            if following < count:
                wait = _begun(threads, count, matrices, following, ready, wanted)
            yield first, ready
            first = following


def _begun(
    threads: ThreadPoolExecutor,
    count: int,
    matrices: Callable[[int], ExpertMatrices],
    first: int,
    before: list[ExpertMatrices],
    wanted: Event,
) -> Callable[[], list[ExpertMatrices]]:
    """Asks for those from `first` on, which follow the run `before`."""
    if are_views(before[0]):
        return threads.submit(_gathered, count, matrices, first, wanted).result
    size = max(1, sum(map(weight_bytes, before[0])))
    most = max(1, CHUNK_BYTES // size)
    chunk = range(first, min(first + min(GROWTH * len(before), most), count))
    made = size > MADE_BYTES and any(isinstance(w, WeightCodes) for w in before[0])
    return _prepared(threads, matrices, chunk, made)


def _gathered(
    count: int, matrices: Callable[[int], ExpertMatrices], first: int, wanted: Event
) -> list[ExpertMatrices]:
    """From `first` on, as many as are found until somebody wants them; one, if they are not views."""
    found = [matrices(first)]
    most = VIEW_BYTES // max(1, sum(map(weight_bytes, found[0]))) if are_views(found[0]) else 1
    last, latest = min(count, first + most), inf
    while first + len(found) < last and perf_counter() < latest:
        found.append(matrices(first + len(found)))
        if wanted.is_set() and latest == inf:
            latest = perf_counter() + GATHER_SECONDS
    return found


class CpuExperts:
    """`submit` a batch, do something else, `wait` for its sum.

    On a machine without a GPU there is nothing else to do: the calling thread is a worker of the pool, and `submit`
    returns when the work is done.
    """

    places = None

    def __init__(self, layer: ExpertLayer, in_place: bool = False) -> None:
        """in_place: the layer uses its experts where they are, so that loading them takes no time."""
        self._layer, self._in_place = layer, in_place

    def load(
        self, count: int, matrices: Callable[[int], ExpertMatrices], kept: KeptLayer | None = None
    ) -> None:
        """Packs experts 0 … count - 1 on all workers."""
        if kept is not None and kept.fill(self._layer):
            return
        if self._in_place:  # looking them up is all there is to do
            return self._layer.load_all(0, [matrices(expert) for expert in range(count)])
        for first, run in runs(count, matrices):
            self._layer.load_all(first, run)
        if kept is not None:
            kept.keep(self._layer)

    def set_biases(self, biases: ExpertBiases) -> None:
        self._layer.set_biases(biases)

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert."""
        return self._layer.bytes_per_expert

    def sure_read(self, experts: int) -> SureRead:
        """The last `experts` of the layer, which every token chooses."""
        return SureRead(self._layer, experts)

    def takes_hints(self, rows: int) -> bool:
        """Between two layers this side computes everything itself."""
        return False

    def hint(self, routing: Routing) -> None: ...

    def submit(self, x: Tensor, routing: Routing) -> Ticket:
        """x [T, hidden], routing [T, k]."""
        return Ticket(self._layer.forward(x, routing.ids, routing.weights))

    def wait(self, ticket: Ticket) -> Tensor:
        """sum over k of weight * expert(x), [T, hidden]."""
        return ticket.result
