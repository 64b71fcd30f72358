"""What stands around a block: one residual that results are added to, or several streams that mix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.architectures.names import Names
from tandem.config.model_config import layer_of
from tandem.config.state import LANES
from tandem.kernels.joined import AfterNorm, Sum
from tandem.kernels.ops import Ops
from tandem.mechanisms.streams.shape import Hyper
from tandem.mechanisms.streams.torch import HyperStreams, HyperWeights, Leaving, RowNorm, left
from tandem.models.builder import Builder
from tandem.models.passing import Pass


class Residual(Protocol):
    """Of a block, or of what follows the last one. norm: the weight of the norm behind it, with `eps`."""

    def enter(self, p: Pass, norm: Tensor, eps: float, first: AfterNorm | None = None) -> Tensor:
        """Adds what is pending to the stream; the normed rows [T, hidden] that a block takes. first: what they are
        multiplied with, perhaps at once (`Pass.begun`)."""
        ...

    def peek(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """What `enter` gives where nothing is pending; nothing changes."""
        ...


@dataclass(frozen=True, slots=True)
class OneStream:
    """residual + block(norm(residual)). scale [1]: of the residual, where the layer before ends with one."""

    ops: Ops
    scale: Tensor | None = None

    def enter(self, p: Pass, norm: Tensor, eps: float, first: AfterNorm | None = None) -> Tensor:
        if self.scale is not None:
            settle(p)
            p.residual.mul_(self.scale)
        if p.pending is None:
            return self.ops.rms_norm(p.residual, norm, eps)
        beside, p.beside = p.beside, None
        if first is not None:
            made = first.after_norm(Sum(p.pending, p.residual, norm, eps, beside))
            if made is not None:
                p.residual, p.begun = made.residual, (first, made.product)
                return made.x
        return self.ops.add_rms_norm(p.pending, p.residual, norm, eps, beside)

    def peek(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self.ops.rms_norm(residual if self.scale is None else residual * self.scale, norm, eps)


@dataclass(frozen=True, slots=True)
class MixedStreams:
    """Hyper-connections. last: no block follows, the streams only end."""

    ops: Ops
    streams: HyperStreams
    last: bool = False

    def enter(self, p: Pass, norm: Tensor, eps: float, first: AfterNorm | None = None) -> Tensor:
        leaving = None if p.pending is None or p.mix is None else Leaving(p.pending, p.mix)
        rows = RowNorm(norm, eps, self.ops.rms_norm)
        p.residual, x, p.mix = self.streams.advanced(p.residual, leaving, rows, self.last)
        p.pending = None
        return x

    def peek(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self.streams.advanced(residual, None, RowNorm(norm, eps, self.ops.rms_norm), self.last)[1]


@dataclass(frozen=True, slots=True)
class MeanOfStreams:
    """Behind the last block of several streams: their mean, without weights."""

    ops: Ops

    def enter(self, p: Pass, norm: Tensor, eps: float, first: AfterNorm | None = None) -> Tensor:
        settle(p)
        return self.peek(p.residual, norm, eps)

    def peek(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        total = residual[:, 0].float()
        for j in range(1, residual.shape[1]):  # bits must not depend on the number of rows
            total = total + residual[:, j].float()
        return self.ops.rms_norm((total / residual.shape[1]).to(residual.dtype), norm, eps)


def settle(p: Pass) -> None:
    """What is pending becomes part of the stream."""
    if p.pending is None:
        return
    p.residual = p.residual.add_(p.pending) if p.mix is None else left(p.residual, p.pending, p.mix)
    p.pending = p.mix = None


def widened(embedded: Tensor, hyper: Hyper | None) -> Tensor:
    """Embedded tokens [T, hidden] as the first block takes them up."""
    if hyper is None:
        return embedded
    return embedded[:, None].expand(-1, hyper.streams, -1).contiguous()


def scale_of(b: Builder, layer: int | None, names: Names) -> Tensor | None:
    """What the residual is multiplied with where that layer ends, [1]."""
    if layer is None or layer < 0 or not layer_of(b.config, layer).scaled:
        return None
    return b.tensor(f"model.layers.{layer}.{names.scale}", 1)


def residual_of(b: Builder, hyper: Hyper | None, name: str, scale: Tensor | None = None) -> Residual:
    """Of a block whose streams' weights are called `name`.fn, .scale and .base. scale: of one residual."""
    if hyper is None:
        return OneStream(b.ops, scale)
    n = hyper.streams
    scale = b.float_tensor(f"{name}.scale", 3)
    each = torch.tensor([n, n, n * n], device=scale.device)
    return MixedStreams(
        b.ops, _streams(b, hyper, (f"{name}.fn", f"{name}.base"), scale.repeat_interleave(each))
    )


def end_of(b: Builder, names: Names) -> Residual:
    """Before the last norm."""
    hyper = b.config.layers[0].hyper
    if hyper is None:
        return OneStream(b.ops, scale_of(b, len(b.config.layers) - 1, names))
    return MeanOfStreams(b.ops) if hyper.mean else summed_up(b, hyper, "model.hc_head.hc_")


def summed_up(b: Builder, hyper: Hyper, name: str) -> Residual:
    """What follows the last of several streams' blocks. name: in front of its weights."""
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
