"""`ExpertFeed`: a model's experts on their way to where they live: in which order, how far ahead, on which threads.

Finding a tensor in a checkpoint is Python's work, 20 to 40 us an expert. That is little beside packing it. But all
workers would stand still while a layer's first experts are found. So these are looked up while the layer before is
packed. And experts found together are packed together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from threading import Event
from time import perf_counter, sleep

import torch
from torch import Tensor

from tandem.formats.codes import Weight, WeightCodes
from tandem.formats.cut import numbers, weight_bytes

CHUNK_BYTES = 256 << 20  # of weights made ahead
VIEW_BYTES = 2 << 30  # of views, which take no memory: workers share a long run more evenly
GATHER_SECONDS = 3e-4  # that views are waited for where more could be packed together
GROWTH = 4  # from one run of what must be made to the next: the first ones are there soon
PREPARING_THREADS = 8  # codes are unpacked and reordered at some GB/s by one thread, which packing outruns
MADE_BYTES = 4 << 20  # of an expert whose codes take longer than Python's part of making them
# Before the next layer is looked up: what was found first is to be given to the workers, and Python runs one thread at
# a time.
AHEAD_AFTER_SECONDS = 2e-3

ExpertMatrices = tuple[Weight, Weight, Weight]
"""gate and up [width, hidden], down [hidden, width]."""

LayerMatrices = Callable[[int], Callable[[int], ExpertMatrices]]
"""A decoder layer → its experts' matrices, by their numbers."""


def are_views(matrices: ExpertMatrices) -> bool:
    """Whether these are plain bf16 tensors: views of the mapped file, which take no memory. Others must be made."""
    return all(isinstance(w, Tensor) and w.dtype == torch.bfloat16 and w.is_contiguous() for w in matrices)


def packable(matrices: ExpertMatrices, as_codes: bool) -> ExpertMatrices:
    """As kernels take them: codes, or numbers. float16 is exact in float32."""
    gate, up, down = (w if as_codes and isinstance(w, WeightCodes) else _wide(numbers(w)) for w in matrices)
    return gate, up, down


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float16 else tensor


@dataclass(slots=True)
class _Next:
    """The layer that is looked up ahead."""

    layer: int
    feed: LayerFeed


class ExpertFeed:
    """Layers are asked for in their order. A call for the last expert of one starts looking up the next: workers then
    have something to do, Python has not."""

    def __init__(self, layers: Sequence[int], as_codes: bool = False, ahead: bool = True) -> None:
        """layers: decoder layers with experts. as_codes: codes stay as they are. ahead: False where finding them is all
        there is to do."""
        self._following = dict(pairwise(layers)) if ahead else {}
        self._as_codes = as_codes
        self._ahead: _Next | None = None
        self._threads = ThreadPoolExecutor(PREPARING_THREADS, "tandem-load")

    def layer(self, layer: int, count: int, matrices_of: LayerMatrices) -> LayerFeed:
        """Experts 0 … count - 1 of a decoder layer."""
        ahead, self._ahead = self._ahead, None
        following = self._following.get(layer)

        def last_is_asked_for() -> None:
            if following is not None:
                feed = self._feed(following, count, matrices_of)
                self._ahead = _Next(following, feed)
                feed.look_ahead()

        feed = ahead.feed if ahead is not None and ahead.layer == layer else self._feed(layer, count, matrices_of)
        return feed.begun(count, last_is_asked_for)

    def close(self) -> None:
        """After the last layer."""
        self._threads.shutdown(cancel_futures=True)

    def _feed(self, layer: int, count: int, matrices_of: LayerMatrices) -> LayerFeed:
        return LayerFeed(self._threads, count, matrices_of(layer), self._as_codes)


