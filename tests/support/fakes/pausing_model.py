"""The fake model in pieces: a pass of it can stop between two layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fake_model import FakeModel

DEPTH = 5
LONG = [3, 5, 7, 11, 13, 17, 19] * 12


@dataclass
class FakePass:
    batch: Any
    tallies: Any = None

    def first(self, batch) -> FakePass:
        return FakePass(batch)


class PausingFake(FakeModel):
    """Reads and writes its pages in its last layer: whoever drops it before has changed nothing."""

    depth = DEPTH

    def __init__(self) -> None:
        super().__init__()
        self.layers_run: list[int] = []
        self.fail_in: int | None = None

    def begin(self, batch) -> FakePass:
        return FakePass(batch)

    def layer(self, p: FakePass, index: int, states) -> None:
        self.layers_run.append(index)
        if index == self.fail_in:
            raise RuntimeError("a layer failed")
        if index == DEPTH - 1:
            self.made = self.forward(p.batch, states)

    def logits(self, p: FakePass, states) -> torch.Tensor:
        return self.made
