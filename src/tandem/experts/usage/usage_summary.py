"""Summary of recorded counts: how uneven experts are used, layer by layer and over all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.experts.usage.usage_file import UsageRecord

SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)  # of all experts
CHANCE_SEED = 42


@dataclass(frozen=True, slots=True)
class LayerUse:
    """One layer. layer: the decoder layer, or the number of the row where that is not known."""

    layer: int
    tokens: float  # routed to its experts, each counted once for each expert
    effective: float  # exp of the entropy: so many experts, evenly used, would be as uncertain
    hottest_tenth: float  # share of the tokens that the most used tenth of its experts got
    unused: int  # experts that got none


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The hottest `experts` (a share) of all experts of all layers served `tokens` (a share). chance: what they would
    have served if the router chose evenly, and the hottest were so by luck."""

    experts: float
    tokens: float
    chance: float


@dataclass(frozen=True, slots=True)
class UsageSummary:
    layers: tuple[LayerUse, ...]
    experts: int  # of a layer
    curve: tuple[CurvePoint, ...]
    gpu_experts: float | None  # share of all experts that were on a GPU, and of the tokens they got
    gpu_tokens: float | None
    relative: Tensor  # float64 [layers, experts]: 1 is what even use would give

    @property
    def effective(self) -> float:
        """Mean over layers that were used."""
        per_layer = [layer.effective for layer in self.layers if layer.tokens]
        return sum(per_layer) / len(per_layer)


def summary(record: UsageRecord) -> UsageSummary:
    """Raises ConfigError when nothing was counted."""
    counts = record.total
    if not bool(counts.any()):
        raise ConfigError("it holds no tokens: nothing ran between start and stop")
    experts = counts.shape[1]
    relative = counts / counts.sum(1, keepdim=True).clamp(min=1e-300) * experts
    numbers = record.layers or tuple(range(len(counts)))
    gpu_experts, gpu_tokens = gpu_shares(record)
    return UsageSummary(
        tuple(_layer(number, row) for number, row in zip(numbers, counts, strict=True)), experts,
        tuple(CurvePoint(share, *_served(counts, share)) for share in SHARES), gpu_experts, gpu_tokens, relative,
    )  # fmt: skip


def cumulative(counts: Tensor) -> Tensor:
    """Shares of the tokens that the hottest 1, 2, … experts got, float64 [counts.numel()]."""
    return counts.flatten().sort(descending=True).values.cumsum(0) / counts.sum()


def by_chance(counts: Tensor) -> Tensor:
    """Counts of as many tokens if each layer's experts were chosen evenly (Poisson), seeded."""
    mean = counts.mean(1, keepdim=True).expand_as(counts)
    return torch.poisson(mean, generator=torch.Generator().manual_seed(CHANCE_SEED))


def gpu_shares(record: UsageRecord) -> tuple[float | None, float | None]:
    """Shares of experts on a GPU and of tokens routed to them."""
    if record.gpu_experts is None:
        return None, None
    mask = record.gpu_experts.double()
    counts = record.counts.double() if mask.dim() == record.counts.dim() else record.total
    if mask.shape != counts.shape:
        raise ConfigError(f"its gpu_experts is {list(mask.shape)}, its counts {list(counts.shape)}")
    return float(mask.mean()), float((counts * mask).sum() / counts.sum())


def _served(counts: Tensor, share: float) -> tuple[float, float]:
    last = max(1, round(share * counts.numel())) - 1
    chance = by_chance(counts)
    lucky = float(cumulative(chance)[last]) if bool(chance.any()) else share
    return float(cumulative(counts)[last]), lucky


def _layer(number: int, counts: Tensor) -> LayerUse:
    total = float(counts.sum())
    if not total:
        return LayerUse(number, 0.0, 0.0, 0.0, len(counts))
    p = counts / total
    entropy = float(torch.special.entr(p).sum())
    tenth = max(1, math.ceil(len(counts) / 10))
    hottest = float(p.sort(descending=True).values[:tenth].sum())
    return LayerUse(number, total, math.exp(entropy), hottest, int((counts == 0).sum()))
