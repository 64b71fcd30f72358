"""Chains that a reference draws, once each: sequences with the same text ask for the same."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

from torch import Tensor


class Reference(Protocol):
    def logits(self, tokens: list[int], width: int, draft_tokens: Rows[int] = ()) -> list[Tensor]: ...


class DrawnChains:
    def chain(self: Reference, tokens: list[int], width: int) -> list[int]:
        """Draft tokens of the layer behind `tokens`, each taken as accepted. A shorter chain is a longer one's
        beginning."""
        known = self.__dict__.setdefault("_chains", {})
        if len(known.get(tuple(tokens), ())) < width:
            known[tuple(tokens)] = [int(logits.argmax()) for logits in self.logits(tokens, width)]
        return known[tuple(tokens)][:width]
