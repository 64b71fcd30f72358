"""`EagerCopies`: a layer's tokens to pinned memory and its experts' sum back, outside CUDA graphs of decode steps."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from tandem.experts.handoff_counts import HandoffSizes, HandoffTimes
from tandem.experts.residency import left_to_host
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.ops import Routing


def nothing() -> None:
    """Where nothing comes before a computation."""


def plain(pinned: Tensor) -> Tensor:
    """The same memory as an ordinary CPU tensor of bytes."""
    return torch.from_numpy(pinned.numpy())


class EagerCopies:
    """Pinned buffers for steps outside graphs. Graphs of prompts record `send` and what reads `result`; the host calls
    `sent` and `compute` between them."""

    def __init__(
        self, sizes: HandoffSizes, device: torch.device, begin: Callable[[], None] = nothing
    ) -> None:
        """begin: called before the calling thread computes."""
        self.times, self._begin, self.computes = HandoffTimes(), begin, True
        pinned = device.type == "cuda"
        t, h, k = sizes.tokens, sizes.hidden, sizes.top_k
        self._x = torch.empty(t, h, dtype=torch.bfloat16, pin_memory=pinned)
        self._ids = torch.empty(t, k, dtype=torch.int32, pin_memory=pinned)
        self._weights = torch.empty(t, k, pin_memory=pinned)
        self._result = torch.empty(t, h, pin_memory=pinned)
        self._device_rows = torch.empty(t, h, device=device)
        self._event = torch.cuda.Event() if pinned else None
        self._layer: PackedExperts

    def send(self, x: Tensor, routing: Routing, slots: Tensor) -> None:
        rows = slice(len(x))
        self._x[rows].copy_(x, non_blocking=True)
        self._ids[rows].copy_(left_to_host(routing.ids, slots), non_blocking=True)
        self._weights[rows].copy_(routing.weights, non_blocking=True)

    def sent(self, layer: PackedExperts) -> None:
        """This layer's rows were given to the stream."""
        self._layer = layer
        if self._event is not None:
            self._event.record()

    def compute(self, tokens: int) -> None:
        """Computes the first rows, once they have come."""
        self._begin()
        started = perf_counter()
        if self._event is not None:
            self._event.synchronize()
        if not self.computes:
            self._result[:tokens].zero_()
            return
        posted_at = perf_counter()
        rows = slice(tokens)
        x = plain(self._x[rows].view(torch.int16)).view(torch.bfloat16)
        ids, weights, result = (plain(t[rows]) for t in (self._ids, self._weights, self._result))
        self._layer.forward(x, ids, weights, result)
        self.times = self.times.plus(HandoffTimes(1, posted_at - started, perf_counter() - posted_at))

    def result(self, tokens: int) -> Tensor:
        """float32 [tokens, hidden] in pinned memory."""
        return self._result[:tokens]

    def on_device(self, tokens: int) -> Tensor:
        """On the device."""
        return self._device_rows[:tokens].copy_(self._result[:tokens], non_blocking=True)
