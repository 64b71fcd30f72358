"""`Handoff`: a layer's tokens from a CUDA stream to the experts in CPU memory, and their sum back.

Two ways. Outside CUDA graphs the stream copies into pinned memory, the calling thread waits for it, computes, and the
stream copies back. Inside a graph nobody can be called: kernels post into mapped memory and wait for the answer
(`mailbox_kernels`, csrc/experts/handoff/mailbox.h), and a thread of its own answers the posts: the calling one may
stand in a call of the driver that waits for the graph. Host function nodes would do the same at 50 us a layer (measured
on an H200; this way 8 us).

Every wait is bounded: if the CPU's side throws, hangs or is gone, the kernels give up after `patience_seconds`, the
stream runs to its end and the step raises EngineError.

Experts may be late in graphs (`Deferral`): of a layer that defers, the CPU computes a token's weakest experts after its
answer, and their sum comes with the next one. Posts take turns between two halves of the mailbox for that.

In graphs of few rows the GPU also says which experts the next layer will probably want. The CPU fetches their weights
while it waits for that layer's post (csrc/experts/run/foresight.h). No result depends on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem import _core
from tandem.errors import EngineError
from tandem.experts.deferral import Deferral
from tandem.experts.mailbox_kernels import GAVE_UP, kernels
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.gpu.nvrtc import launch
from tandem.kernels.ops import Routing

POST_THREADS, COLLECT_THREADS, HINT_THREADS = 1024, 512, 64
UNITS_PER_BLOCK = 1024  # of 16 bytes, of the answer: more blocks would only poll


@dataclass(frozen=True, slots=True)
class HandoffSizes:
    """mailbox_tokens: of the largest graph; tokens: of the largest step; late: experts may be, in graphs."""

    mailbox_tokens: int
    tokens: int
    hidden: int
    top_k: int
    late: bool = False


class HandoffTimes(NamedTuple):
    """Batches handed to the CPU, and its time: waiting until they came, and computing them."""

    posts: int = 0
    wait_seconds: float = 0.0
    serve_seconds: float = 0.0

    def plus(self, other: HandoffTimes) -> HandoffTimes:
        return HandoffTimes(
            self.posts + other.posts,
            self.wait_seconds + other.wait_seconds,
            self.serve_seconds + other.serve_seconds,
        )


class HintCounts(NamedTuple):
    """Experts in CPU memory that were foreseen, each once per post; of those, that the post asked for; bytes of
    foreseen experts that were fetched before they were computed."""

    hinted: int = 0
    hits: int = 0
    nbytes: int = 0


class Handoff:
    """Shared by all layers of a model; one batch at a time."""

    def __init__(
        self,
        sizes: HandoffSizes,
        device: torch.device,
        patience_seconds: float,
        foresight: bool = True,
        cpu: int = -1,
    ) -> None:
        """foresight: graphs that are recorded from now on say which experts the next layer will probably want. cpu: of
        the pool's worker 0, where posts are answered; -1: anywhere."""
        self.sizes, self.device, self.patience_seconds = sizes, device, patience_seconds
        self.foresight = foresight
        self.caller = CallerCpus()
        self._cpu = cpu
        self._layers: list[PackedExperts] = []
        self._deferring: dict[int, Deferral] = {}  # by layer
        self._copies: Copies | None = None
        self._mailbox: _Mailbox | None = None
        self._in_graph = self._rehearsing = False

    def add(self, layer: PackedExperts) -> int:
        """Returns the number by which `post` knows the layer."""
        self._layers.append(layer)
        if self._mailbox is not None:
            self._mailbox.add(layer)
        return len(self._layers) - 1

    def defer(self, layer: int, deferral: Deferral) -> None:
        """In graphs, experts of this layer may be late. Before any is recorded; another post follows in each."""
        self._deferring[layer] = deferral
        if self._mailbox is not None:
            self._mailbox.defer(layer, deferral)

    @property
    def layers(self) -> Sequence[PackedExperts]:
        """The CPU's experts, in the order of their numbers."""
        return self._layers

    @contextmanager
    def recording(self, rows: Tensor | None = None) -> Iterator[list[int]]:
        """Around a capture: posts go through the mailbox. The list is filled with the layers that were posted. rows
        int32 [1] on the device: how many of the graph's rows are real; the others are not posted. None: all are."""
        if self._mailbox is None and self._layers:
            self._mailbox = _Mailbox(self.sizes, self.device, self._layers, self.patience_seconds, self._cpu)
            for layer, deferral in self._deferring.items():
                self._mailbox.defer(layer, deferral)
        posted: list[int] = []
        if self._mailbox is not None:
            self._mailbox.posted, self._mailbox.rows = posted, rows
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
    def copies(self) -> Copies:
        """Of posts outside graphs of steps; graphs of prompts use them piece by piece."""
        if self._copies is None:
            self._copies = Copies(self.sizes, self.device, self._compute_here)
        return self._copies

    def collect(self, tokens: int, in_place: bool = False) -> Tensor:
        """The sum over those pairs, float32 [T, hidden] on the device. in_place: outside graphs in pinned memory, which
        kernels read and nobody changes before the next `collect`: a copy would wait behind those of experts."""
        if self._in_graph and self._mailbox is not None:
            return self._mailbox.collect(tokens)
        self.copies.compute(tokens)
        return self.copies.result(tokens) if in_place else self.copies.there(tokens)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Around the runs before a capture: what the graph will run is run, so that it is compiled; nothing is
        hinted."""
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False

    def takes_hints(self, tokens: int) -> bool:
        """Whether `hint` is worth asking a router for so many tokens."""
        return self.foresight and (self._in_graph or self._rehearsing) and tokens <= _core.MOST_HINTED_TOKENS

    def hint(self, layer: int, routing: Routing) -> None:
        """After a post, before its `collect`: the next one will be this layer's, probably with these experts. Those
        that have a slot on the GPU are left out."""
        if self._in_graph and self._mailbox is not None:
            self._mailbox.hint(layer, routing)

    def hints(self) -> HintCounts:
        """Since the start."""
        return HintCounts() if self._mailbox is None else self._mailbox.hints()

    def used(self) -> tuple[int, int]:
        """Posts of graphs answered so far, and experts that they used, each counted once per post."""
        return (0, 0) if self._mailbox is None else self._mailbox.used()

    def times(self) -> HandoffTimes:
        """Since the start, inside graphs and outside."""
        outside = HandoffTimes() if self._copies is None else self._copies.times
        inside = HandoffTimes() if self._mailbox is None else self._mailbox.times()
        return outside.plus(inside)

    def seconds_per_expert(self) -> float:
        """That the CPU took for an expert of graphs' posts, on average since the start; 0: there were none."""
        experts = self.used()[1]
        return self._mailbox.times().serve_seconds / experts if self._mailbox and experts else 0.0

    def meanwhile(self, work: _core.Meanwhile) -> None:
        """Pieces of it are done until the next `finish`, between an answer and the next post, and while that waits."""
        if self._mailbox is not None:
            self._mailbox.core.meanwhile(work)

    def begin(self, posts: int) -> None:
        """Before a graph, or several, with so many posts in all is replayed: another thread answers them, whatever
        this one waits for. `finish` or `cancel` follows; until then this thread computes nothing on the pool."""
        if posts and self._mailbox is not None:
            self.caller.leave()
            self._mailbox.thread.begin(posts, self.patience_seconds)

    def finish(self) -> None:
        """Returns when all posts are answered. Raises EngineError when that fails; the stream goes on."""
        if self._mailbox is not None:
            self._mailbox.finish()

    def cancel(self) -> None:
        """In place of `finish`, where the graph may not have begun: it need not wait, and what it computes is void."""
        if self._mailbox is not None:
            self._mailbox.cancel()

    def _compute_here(self) -> None:
        """Before this thread computes on the pool. Raises EngineError between `begin` and `finish`."""
        if self._mailbox is not None and self._mailbox.core.is_open:
            raise EngineError("experts were asked for outside a graph while the posts of one are answered")
        self.caller.compute()

    def check(self) -> None:
        """After the stream has ended a graph: raises EngineError if the GPU did not wait for an answer."""
        if self._mailbox is not None:
            self._mailbox.check()


