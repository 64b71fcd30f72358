"""`TravelOrder`: who travels first. Those that had most rows until now; so the CPU has those with few."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tandem.experts.streams.key_tables import Keyed

LEAST_BYTES = 4 << 20
"""Of an expert, 75 us of the bus. In their own order many small ones are one copy; in another each is a copy, which
takes the host 3 us."""


class TravelOrder:
    """Of each layer's places. It is made anew whenever twice as many rows have travelled or been computed beside as
    before: what many prompts use changes slowly, and copies are listed anew then."""

    def __init__(self, layers: Sequence[Keyed | None]) -> None:
        self._layers, self._rows, self._next = layers, 0, 1
        self.places = [np.arange(0 if layer is None else layer.places, dtype=np.int32) for layer in layers]

    def is_due(self, rows: int) -> bool:
        """Before a step of so many rows. What was counted is of the steps before."""
        due = self._rows >= self._next
        if due:
            self._next = 2 * self._rows
        self._rows += rows
        return due

    def renew(self, tokens: Tensor) -> None:
        """tokens [layers, experts]: what each got until now."""
        for index, layer in enumerate(self._layers):
            if layer is not None:
                self.places[index] = _by_tokens(layer, tokens[index].numpy())

    def ranks(self, layer: int) -> npt.NDArray[np.int32]:
        """Of each place."""
        ranks = np.empty_like(self.places[layer])
        ranks[self.places[layer]] = np.arange(len(ranks), dtype=np.int32)
        return ranks


def _by_tokens(layer: Keyed, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    found, of_place = np.array(layer.found())[: len(tokens)], np.zeros(layer.places, np.int64)
    here = np.flatnonzero(found >= 0)
    of_place[found[here]] = tokens[here]
    return np.argsort(-of_place, kind="stable").astype(np.int32)
