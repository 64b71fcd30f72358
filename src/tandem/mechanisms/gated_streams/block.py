"""Residual streams that never mix, and what blocks take of them and give to them, written in `Ops` only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.gates import in_whole_vectors
from tandem.kernels.joined import AfterNorm
from tandem.kernels.ops import Linear, Ops
from tandem.mechanisms.gated_streams.shape import GatedStreams
from tandem.models.builder import Builder
from tandem.models.passing import Pass
from tandem.models.residual import settle


class Shares(NamedTuple):
    """Shares of a block's result for each stream, [T, n]."""

    share: Tensor

    def of(self, rows: Tensor) -> Shares:
        return Shares(self.share[rows])

    def left(self, streams: Tensor, y: Tensor) -> Tensor:
        shared: Tensor = streams + y[:, None] * self.share[:, :, None]
        return shared


@dataclass(frozen=True, slots=True)
class GatedResidual:
    """Gated streams around a block, or after the last one: then nothing is injected. down: makes the gates and, below
    them, each stream's share of the result."""

    ops: Ops
    shape: GatedStreams
    down: Linear
    up: Linear
    last: bool

    def enter(self, p: Pass, norm: Tensor, eps: float, first: AfterNorm | None = None) -> Tensor:
        settle(p)
        x, share = self._mixed(p.residual, norm, eps)
        if not self.last:
            p.mix = Shares(share)
        return x

    def peek(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self._mixed(residual, norm, eps)[0]

    def _mixed(self, streams: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """A block's rows [T, hidden], and how much of its result each stream gets, [T, n]."""
        n = self.shape.streams
        normed = normed_each(self.ops, streams, norm, eps)
        projected = self.down(normed.flatten(1)) / n
        activated = in_whole_vectors(F.silu, projected[:, : self.shape.rank]).contiguous()
        passed = in_whole_vectors(torch.sigmoid, self.up(activated)).reshape(normed.shape) * normed
        total = passed[:, 0].float()
        for j in range(1, n):  # bits must not depend on the number of rows
            total = total + passed[:, j].float()
        share = 2 * in_whole_vectors(torch.sigmoid, projected[:, self.shape.rank :])
        return (total / n).to(streams.dtype), share


@dataclass(frozen=True, slots=True)
class WholeStreams:
    """Residual of a block that takes all streams, normed, and adds to each of them."""

    ops: Ops

    def enter(self, p: Pass, norm: Tensor, eps: float, first: AfterNorm | None = None) -> Tensor:
        """[T, n, hidden]."""
        settle(p)
        return self.peek(p.residual, norm, eps)

    def peek(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        return normed_each(self.ops, residual, norm, eps)


def normed_each(ops: Ops, streams: Tensor, weight: Tensor, eps: float) -> Tensor:
    """streams [T, n, hidden], each normed by itself. weight: float32 [n * hidden], one stream's after the other's."""
    each = weight.view(streams.shape[1], -1)
    return torch.stack([ops.rms_norm(streams[:, j].contiguous(), each[j], eps) for j in range(len(each))], 1)


def residual(b: Builder, hyper: GatedStreams, name: str) -> GatedResidual:
    """Gated residual around a block; name: of the module that holds its matrices."""
    return _gated(b, hyper, name, [f"{name}.block_inject_weight"])


def ending(b: Builder, hyper: GatedStreams) -> GatedResidual:
    """Before the model's last norm."""
    return summed_up(b, hyper, "model.hyper_connection_mixer")


def summed_up(b: Builder, hyper: GatedStreams, name: str) -> GatedResidual:
    """Sum of the streams after the last block. name: of the module that holds its matrices."""
    return _gated(b, hyper, name, [])


def _gated(b: Builder, hyper: GatedStreams, name: str, inject: list[str]) -> GatedResidual:
    wide = hyper.streams * b.config.hidden
    modules = [f"{name}.input_mix_weight_down", *inject]
    down = b.linear(modules, [hyper.rank, hyper.streams][: len(modules)], wide)
    return GatedResidual(b.ops, hyper, down, b.linear([f"{name}.input_mix_weight_up"], [wide], hyper.rank), not inject)