def nothing() -> None:
    """Where nothing comes before a computation."""


def plain(pinned: Tensor) -> Tensor:
    """The same memory as an ordinary CPU tensor of bytes."""
    return torch.from_numpy(pinned.numpy())


class Copies:
    """Pinned buffers for steps outside graphs. Graphs of prompts record `send` and what reads `result`; the host calls
    `sent` and `compute` between them."""

    def __init__(self, sizes: HandoffSizes, device: torch.device, begin: Callable[[], None] = nothing) -> None:
        """begin: called before the calling thread computes."""
        self.times, self._begin = HandoffTimes(), begin
        pinned = device.type == "cuda"
        t, h, k = sizes.tokens, sizes.hidden, sizes.top_k
        self._x = torch.empty(t, h, dtype=torch.bfloat16, pin_memory=pinned)
        self._ids = torch.empty(t, k, dtype=torch.int32, pin_memory=pinned)
        self._weights = torch.empty(t, k, pin_memory=pinned)
        self._result = torch.empty(t, h, pin_memory=pinned)
        self._there = torch.empty(t, h, device=device)
        self._event = torch.cuda.Event() if pinned else None
        self._layer: PackedExperts

    def send(self, x: Tensor, routing: Routing, slots: Tensor) -> None:
        rows = slice(len(x))
        self._x[rows].copy_(x, non_blocking=True)
        self._ids[rows].copy_(torch.where(slots >= 0, -1, routing.ids), non_blocking=True)
        self._weights[rows].copy_(routing.weights, non_blocking=True)

    def sent(self, layer: PackedExperts) -> None:
        """This layer's rows were given to the stream."""
        self._layer = layer
        if self._event is not None:
            self._event.record()

    def compute(self, tokens: int) -> None:
        """Of the first rows; waits for them."""
        self._begin()
        started = perf_counter()
        if self._event is not None:
            self._event.synchronize()
        posted = perf_counter()
        rows = slice(tokens)
        x = plain(self._x[rows].view(torch.int16)).view(torch.bfloat16)
        ids, weights, result = (plain(t[rows]) for t in (self._ids, self._weights, self._result))
        self._layer.forward(x, ids, weights, result)
        self.times = self.times.plus(HandoffTimes(1, posted - started, perf_counter() - posted))

    def result(self, tokens: int) -> Tensor:
        """float32 [tokens, hidden] in pinned memory."""
        return self._result[:tokens]

    def there(self, tokens: int) -> Tensor:
        """On the device."""
        return self._there[:tokens].copy_(self._result[:tokens], non_blocking=True)


