"""Residual streams that never mix, and what blocks take of them and give to them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tandem.kernels.joined import AfterNorm
from tandem.kernels.ops import Ops
from tandem.mechanisms.gated_streams.shape import GatedStreams
from tandem.mechanisms.gated_streams.torch import GatedMix, GatedWeights, ReturningRows, Shares
from tandem.models.builder import Builder
from tandem.models.passing import ForwardState
from tandem.models.residual import add_pending


@dataclass(frozen=True, slots=True)
class GatedResidual:
    """Gated streams around a block, or after the last one: then nothing is injected."""

    mix: GatedMix

    def enter(self, p: ForwardState, norm: Tensor, eps: float, first: AfterNorm | None = None) -> Tensor:
        leaving = ReturningRows(p.pending, p.mix) if p.pending is not None and isinstance(p.mix, Shares) else None
        if leaving is None:
            add_pending(p)
        p.residual, x, p.mix = self.mix.advanced(p.residual, leaving, norm, eps)
        p.pending = None
        return x

    def peek(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self.mix.advanced(residual, None, norm, eps)[1]


@dataclass(frozen=True, slots=True)
class WholeStreams:
    """Residual of a block that takes all streams, normed, and adds to each of them."""

    mix: GatedMix

    def enter(self, p: ForwardState, norm: Tensor, eps: float, first: AfterNorm | None = None) -> Tensor:
        """[T, n, hidden]."""
        add_pending(p)
        return self.peek(p.residual, norm, eps)

    def peek(self, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self.mix.normed(residual, norm, eps)


def whole_streams(ops: Ops, streams: int) -> WholeStreams:
    """Residual of a block that takes so many streams."""
    return WholeStreams(ops.bound(GatedStreams(streams, 0)))


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
    up = b.linear([f"{name}.input_mix_weight_up"], [wide], hyper.rank)
    return GatedResidual(b.ops.bound(hyper, GatedWeights(down, up, bool(inject))))