class LayerFeed:
    """A layer's experts as kernels take them, by their numbers: each is asked for once, in order."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        count: int,
        matrices: Callable[[int], ExpertMatrices],
        as_codes: bool,
    ) -> None:
        self.count, self._threads, self._matrices, self._as_codes = count, threads, matrices, as_codes
        self._at_last: Callable[[], None] = lambda: None
        self._sizes: dict[int, int] = {}
        self._looked_up: dict[int, ExpertMatrices] = {}
        self._needed = 0  # the caller is here: what it has passed is not looked up any more
        self.looking: Future[None] | None = None

    def begun(self, count: int, at_last: Callable[[], None]) -> LayerFeed:
        """The layer is loaded from now on. at_last: called when its last expert was found."""
        self.count, self._at_last = count, at_last
        return self

    def look_ahead(self, after_seconds: float = AHEAD_AFTER_SECONDS) -> None:
        """Makes experts ahead; of those that take memory only the first one."""
        self.looking = self._threads.submit(self._look, after_seconds)

    def __call__(self, expert: int) -> ExpertMatrices:
        self._needed = max(self._needed, expert + 1)
        matrices = self._looked_up.pop(expert, None)
        matrices = self._find(expert) if matrices is None else matrices
        if expert == self.count - 1:
            self._at_last()
        return matrices

    @property
    def nbytes(self) -> int:
        """Stored bytes of the experts that were asked for."""
        return sum(self._sizes.values())

    def all(self) -> list[ExpertMatrices]:
        """Where nothing is made of them."""
        return [self(expert) for expert in range(self.count)]

    def runs(self) -> Iterator[tuple[int, list[ExpertMatrices]]]:
        """All experts as (first, their matrices). Threads find those that follow the first run; for that one, a thread
        would only be waited for.

        What they get is a view of the mapped file, or codes and numbers made from it. At most 2 * CHUNK_BYTES of those
        are there at a time, unless one expert is larger.
        """
        demand, pending, first = Event(), list[Future[list[ExpertMatrices]]](), 0
        demand.set()
        ready = self._gathered(0, demand)
        demand.clear()
        try:
            while first < self.count:
                following = first + len(ready)
                pending = self._begun(following, ready, demand) if following < self.count else []
                yield first, ready
                demand.set()
                ready = [each for future in pending for each in future.result()]
                demand.clear()
                first = following
        finally:
            for future in pending:  # an error ended it: nobody looks any more when the caller hears of it
                future.cancel()
            wait(pending)

    def _find(self, expert: int) -> ExpertMatrices:
        matrices = self._matrices(expert)
        self._sizes[expert] = sum(map(weight_bytes, matrices))
        return packable(matrices, self._as_codes)

    def _look(self, after_seconds: float) -> None:
        """Whatever cannot be read is an error when it is called for."""
        sleep(after_seconds)
        for expert in range(self.count):
            if expert < self._needed:
                continue
            try:
                matrices = self._find(expert)
            except Exception:
                return
            self._looked_up[expert] = matrices
            if not are_views(matrices):
                return

    def _begun(
        self, first: int, before: list[ExpertMatrices], demand: Event
    ) -> list[Future[list[ExpertMatrices]]]:
        """Asks for those from `first` on, which follow the run `before`. Views and small codes are made by one thread:
        they are Python's work, in which more threads would only take turns."""
        if are_views(before[0]):
            return [self._threads.submit(self._gathered, first, demand)]
        size = max(1, sum(map(weight_bytes, before[0])))
        most = max(1, CHUNK_BYTES // size)
        chunk = range(first, min(first + min(GROWTH * len(before), most), self.count))
        by_expert = size > MADE_BYTES and any(isinstance(w, WeightCodes) for w in before[0])
        shares = [[expert] for expert in chunk] if by_expert else [list(chunk)]
        return [self._threads.submit(lambda those: [self(each) for each in those], share) for share in shares]

    def _gathered(self, first: int, demand: Event) -> list[ExpertMatrices]:
        """From `first` on, as many as are found until somebody wants them; one, if they are not views."""
        run = [self(first)]
        most = VIEW_BYTES // max(1, sum(map(weight_bytes, run[0]))) if are_views(run[0]) else 1
        last, latest = min(self.count, first + most), inf
        while first + len(run) < last and perf_counter() < latest:
            run.append(self(first + len(run)))
            if demand.is_set() and latest == inf:
                latest = perf_counter() + GATHER_SECONDS
        return run


def feed_of(count: int, matrices: Callable[[int], ExpertMatrices]) -> LayerFeed:
    """Feed of a layer without others around it."""
    return ExpertFeed((0,)).layer(0, count, lambda _: matrices)
