"""`TraceUsage`: counts and hits of a trace that is decoded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.experts.usage.expert_usage import Changes, CopiedCounts, Copy, Counted, ExpertUsage


class _AskedOfTrace(NamedTuple):
    counts: Counted
    real: CopiedCounts

    def reads(self) -> Counted:
        self.real.reads()
        return self.counts  # a step is a token, whose experts of a layer are distinct


class TraceUsage:
    """Counts what the trace chose, where `ExpertUsage` counts what the router would have. That is asked and told as
    well, so that it takes its time. Nothing else is done between steps: counts lie ready, as the GPU has them when it
    serves. Hits are counted afterwards, by where experts were when they were used."""

    def __init__(self, real: ExpertUsage, trace: Tensor, gpu_experts: Tensor) -> None:
        self._real, self._trace, self._gpu_experts = real, trace, gpu_experts.clone()
        self.tokens = 0  # of the trace, decoded so far
        self._counted = 0
        self._counts = counts_after_each(trace, gpu_experts.shape[1]).numpy()
        self._moves: list[tuple[int, Changes]] = []  # tokens decoded before, in order
        self.hits = self.swaps = self.swap_rests = 0

    @property
    def copy(self) -> Copy | None:
        return self._real.copy

    @copy.setter
    def copy(self, how: Copy | None) -> None:
        self._real.copy = how

    def count(self) -> None:
        """`hits`, of the trace's tokens so far. It takes a while, so it is called when no clock runs."""
        for tokens, changes in self._moves:
            self._count_until(tokens)
            layers, experts, sides = np.array(changes(), np.int64).T
            self._gpu_experts.numpy()[layers, experts] = sides > 0
        self._moves.clear()
        self._count_until(self.tokens)

    def _count_until(self, tokens: int) -> None:
        gpu_experts, layers = self._gpu_experts.numpy(), np.arange(len(self._gpu_experts))[:, None]
        self.hits += int(gpu_experts[layers, self._trace[self._counted : tokens].numpy()].sum())
        self._counted = tokens

    def ask(self) -> _AskedOfTrace:
        return _AskedOfTrace(self._counts[self.tokens], self._real.ask())

    def note(self) -> None:
        self._real.note()

    def moved(self, changes: Changes, swaps: int, now: _AskedOfTrace | None = None) -> None:
        self._real.moved(changes, swaps, None if now is None else now.real)
        self._moves.append((self.tokens, changes))
        self.swaps += swaps


def counts_after_each(trace: Tensor, experts: int) -> Tensor:
    """How often every expert was chosen before the first token, and after each: int32 [tokens + 1, layers, experts]."""
    counts = torch.zeros(len(trace) + 1, trace.shape[1], experts, dtype=torch.int32)
    counts[1:].scatter_(2, trace.long(), 1)  # a token's experts of a layer are distinct
    return counts.cumsum_(0)
