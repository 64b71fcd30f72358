"""Hyper-connections in torch: streams that are summed up for a block, and mixed with its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.mechanisms.streams.shape import Hyper


class HyperWeights(NamedTuple):
    """Weights of a block, m = n * (2 + n), or of the end after the last one, m = n. project: a row of all streams,
    float32, to [M], of which the first m count: M is a multiple of `hyper.LANES`. scale and base [M] multiply its
    output and are added."""

    project: Callable[[Tensor], Tensor]
    scale: Tensor
    base: Tensor


def mixed(streams: Tensor, y: Tensor, share: Tensor, mixing: Tensor) -> Tensor:
    """`StreamMix.leave` in torch."""
    total = share[:, :, None] * y.float()[:, None]
    for j in range(streams.shape[1]):  # a fused sum's bits would depend on the number of rows
        total += mixing[:, j, :, None] * streams[:, j, None].float()
    return total.to(streams.dtype)


class StreamMix(NamedTuple):
    """How a block's result returns to the streams: share [T, n] of it, and the streams' own mixing [T, n, n]: from the
    second dimension to the third. leave: streams, result, share, mixing -> streams."""

    share: Tensor
    mixing: Tensor
    leave: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = mixed

    def of(self, rows: Tensor) -> StreamMix:
        return self._replace(share=self.share[rows], mixing=self.mixing[rows])

    def left(self, streams: Tensor, y: Tensor) -> Tensor:
        """Streams [T, n, hidden] mixed, and the block's result y [T, hidden] shared out to them."""
        return self.leave(streams, y, self.share, self.mixing)


class StreamResult(NamedTuple):
    """A block's result [T, hidden], and how it returns."""

    y: Tensor
    mix: StreamMix


class RowNorm(NamedTuple):
    """Norm of rows; apply: rows, weight and eps to normed rows, as `Ops.rms_norm`."""

    weight: Tensor
    eps: float
    apply: Callable[[Tensor, Tensor, float], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.apply(x, self.weight, self.eps)


class HyperStreams:
    """Hyper-connections bound to their weights. streams [T, n, hidden]; everything between is float32."""

    def __init__(self, shape: Hyper, weights: HyperWeights) -> None:
        self.shape, self.weights = shape, weights

    def advanced(
        self, streams: Tensor, leaving: StreamResult | None, norm: RowNorm, last: bool = False
    ) -> tuple[Tensor, Tensor, StreamMix | None]:
        """The streams after what is leaving has joined them, a block's normed rows [T, hidden], and how its result
        returns; None where no block follows. The streams given stay as they are."""
        if leaving is not None:
            streams = leaving.mix.left(streams, leaving.y)
        x, mix = (self.summed(streams), None) if last else self.entered(streams)
        return streams, norm(x), mix

    def entered(self, streams: Tensor) -> tuple[Tensor, StreamMix]:
        """A block's rows [T, hidden], and how its result returns."""
        n = self.shape.streams
        logits = self._mix_logits(streams)
        shares = logits.sigmoid()
        balanced = _balanced(logits[:, 2 * n : (2 + n) * n].unflatten(-1, (n, n)), self.shape)
        return self._weighed(streams, shares), StreamMix(2 * shares[:, n : 2 * n], balanced)

    def summed(self, streams: Tensor) -> Tensor:
        """The rows [T, hidden] that follow the last block."""
        return self._weighed(streams, self._mix_logits(streams).sigmoid())

    def _mix_logits(self, streams: Tensor) -> Tensor:
        """Projection of the streams, normed together. The norm is one number for each row, and comes last."""
        flat = streams.flatten(1).float()
        norm = torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps)
        logits: Tensor = self.weights.project(flat) * norm * self.weights.scale + self.weights.base
        return logits

    def _weighed(self, streams: Tensor, shares: Tensor) -> Tensor:
        shares = shares[:, : self.shape.streams] + self.shape.eps
        total = shares[:, 0, None] * streams[:, 0].float()
        for j in range(1, self.shape.streams):  # as above
            total += shares[:, j, None] * streams[:, j].float()
        return total.to(streams.dtype)


def _balanced(logits: Tensor, shape: Hyper) -> Tensor:
    """Rows and columns that add up to about 1 (Sinkhorn and Knopp), [T, n, n]."""
    mixing = logits.softmax(-1).add_(shape.eps)
    mixing /= mixing.sum(-2, keepdim=True).add_(shape.eps)
    for _ in range(shape.iterations - 1):
        mixing /= mixing.sum(-1, keepdim=True).add_(shape.eps)
        mixing /= mixing.sum(-2, keepdim=True).add_(shape.eps)
    return mixing


def bound(ops: object, shape: Hyper, weights: HyperWeights, hidden: int) -> HyperStreams:
    """hidden: channels of a stream."""
    return HyperStreams(shape, weights)
