"""`StagedStart`: what runs before a step of a model in stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from tandem.engine.step.hooks import Recorder
from tandem.models.batch import ForwardBatch
from tandem.models.staged import Stage


class StageStream(Protocol):
    """Part of `ExpertStream` that a step's begin calls. Layers are numbered through all stages."""

    def begin(self, rows: int, shared: bool = False) -> None: ...

    def begin_only(self, rows: int, layers: Iterable[int]) -> None: ...


class StagedStart:
    """Hook before a step: each stage's operations prepare it. Nothing runs beside it."""

    def __init__(self, stages: Sequence[Stage], streams: Sequence[StageStream | None] = ()) -> None:
        """streams: each stage's, None for one without experts in CPU memory; (): nothing is streamed."""
        self._stages = stages
        self._ops: list[Any] = [stage.ops for stage in stages if hasattr(stage.ops, "begin_step")]
        each = zip(stages, streams, strict=True) if streams else ()
        self._streams = [(stage, stream) for stage, stream in each if stream is not None]

    def __call__(self, batch: ForwardBatch, captured: bool) -> None:
        self._begin_ops(batch, captured)
        for stage, stream in self._streams:
            with stage.current():
                stream.begin(0 if captured else len(batch.input_ids), shared=batch.single_rows > 0)

    def of_stage(self, number: int, batch: ForwardBatch) -> None:
        """Before a chunk that stages compute one after the other reaches this one. Nothing is streamed."""
        ops: Any = self._stages[number].ops
        if ops in self._ops:
            _begin(ops, batch, False)

    def _begin_ops(self, batch: ForwardBatch, captured: bool) -> None:
        for ops in self._ops:
            _begin(ops, batch, captured)

    def of_drafts(self, batch: ForwardBatch, captured: bool) -> None:
        """Stages have no draft layer."""

    def slot_copied(self, source: int, target: int) -> None:
        for table in (table for ops in self._ops for table in ops.tables):
            table.copied(source, target)

    def load_kernels(self, batch: ForwardBatch, streamed: Sequence[int]) -> None:
        self._begin_ops(batch, False)
        for stage, stream in self._streams:
            with stage.current():
                stream.begin_only(len(batch.input_ids), streamed)

    def pausable(self) -> bool:
        return False

    def begin_task(self, batch: ForwardBatch, split: bool = False) -> bool:
        return False

    def end_task(self) -> None:
        """Nothing is held."""

    def replayable(self, split: bool = False) -> bool:
        return False

    def may_split(self, rows: int) -> bool:
        return False

    def splits(self, rows: int) -> bool:
        return False

    def recording(self, recorder: Recorder) -> AbstractContextManager[None]:
        return nullcontext()


def _begin(ops: Any, batch: ForwardBatch, captured: bool) -> None:
    ops.find_rows(batch, captured)
    ops.begin_step(batch, captured)
