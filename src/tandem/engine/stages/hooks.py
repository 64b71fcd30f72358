"""`StagedStart`: what runs before a step of a model in stages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tandem.engine.step.hooks import Recorder
from tandem.models.batch import ForwardBatch
from tandem.models.staged import Stage


class StagedStart:
    """Hook before a step: each stage's operations prepare it. Nothing runs beside it."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._ops: list[Any] = [stage.ops for stage in stages if hasattr(stage.ops, "begin_step")]

    def __call__(self, batch: ForwardBatch, captured: bool) -> None:
        for ops in self._ops:
            ops.find_rows(batch, captured)
            ops.begin_step(batch, captured)

    def of_drafts(self, batch: ForwardBatch, captured: bool) -> None:
        """Stages have no draft layer."""

    def slot_copied(self, source: int, target: int) -> None:
        for table in (table for ops in self._ops for table in ops.tables):
            table.copied(source, target)

    def load_kernels(self, batch: ForwardBatch, streamed: Sequence[int]) -> None:
        self(batch, False)

    def pausable(self) -> bool:
        return False

    def hold(self, batch: ForwardBatch, split: bool = False) -> bool:
        return False

    def release(self) -> None:
        """Nothing is held."""

    def replayable(self, split: bool = False) -> bool:
        return False

    def may_split(self, rows: int) -> bool:
        return False

    def splits(self, rows: int) -> bool:
        return False

    def recording(self, recorder: Recorder) -> AbstractContextManager[None]:
        return nullcontext()
