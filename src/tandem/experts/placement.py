"""`ExpertPlacement`: pure data, which experts of which layer live on the GPU; and the strategies that make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.experts.residency import packed_slots
from tandem.experts.usage.usage_file import read_usage

RANDOM_SEED = 42


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """gpu_experts bool [MoE layers, experts]. drafts: whether the experts of draft layers, which count as those behind
    these, are there as well."""

    gpu_experts: Tensor
    drafts: bool = False

    @property
    def layers(self) -> int:
        """Without draft layers."""
        return len(self.gpu_experts)

    @property
    def total(self) -> int:
        return int(self.gpu_experts.sum())

    def slots(self, layer: int) -> Tensor:
        """int32 [experts]: the expert's place among its layer's on the GPU, -1 for those in CPU memory."""
        if layer >= self.layers:
            resident = torch.full_like(self.gpu_experts[0], self.drafts)
        else:
            resident = self.gpu_experts[layer]
        return packed_slots(resident)


def place(
    strategy: str, layers: int, experts: int, total: int, counts: Tensor | None = None
) -> ExpertPlacement:
    """`total` experts of layers x experts on the GPU. counts [layers, experts]: how often each was used, for
    "frequency"."""
    gpu_experts = torch.zeros(layers * experts, dtype=torch.bool)
    order = _ORDERS[strategy](layers, experts, counts)
    gpu_experts[order[: min(total, layers * experts)]] = True
    return ExpertPlacement(gpu_experts.view(layers, experts))


def _uniform(layers: int, experts: int, _counts: Tensor | None) -> Tensor:
    """The first of every layer, then the second, ..."""
    return torch.arange(layers * experts).view(layers, experts).T.flatten()


def _front_loading(layers: int, experts: int, _counts: Tensor | None) -> Tensor:
    return torch.arange(layers * experts)


def _random(layers: int, experts: int, _counts: Tensor | None) -> Tensor:
    return torch.randperm(layers * experts, generator=torch.Generator().manual_seed(RANDOM_SEED))


def _frequency(layers: int, experts: int, counts: Tensor | None) -> Tensor:
    if counts is None:
        raise ConfigError(
            "--kt-expert-placement-strategy frequency needs activation statistics: give --init-expert-location FILE, "
            "or take uniform"
        )
    if counts.shape != (layers, experts):
        raise ConfigError(
            f"the activation statistics are {list(counts.shape)}, the model {[layers, experts]}"
        )
    return counts.flatten().sort(descending=True, stable=True).indices


_ORDERS: dict[str, Callable[[int, int, Tensor | None], Tensor]] = {
    "uniform": _uniform,
    "front-loading": _front_loading,
    "random": _random,
    "frequency": _frequency,
}


def load_counts(
    path: str, layers: int, experts: int, moe_layers: Sequence[int] = (), decoder_layers: int = 0
) -> Tensor:
    """Activation statistics, float64 [layers, experts], of a file that `read_usage` takes; one with a row for each of
    `decoder_layers` has those of `moe_layers`, too. Raises ConfigError."""
    try:
        counts = read_usage(path).total
    except ConfigError as error:
        raise ConfigError(f"--init-expert-location {error}") from error
    if counts.shape == (decoder_layers, experts) and len(moe_layers) == layers:
        return counts[list(moe_layers)]
    if counts.shape != (layers, experts):
        raise ConfigError(
            f"--init-expert-location {path} holds counts of {list(counts.shape)}; this model has {[layers, experts]} "
            "(MoE layers, experts)"
        )
    return counts
