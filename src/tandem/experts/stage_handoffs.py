"""`StageHandoffs`: the hand-offs of stages on several GPUs, as a runner sees them: one, on the last stage's GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes, HandoffTimes


class StageHandoffs(Handoff):
    """The last stage's, which speaks for all. stages: each stage's, in their order; this one is the last of them.

    One thread answers the posts of all stages: a step's graphs run one after the other, so its posts are one sequence.
    """

    def __init__(
        self, sizes: HandoffSizes, devices: list[torch.device], patience_seconds: float, foresight: bool = True
    ) -> None:
        """devices: of the stages, two or more."""
        first = Handoff(sizes, devices[0], patience_seconds, foresight)
        between = [Handoff(sizes, device, patience_seconds, foresight, first) for device in devices[1:-1]]
        super().__init__(sizes, devices[-1], patience_seconds, foresight, first)
        self.stages: list[Handoff] = [first, *between, self]

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stage in self.stages[:-1]:
                stack.enter_context(stage.rehearsing())
            stack.enter_context(super().rehearsing())
            yield

    @contextmanager
    def computing_nothing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stage in self.stages[:-1]:
                stack.enter_context(stage.computing_nothing())
            stack.enter_context(super().computing_nothing())
            yield

    def times(self) -> HandoffTimes:
        """Outside graphs of every stage, and inside of all."""
        total = super().times()
        for stage in self.stages[:-1]:
            total = total.plus(stage.outside_times())
        return total
