"""`StagedUsage`: an `ExpertUsage` of a model whose layers are divided among GPUs: each stage counts on its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.experts.usage.expert_usage import ExpertUsage, UsageTotals
from tandem.kernels.ops import Tally


class StagedUsage(ExpertUsage):
    """Experts stay where they are, and no pass is overtaken by steps."""

    def __init__(self, parts: Sequence[ExpertUsage], gpu_experts: Tensor) -> None:
        """parts: each stage's, of its own layers. gpu_experts: of all layers."""
        layers, experts = gpu_experts.shape
        super().__init__(layers, experts, gpu_experts=gpu_experts)
        self._parts = list(parts)

    def tally(self, layer: int) -> Tally:
        for part in self._parts:
            if layer < part.shape[0]:
                return part.tally(layer)
            layer -= part.shape[0]
        raise IndexError("no stage has this layer")

    def begin(self, rows: int | Tensor) -> None:
        for part in self._parts:
            part.begin(rows)

    def begin_part(self, number: int, rows: Tensor) -> None:
        """In the graph of one stage."""
        self._parts[number].begin(rows)

    def read(self) -> UsageTotals:
        totals = [part.read() for part in self._parts]
        self._totals = torch.stack([torch.cat([each[kind] for each in totals]) for kind in range(2)])
        self._gpu_totals = (self._totals * self._gpu_experts).sum(2)
        return UsageTotals(self._totals[0].clone(), self._totals[1].clone())

    def chosen(self, rows: int, wrong: Sequence[int] = ()) -> Tensor:
        return torch.cat([part.chosen(rows, wrong) for part in self._parts], 1)

    def take_back(self, rows: Sequence[int]) -> None:
        for part in self._parts:
            part.take_back(rows)
