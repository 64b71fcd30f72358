"""Gated residual streams in torch: what a block takes of them, and how its result returns; the oracle of kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.gates import in_whole_vectors
from tandem.kernels.ops import Linear, Ops
from tandem.mechanisms.gated_streams.shape import GatedStreams


class GatedWeights(NamedTuple):
    """Matrices of a block, or of the end after the last one. down: makes the gates and, below them, each stream's share
    of the result; up: a gate for each channel of each stream. inject: whether there are shares."""

    down: Linear
    up: Linear
    inject: bool


class Shares(NamedTuple):
    """Shares of a block's result for each stream, [T, n]."""

    share: Tensor

    def of(self, rows: Tensor) -> Shares:
        return Shares(self.share[rows])

    def left(self, streams: Tensor, y: Tensor) -> Tensor:
        shared: Tensor = streams + y[:, None] * self.share[:, :, None]
        return shared


class ReturningRows(NamedTuple):
    """A block's result [T, hidden], and how it returns."""

    y: Tensor
    shares: Shares


class GatedMix(Protocol):
    """Gated streams bound to their matrices."""

    def advanced(
        self, streams: Tensor, leaving: ReturningRows | None, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Shares | None]:
        """streams [T, n, hidden] after what is leaving has joined them; a block's rows [T, hidden]; how its result
        returns, None where no block follows. norm: float32 [n * hidden]. The streams given stay as they are."""
        ...

    def normed(self, streams: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Each stream of [T, n, hidden] normed by itself."""
        ...


class TorchGatedMix:
    """`GatedMix` in the operations of `Ops`."""

    def __init__(self, ops: Ops, shape: GatedStreams, weights: GatedWeights | None) -> None:
        """weights: None where only `normed` is called."""
        self._ops, self._shape, self._weights = ops, shape, weights

    def advanced(
        self, streams: Tensor, leaving: ReturningRows | None, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Shares | None]:
        assert self._weights is not None
        n, rank, w = self._shape.streams, self._shape.rank, self._weights
        if leaving is not None:
            streams = leaving.shares.left(streams, leaving.y)
        normed = self.normed(streams, norm, eps)
        projected = w.down(normed.flatten(1)) / n
        activated = in_whole_vectors(F.silu, projected[:, :rank]).contiguous()
        passed = in_whole_vectors(torch.sigmoid, w.up(activated)).reshape(normed.shape) * normed
        total = passed[:, 0].float()
        for j in range(1, n):  # bits must not depend on the number of rows
            total = total + passed[:, j].float()
        x = (total / n).to(streams.dtype)
        shares = Shares(2 * in_whole_vectors(torch.sigmoid, projected[:, rank:])) if w.inject else None
        return streams, x, shares

    def normed(self, streams: Tensor, norm: Tensor, eps: float) -> Tensor:
        each = norm.view(streams.shape[1], -1)
        rows = [self._ops.rms_norm(streams[:, j].contiguous(), each[j], eps) for j in range(len(each))]
        return torch.stack(rows, 1)


def bound(ops: Ops, shape: GatedStreams, weights: GatedWeights | None = None) -> GatedMix:
    return TorchGatedMix(ops, shape, weights)