class CallerCpus:
    """CPUs of the thread that runs steps. It is worker 0 of the pool in what it computes itself, and has that worker's
    CPU then. While posts are answered, another thread is worker 0, and this one has all other CPUs."""

    def __init__(self, cpu: int = -1) -> None:
        """cpu: worker 0's; -1: the thread stays where it is. Made by the thread itself."""
        others = os.sched_getaffinity(0) - {cpu}
        self._cpus = ({cpu}, others) if cpu >= 0 and others else None
        self._is_own: bool | None = None

    def compute(self) -> None:
        """Worker 0's."""
        self._take(True)

    def leave(self) -> None:
        """All others."""
        self._take(False)

    def _take(self, own: bool) -> None:
        if self._cpus is not None and own != self._is_own:
            os.sched_setaffinity(0, self._cpus[not own])
            self._is_own = own


class _Mailbox:
    """Mapped memory, the kernels around it, and the CPU's end of it."""

    def __init__(
        self, sizes: HandoffSizes, device: torch.device, layers: list[PackedExperts], patience: float, cpu: int
    ) -> None:
        # Before a capture: compiling and loading a module may allocate and synchronise.
        self._kernels = kernels(device.index)
        shape = (sizes.mailbox_tokens, sizes.hidden, sizes.top_k, sizes.late)
        *self._at, size = _core.mailbox_offsets(*shape)
        # Pinned memory is mapped into the GPU's address space at the same address (unified addressing).
        self._memory = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._words = self._memory.numpy().view(np.uint32)
        self.core = _core.Mailbox(self._memory.numpy(), *shape)
        for layer in layers:
            self.add(layer)
        self.thread = _core.PostThread(self.core, cpu)
        self._state = torch.zeros(
            2, dtype=torch.int32, device=device
        )  # posts so far; whether the GPU gave up
        self._sizes, self._device, self._patience = sizes, device, patience
        self.posted: list[int] = []
        self.rows: Tensor | None = None

    def add(self, layer: PackedExperts) -> None:
        self.core.add(layer.core)

    def defer(self, layer: int, deferral: Deferral) -> None:
        self.core.defer(layer, deferral.kept, deferral.routed)

    def _half(self, post: int) -> int:
        """Bytes to the half that a graph's post lies in."""
        return post % 2 * int(self._at[5])

    def _rows(self) -> int:
        """Address of the number of real rows; 0: all are."""
        return 0 if self.rows is None else self.rows.data_ptr()

    def post(self, layer: int, x: Tensor, routing: Routing, slots: Tensor) -> None:
        tokens, hidden = x.shape
        if tokens > self._sizes.mailbox_tokens or slots.shape[1] != self._sizes.top_k or hidden % 8:
            raise EngineError(
                f"the mailbox does not take {list(x.shape)} tokens with {slots.shape[1]} experts"
            )
        index = len(self.posted)
        mail_x, mail_ids, mail_weights, *_ = (at + self._half(index) for at in self._at)
        base = self._memory.data_ptr()
        flags = _core.SECOND_HALF if index % 2 else 0
        numbers = [np.int32(n) for n in (tokens, hidden // 8, slots.shape[1], layer, flags)]
        launch(
            self._kernels[0], 1, POST_THREADS, self._stream(), base, self._state.data_ptr(), x.data_ptr(),
            routing.ids.data_ptr(), slots.data_ptr(), routing.weights.data_ptr(), base + mail_x, base + mail_ids,
            base + mail_weights, self._rows(), *numbers,
        )  # fmt: skip
        self.posted.append(layer)

    def collect(self, tokens: int) -> Tensor:
        out = torch.empty(tokens, self._sizes.hidden, device=self._device)
        base, patience = self._memory.data_ptr(), np.uint64(self._patience * 1e9)
        result = base + self._at[3] + self._half(len(self.posted) - 1)
        launch(
            self._kernels[1], -(-out.numel() // 4 // UNITS_PER_BLOCK), COLLECT_THREADS, self._stream(), base,
            self._state.data_ptr(), result, out.data_ptr(), self._rows(), np.int32(tokens),
            np.int32(self._sizes.hidden // 4), patience,
        )  # fmt: skip
        return out

    def hint(self, layer: int, routing: Routing) -> None:
        each = routing.ids.shape[1]
        assert routing.slots is not None and each <= self._sizes.top_k
        base, numbers = self._memory.data_ptr(), [np.int32(n) for n in (routing.ids.numel(), each, layer)]
        launch(
            self._kernels[2], 1, HINT_THREADS, self._stream(), base, self._state.data_ptr(),
            routing.ids.data_ptr(), routing.slots.data_ptr(), base + self._at[4], *numbers,
        )  # fmt: skip

    def hints(self) -> HintCounts:
        return HintCounts(self.core.hinted, self.core.hits, self.core.bytes_ahead)

    def finish(self) -> None:
        try:
            self.thread.finish()
        except Exception as error:
            self._recover()
            raise EngineError(f"the experts in CPU memory failed: {error}") from error

    def cancel(self) -> None:
        if self.core.is_open:
            self.thread.cancel()
            with suppress(EngineError):
                self.finish()

    def check(self) -> None:
        """Patience may end in the last `collect`, while the CPU computes: it answers and sees nothing of it."""
        if self._words[GAVE_UP]:
            self._recover()
            raise EngineError(
                f"the experts in CPU memory took longer than {self._patience:g} s: the GPU has given up"
            )

    def _recover(self) -> None:
        self._synchronize()  # ends within the kernels' patience
        self._state.zero_()
        self._synchronize()
        self.core.reset()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def used(self) -> tuple[int, int]:
        return self.core.posts, self.core.experts_used

    def times(self) -> HandoffTimes:
        return HandoffTimes(self.core.posts, self.core.wait_seconds, self.core.serve_seconds)

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)
