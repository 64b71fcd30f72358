"""`Rollouts`: how a draft layer's tokens are computed, each taken as accepted by the next."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tandem.engine.speculation.draft_batch import DraftRows, batch_of
from tandem.models.batch import ForwardBatch

Pass = Callable[[Tensor | None, ForwardBatch], tuple[Tensor, Tensor]]
"""Hidden states, or those that pages keep, and a batch in host memory -> draft tokens, and what stands for hidden
states."""


@runtime_checkable
class DraftingModel(Protocol):
    """A model with a draft layer."""

    def draft(
        self, hidden: Tensor | None, batch: ForwardBatch, states: Rows[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor]:
        """As `Model.draft`."""
        ...


class Rollouts(Protocol):
    @property
    def unusual(self) -> bool:
        """Whether the last call took longer than most do."""
        ...

    @property
    def confidences(self) -> Rows[Rows[float]]:
        """Probabilities of the last call's draft tokens, a row per run; of no run where nobody says."""
        ...

    def chains(self, runs: list[DraftRows], widths: Rows[int]) -> list[list[int]]:
        """Makes all rows. Of each run that is wanted, in order, so many draft tokens."""
        ...


class StepwiseRollouts:
    """`Rollouts` of any number of rows."""

    unusual = False
    confidences: Rows[Rows[float]] = ()

    def __init__(self, run: Pass, page_size: int) -> None:
        self._run, self._page_size = run, page_size

    def chains(self, runs: list[DraftRows], widths: Rows[int]) -> list[list[int]]:
        ends = [run for run in runs if run.wanted]
        tokens, hidden = self._pass(None, runs)
        draft_tokens, active = [[token] for token in tokens], list(range(len(ends)))
        while True:
            rows = [row for row, i in enumerate(active) if len(draft_tokens[i]) < widths[i]]
            active = [active[row] for row in rows]
            if not active:
                return draft_tokens
            tokens, hidden = self._pass(hidden[rows], [_next(ends[i], draft_tokens[i]) for i in active])
            for i, token in zip(active, tokens, strict=True):
                draft_tokens[i].append(token)

    def _pass(self, hidden: Tensor | None, runs: list[DraftRows]) -> tuple[list[int], Tensor]:
        tokens, x = self._run(hidden, batch_of(runs, self._page_size))
        return tokens.tolist(), x


class BlockRollouts:
    """`Rollouts` of layers that draft a block: one pass makes all draft tokens of a sequence."""

    unusual = False

    def __init__(self, run: Pass, page_size: int, most: int) -> None:
        """most: runs of a pass."""
        self._run, self._page_size, self._most = run, page_size, most
        self.confidences: list[list[float]] = []

    def chains(self, runs: list[DraftRows], widths: Rows[int]) -> list[list[int]]:
        draft_tokens, self.confidences = list[list[int]](), []
        for first in range(0, len(runs), self._most):
            batch = batch_of(runs[first : first + self._most], self._page_size)
            tokens, chances = self._run(None, batch)
            draft_tokens += tokens.tolist()
            self.confidences += chances.tolist()
        return [tokens[:width] for tokens, width in zip(draft_tokens, widths, strict=True)]


def on_cpu(model: DraftingModel, states: Rows[tuple[Tensor, ...]]) -> Pass:
    """Where the model computes in host memory."""

    def run(hidden: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            return model.draft(hidden, batch, states)

    return run


def _next(run: DraftRows, draft_tokens: list[int]) -> DraftRows:
    """The row behind a run and its draft tokens."""
    return DraftRows(run.sequence, run.last + len(draft_tokens), draft_tokens[-1:], True)
