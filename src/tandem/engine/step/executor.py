"""`Executor`: what the engine needs of whoever computes its steps: a CPU, a GPU, or the first of several ranks."""

from __future__ import annotations

from typing import Protocol

from tandem.engine.sequence import Chunk
from tandem.engine.step.prefill import PrefillTask
from tandem.engine.step.step import Running, Step, StepOutput


class Executor(Protocol):
    """One step at a time, and beside it one prefill task at most."""

    def start(self, step: Step, overlaps: bool = False) -> Running[StepOutput]:
        """Starts a step: its output has logits rows of all chunks, in order. When this returns, a device may still
        compute, but the CPU has done its part. overlaps: the host gives pieces of a prefill task until the result."""
        ...

    def commit(self, tokens: int) -> None:
        """The last step's rows were so many tokens: its other drafts are not counted any more."""
        ...

    def pause(self, chunks: list[Chunk]) -> PrefillTask | None:
        """Begins a task of these chunks. None: the model or the device cannot."""
        ...

    def runs_beside(self, chunks: list[Chunk]) -> bool:
        """Whether a step of these chunks can run while a task is under way."""
        ...

    def step_ended(self) -> bool:
        """Whether the device has computed the step that was given last."""
        ...

    def after_failure(self) -> None:
        """Raises EngineError where no later step could work."""
        ...
