"""`Handoff`: a layer's tokens from a CUDA stream to the experts in CPU memory, and their sum back.

Two ways. Outside CUDA graphs the stream copies into pinned memory, the calling thread waits for it, computes, and the
stream copies back. Inside a graph nobody can be called: kernels post into mapped memory and wait for the answer
(`mailbox_kernels`, csrc/experts/handoff/mailbox.h). A thread of its own answers the posts. The calling thread may stand
in a call of the driver that waits for the graph. Host function nodes would do the same at 50 us a layer (measured
on an H200; this way 8 us).

The GPU's every wait is bounded: if the CPU's side throws, hangs or is gone, the kernels give up after
`patience_seconds`, and the stream runs to its end. A throw or a late answer is the step's EngineError. A worker that
hangs for ever is the supervisor's: its watchdog ends the process.

Experts may be deferred in graphs (`Deferral`): of a layer that defers, the CPU computes a token's weakest experts after
its answer. Their sum comes with the next one. Posts take turns between two halves of the mailbox for that.

In graphs of few rows the GPU also says which experts the next layer will probably want. The CPU fetches their weights
while it waits for that layer's post (csrc/experts/run/foresight.h). No result depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tandem import _core
from tandem.errors import EngineError
from tandem.experts.deferral import Deferral
from tandem.experts.eager_copies import EagerCopies
from tandem.experts.handoff_counts import HandoffSizes, HandoffTimes, PrefetchCounts
from tandem.experts.mailbox import Mailbox
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.ops import Routing


class Handoff:
    """Shared by all layers of a model; one batch at a time."""

    def __init__(
        self,
        sizes: HandoffSizes,
        device: torch.device,
        patience_seconds: float,
        foresight: bool = True,
        first: Handoff | None = None,
    ) -> None:
        """foresight: graphs that are recorded from now on say which experts the next layer will probably want. first:
        of the stage before all others: stages have one mailbox, whose layers are numbered through all of them."""
        self.sizes, self.device, self.patience_seconds = sizes, device, patience_seconds
        self.foresight = foresight
        self.last = -1  # number of the layer whose post ends a step, said in posts that are recorded from then on
        self._first = first
        self._layers: list[PackedExperts] = [] if first is None else first._layers
        self._deferring: dict[int, Deferral] = {}  # by layer
        self._copies: EagerCopies | None = None
        self._mailbox: Mailbox | None = None
        self._in_graph = self._rehearsing = False

    def add(self, layer: PackedExperts) -> int:
        """Returns the number by which `post` knows the layer."""
        self._layers.append(layer)
        if self._mailbox is not None:
            self._mailbox.add(layer)
        return len(self._layers) - 1

    def defer(self, layer: int, deferral: Deferral) -> None:
        """In graphs, experts of this layer may be deferred. Before any is recorded; another post follows in each."""
        self._deferring[layer] = deferral
        if self._mailbox is not None:
            self._mailbox.defer(layer, deferral)

    @property
    def layers(self) -> Sequence[PackedExperts]:
        """The CPU's experts, in the order of their numbers."""
        return self._layers

    @property
    def mailbox(self) -> Mailbox | None:
        """None until a graph is recorded."""
        return self._mailbox

    def open_mailbox(self) -> Mailbox | None:
        """Before a capture. None: no layer has experts on the CPU."""
        if self._mailbox is None and self._layers:
            opened = None if self._first is None else self._first.open_mailbox()
            self._mailbox = Mailbox(self.sizes, self.device, self._layers, self.patience_seconds, opened)
            for layer, deferral in self._deferring.items():
                self._mailbox.defer(layer, deferral)
        return self._mailbox

    @contextmanager
    def recording(self, rows: Tensor | None = None) -> Iterator[list[int]]:
        """Around a capture: posts go through the mailbox. The list is filled with the layers that were posted. rows
        int32 [1] on the device: how many of the graph's rows are real; the others are not posted. None: all are."""
        self.open_mailbox()
        posted: list[int] = []
        if self._mailbox is not None:
            self._mailbox.posted, self._mailbox.rows, self._mailbox.last = posted, rows, self.last
        self._in_graph = True
        try:
            yield posted
        finally:
            self._in_graph = False

    def post(self, layer: int, x: Tensor, routing: Routing, slots: Tensor) -> None:
        """Hands over the pairs whose slot is -1. x bfloat16 [T, hidden]; all on the device."""
        if self._in_graph and self._mailbox is not None:
            self._mailbox.post(layer, x, routing, slots)
            return
        self.copies.send(x, routing, slots)
        self.copies.sent(self._layers[layer])

    @property
    def copies(self) -> EagerCopies:
        """Copies for posts outside graphs of steps; graphs of prompts use them piece by piece."""
        if self._copies is None:
            self._copies = EagerCopies(self.sizes, self.device, self._check_parked)
        return self._copies

    def collect(self, tokens: int) -> Tensor:
        """The sum over those pairs, float32 [T, hidden] on the device."""
        if self._in_graph and self._mailbox is not None:
            return self._mailbox.collect(tokens)
        self.copies.compute(tokens)
        return self.copies.on_device(tokens)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Around the runs before a capture: what the graph will run is run, so that it is compiled; nothing is
        hinted."""
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False

    @contextmanager
    def computing_nothing(self) -> Iterator[None]:
        """Around steps outside graphs whose results nobody looks at: only what the GPU computes is computed."""
        self.copies.computes = False
        try:
            yield
        finally:
            self.copies.computes = True

    def takes_predictions(self, tokens: int) -> bool:
        """Whether `prefetch` is worth asking a router for so many tokens."""
        return self.foresight and (self._in_graph or self._rehearsing) and tokens <= _core.MOST_HINTED_TOKENS

    def prefetch(self, layer: int, routing: Routing) -> None:
        """After a post, before its `collect`: the next one will be this layer's, probably with these experts. Those
        that have a slot on the GPU are left out."""
        if self._in_graph and self._mailbox is not None:
            self._mailbox.prefetch(layer, routing)

    def hints(self) -> PrefetchCounts:
        """Since the start."""
        return PrefetchCounts() if self._mailbox is None else self._mailbox.hints()

    def used(self) -> tuple[int, int]:
        """Posts of graphs answered so far, and experts that they used, each counted once per post."""
        return (0, 0) if self._mailbox is None else self._mailbox.used()

    def times(self) -> HandoffTimes:
        """Since the start, inside graphs and outside."""
        inside = HandoffTimes() if self._mailbox is None else self._mailbox.times()
        return self.outside_times().plus(inside)

    def outside_times(self) -> HandoffTimes:
        """Since the start, outside graphs."""
        return HandoffTimes() if self._copies is None else self._copies.times

    def seconds_per_expert(self) -> float:
        """That the CPU took for an expert of graphs' posts, on average since the start; 0: there were none."""
        experts = self.used()[1]
        return self._mailbox.times().serve_seconds / experts if self._mailbox and experts else 0.0

    def between_answers(self, work: _core.Meanwhile) -> None:
        """Pieces of it are done until the next `finish`, between an answer and the next post, and while that waits.
        Nothing is kept where no posts are answered: a later step would do it, when its slots may be in use."""
        if self._mailbox is not None and self._mailbox.core.is_open:
            self._mailbox.core.meanwhile(work)

    def begin(self, posts: int) -> None:
        """Before a graph, or several, with so many posts in all is replayed: another thread answers them, whatever
        this one waits for. `finish` or `cancel` follows; until then this thread computes nothing on the pool."""
        if posts and self._mailbox is not None:
            self._mailbox.thread.begin(posts, self.patience_seconds)

    def finish(self) -> None:
        """Returns when all posts are answered. Raises EngineError when that fails; the stream goes on."""
        if self._mailbox is not None:
            self._mailbox.finish()

    def cancel(self) -> None:
        """In place of `finish`, where the graph may not have begun: it need not wait, and what it computes is void."""
        if self._mailbox is not None:
            self._mailbox.cancel()

    def _check_parked(self) -> None:
        """Before this thread computes on the pool. Raises EngineError between `begin` and `finish`."""
        if self._mailbox is not None and self._mailbox.core.is_open:
            raise EngineError("experts were asked for outside a graph while the posts of one are answered")

    def check(self) -> None:
        """After the stream has ended a graph: raises EngineError if the GPU did not wait for an answer."""
        if self._mailbox is not None:
            self._mailbox.check()
