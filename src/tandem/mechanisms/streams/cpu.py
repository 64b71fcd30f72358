"""`CpuStreams`: hyper-connections on the C++ core."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.mechanisms.streams.shape import Hyper
from tandem.mechanisms.streams.torch import HyperStreams, HyperWeights, StreamMix

PIECE = 64  # rows in float32 at a time: memory that was just freed is used again


class CpuStreams(HyperStreams):
    """As `HyperStreams`; bound to the width of a stream, too."""

    def __init__(
        self, pool: _core.WorkerPool, tier: str, shape: Hyper, weights: HyperWeights, hidden: int
    ) -> None:
        super().__init__(shape, weights)
        sizes = shape.streams, hidden, shape.iterations
        self._core = _core.Streams(pool, tier, *sizes, shape.eps, shape.norm_eps)

    def entered(self, streams: Tensor) -> tuple[Tensor, StreamMix]:
        rows, n = streams.shape[:2]
        share, mixing = (torch.empty((rows, *sizes)) for sizes in ((n,), (n, n)))
        return self._out(streams, share, mixing), StreamMix(share, mixing, self._left)

    def summed(self, streams: Tensor) -> Tensor:
        return self._out(streams, None, None)

    def _out(self, streams: Tensor, share: Tensor | None, mixing: Tensor | None) -> Tensor:
        """The rows [T, hidden] that a block takes; how its result returns is written, if it does."""
        streams, rows = streams.contiguous(), len(streams)
        norms, out = torch.empty(rows), streams.new_empty((rows, streams.shape[2]))
        pieces = [slice(first, first + PIECE) for first in range(0, rows, PIECE)]
        products = [self._projected(streams[piece], norms[piece]) for piece in pieces]
        if not products:  # a chunk whose logits nobody wants has no rows at the end
            return out
        sums = products[0] if len(products) == 1 else torch.cat(products)
        self._core.enter(streams, sums, norms, self.weights.scale, self.weights.base, out, share, mixing)
        return out

    def _projected(self, streams: Tensor, norms: Tensor) -> Tensor:
        """Product of rows with the matrix, in float32; their norms are written."""
        wide = torch.empty((len(streams), streams[0].numel()))
        self._core.widen(streams, wide, norms)
        return self.weights.project(wide)

    def _left(self, streams: Tensor, y: Tensor, share: Tensor, mixing: Tensor) -> Tensor:
        out = torch.empty_like(streams, memory_format=torch.contiguous_format)
        self._core.leave(streams.contiguous(), y.contiguous(), share, mixing, out)
        return out


def bound(ops: CpuOps, shape: Hyper, weights: HyperWeights, hidden: int) -> HyperStreams:
    """hidden: channels of a stream."""
    return CpuStreams(ops.pool, ops.tier, shape, weights, hidden)
