"""`StagedUsage`: an `ExpertUsage` of a model whose layers are divided among GPUs: each stage counts on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.experts.usage.expert_usage import CopiedCounts, ExpertUsage, UsageTotals
from tandem.kernels.ops import ExpertCounts


class StageCounts:
    """Counts of one stage's layers on their way, as those of a model that has no others."""

    def __init__(self, copied: CopiedCounts, first: int, layers: int) -> None:
        """first: of the stage's layers, among all."""
        self._copied, self._first, self._layers = copied, first, layers

    def tokens(self) -> npt.NDArray[Any]:
        """As `CopiedCounts.tokens`."""
        own = self._copied.tokens()
        counts = np.zeros((self._layers, own.shape[1]), own.dtype)
        counts[self._first : self._first + len(own)] = own
        return counts


class StagedUsage(ExpertUsage):
    """Experts stay where they are, and no pass is overtaken by steps."""

    def __init__(self, parts: Sequence[ExpertUsage], gpu_experts: Tensor) -> None:
        """parts: each stage's, of its own layers. gpu_experts: of all layers."""
        layers, experts = gpu_experts.shape
        super().__init__(layers, experts, gpu_experts=gpu_experts)
        self._parts = list(parts)

    def tally(self, layer: int) -> ExpertCounts:
        for part in self._parts:
            if layer < part.shape[0]:
                return part.tally(layer)
            layer -= part.shape[0]
        raise IndexError("no stage has this layer")

    def begin(self, rows: int | Tensor) -> None:
        for part in self._parts:
            part.begin(rows)

    def begin_part(self, number: int, rows: int | Tensor) -> None:
        """In the graph of one stage, or before its part of a chunk."""
        self._parts[number].begin(rows)

    def ask_part(self, number: int) -> StageCounts:
        """Counts of one stage until now, which arrive beside the next step."""
        first = sum(part.shape[0] for part in self._parts[:number])
        return StageCounts(self._parts[number].ask(), first, self.shape[0])

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
