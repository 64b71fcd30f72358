"""Hyper-connections around blocks: streams that mix, and their end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.joined import AfterNorm
from tandem.kernels.ops import Ops
from tandem.mechanisms.streams.shape import Hyper
from tandem.mechanisms.streams.torch import HyperStreams, HyperWeights, RowNorm, StreamMix, StreamResult
from tandem.models.builder import Builder
from tandem.models.passing import ForwardState
from tandem.models.residual import add_pending, mean_of
from tandem.spec.state import LANES


@dataclass(frozen=True, slots=True)
class MixedStreams:
    """Hyper-connections. last: no block follows, the streams only end."""

    ops: Ops
    streams: HyperStreams
    last: bool = False

    def enter(self, p: ForwardState, norm: Tensor, eps: float, first: AfterNorm | None = None) -> Tensor:
        leaving = StreamResult(p.pending, p.mix) if p.pending is not None and isinstance(p.mix, StreamMix) else None
        rows = RowNorm(norm, eps, self.ops.rms_norm)
        p.residual, x, p.mix = self.streams.advanced(p.residual, leaving, rows, self.last)
        p.pending = None
        return x

    def peek(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self.streams.advanced(residual, None, RowNorm(norm, eps, self.ops.rms_norm), self.last)[1]

    def summed(self, residual: Tensor) -> Tensor:
        """[T, hidden], before any norm."""
        return self.streams.summed(residual)


@dataclass(frozen=True, slots=True)
class MeanOfStreams:
    """Behind the last block of several streams: their mean, without weights."""

    ops: Ops

    def enter(self, p: ForwardState, norm: Tensor, eps: float, first: AfterNorm | None = None) -> Tensor:
        add_pending(p)
        return self.peek(p.residual, norm, eps)

    def peek(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self.ops.rms_norm(mean_of(residual), norm, eps)


def residual(b: Builder, hyper: Hyper, name: str) -> MixedStreams:
    """Mixed streams around a block, whose weights are called `name`.fn, .scale and .base."""
    n = hyper.streams
    scale = b.float_tensor(f"{name}.scale", 3)
    each = torch.tensor([n, n, n * n], device=scale.device)
    return MixedStreams(
        b.ops, _streams(b, hyper, (f"{name}.fn", f"{name}.base"), scale.repeat_interleave(each))
    )


def ending(b: Builder, hyper: Hyper) -> MixedStreams | MeanOfStreams:
    """Before the model's last norm."""
    return MeanOfStreams(b.ops) if hyper.mean else summed_up(b, hyper, "model.hc_head.hc_")


def summed_up(b: Builder, hyper: Hyper, name: str) -> MixedStreams:
    """Sum of several streams after the last block. name: in front of its weights."""
    scale = b.float_tensor(f"{name}scale", 1).repeat(hyper.streams)
    return MixedStreams(b.ops, _streams(b, hyper, (f"{name}fn", f"{name}base"), scale), last=True)


def _streams(b: Builder, hyper: Hyper, names: tuple[str, str], scale: Tensor) -> HyperStreams:
    """names: of the matrix and of what is added to its products."""
    rows, missing = len(scale), -len(scale) % LANES
    matrix = b.checkpoint.get(names[0], (rows, hyper.streams * b.config.hidden)).float()
    project = b.ops.linear(F.pad(matrix, (0, 0, 0, missing)), fmt="f32")
    base = F.pad(b.float_tensor(names[1], rows), (0, missing))
    weights = HyperWeights(project, F.pad(scale, (0, missing)), base)
    bound: HyperStreams = b.ops.bound(hyper, weights, b.config.hidden)
    return bound
