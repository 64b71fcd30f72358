"""`ExpertPlacement`: pure data, which experts of which layer live on the GPU; and the strategies that make it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.errors import ConfigError

RANDOM_SEED = 42


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """on_gpu bool [MoE layers, experts]."""

    on_gpu: Tensor

    @property
    def total(self) -> int:
        return int(self.on_gpu.sum())

    def slots(self, layer: int) -> Tensor:
        """int32 [experts]: the expert's place among its layer's on the GPU, -1 for those in CPU memory."""
        here = self.on_gpu[layer]
        return torch.where(here, here.cumsum(0) - 1, -1).int()


def place(
    strategy: str, layers: int, experts: int, total: int, counts: Tensor | None = None
) -> ExpertPlacement:
    """`total` experts of layers x experts on the GPU. counts [layers, experts]: how often each was used, for
    "frequency"."""
    on_gpu = torch.zeros(layers * experts, dtype=torch.bool)
    order = _ORDERS[strategy](layers, experts, counts)
    on_gpu[order[: min(total, layers * experts)]] = True
    return ExpertPlacement(on_gpu.view(layers, experts))


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


def load_counts(path: str, layers: int, experts: int) -> Tensor:
    """Activation statistics, float64 [layers, experts]: a tensor [.., layers, experts] or a dict with `logical_count`,
    read without executing pickled code. Raises ConfigError."""
    try:
        stored = torch.load(Path(path), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch finds wrong with the file
        raise ConfigError(f"--init-expert-location {path} cannot be read: {error}") from error
    counts = stored.get("logical_count") if isinstance(stored, dict) else stored
    if not isinstance(counts, Tensor) or counts.dim() < 2 or counts.shape[-2:] != (layers, experts):
        found = list(counts.shape) if isinstance(counts, Tensor) else type(counts).__name__
        raise ConfigError(
            f"--init-expert-location {path} holds {found}; expected a tensor [.., {layers}, {experts}] (MoE layers, "
            "experts) or a dict with it as logical_count"
        )
    return counts.double().flatten(0, -3).sum(0) if counts.dim() > 2 else counts.double()
