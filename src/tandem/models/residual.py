"""Residual around a block: one stream that results are added to, or several streams that mix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tandem.architectures.names import Names
from tandem.kernels.joined import AfterNorm, Sum
from tandem.kernels.ops import Ops
from tandem.mechanisms.slices import part_of
from tandem.models.builder import Builder
from tandem.models.passing import ForwardState
from tandem.spec.layers import ResidualStreams
from tandem.spec.model_config import layer_of


class Residual(Protocol):
    """Residual of a block, or of what follows the last one. norm: the weight of the norm behind it, with `eps`."""

    def enter(self, p: ForwardState, norm: Tensor, eps: float, first: AfterNorm | None = None) -> Tensor:
        """Adds what is pending to the stream; the normed rows [T, hidden] that a block takes. first: what they are
        multiplied with, perhaps at once (`ForwardState.begun`)."""
        ...

    def peek(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Rows that `enter` gives where nothing is pending; nothing changes."""
        ...


class Summing(Residual, Protocol):
    """Behind the last of several streams' blocks."""

    def summed(self, residual: Tensor) -> Tensor:
        """[T, hidden], before any norm, of streams [T, n, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class OneStream:
    """residual + block(norm(residual)). scale [1]: of the residual, where the layer before ends with one."""

    ops: Ops
    scale: Tensor | None = None

    def enter(self, p: ForwardState, norm: Tensor, eps: float, first: AfterNorm | None = None) -> Tensor:
        if self.scale is not None:
            add_pending(p)
            p.residual.mul_(self.scale)
        if p.pending is None:
            return self.ops.rms_norm(p.residual, norm, eps)
        addend, p.addend = p.addend, None
        if first is not None:
            normed = first.after_norm(Sum(p.pending, p.residual, norm, eps, addend))
            if normed is not None:
                p.residual, p.begun = normed.residual, (first, normed.product)
                return normed.x
        return self.ops.add_rms_norm(p.pending, p.residual, norm, eps, addend)

    def peek(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self.ops.rms_norm(residual if self.scale is None else residual * self.scale, norm, eps)


def add_pending(p: ForwardState) -> None:
    """Adds the pending summand to the stream."""
    if p.pending is None:
        return
    p.residual = p.residual.add_(p.pending) if p.mix is None else p.mix.left(p.residual, p.pending)
    p.pending = p.mix = None


def widened(embedded: Tensor, hyper: ResidualStreams | None) -> Tensor:
    """Embedded tokens [T, hidden] as the first block takes them up."""
    if hyper is None:
        return embedded
    return embedded[:, None].expand(-1, hyper.streams, -1).contiguous()


def mean_of(streams: Tensor) -> Tensor:
    """[T, n, hidden] → [T, hidden], of the same type. Bits do not depend on the number of rows."""
    total = streams[:, 0].float()
    for j in range(1, streams.shape[1]):
        total = total + streams[:, j].float()
    return (total / streams.shape[1]).to(streams.dtype)


def scale_of(b: Builder, layer: int | None, names: Names) -> Tensor | None:
    """Factor of the residual where that layer ends, [1]; None: it has none."""
    if layer is None or layer < 0 or not layer_of(b.config, layer).scaled:
        return None
    return b.tensor(f"model.layers.{layer}.{names.scale}", 1)


def residual_of(b: Builder, hyper: ResidualStreams | None, name: str, scale: Tensor | None = None) -> Residual:
    """Residual of a block whose streams' weights are called `name`.fn, .scale and .base. scale: of one residual."""
    if hyper is None:
        return OneStream(b.ops, scale)
    residual: Residual = part_of(hyper, "block").residual(b, hyper, name)
    return residual


def end_of(b: Builder, names: Names) -> Residual:
    """Before the last norm."""
    hyper = b.config.layers[0].hyper
    if hyper is None:
        return OneStream(b.ops, scale_of(b, len(b.config.layers) - 1, names))
    ending: Residual = part_of(hyper, "block").ending(b, hyper)
    return ending


def norm_channels(b: Builder, hyper: ResidualStreams | None) -> int:
    """Channels of a block's norm."""
    return b.config.hidden if hyper is None else hyper.norm_channels(b.config.hidden)


def summed_up(b: Builder, hyper: ResidualStreams, name: str) -> Summing:
    """Sum behind the last of several streams' blocks. name: in front of its weights."""
    summing: Summing = part_of(hyper, "block").summed_up(b, hyper, name)
    return summing
