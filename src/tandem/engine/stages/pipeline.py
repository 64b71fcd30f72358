"""`Pipeline`: chunks of one prompt over stages: while a stage computes a chunk, the one before computes the next.

The host gives work to GPUs and waits for none of it between two chunks. Every GPU computes on its current stream, as in
any other step, so pages, slots and scratch are written in the order of the chunks. What the host keeps of a chunk until
a GPU has read it, its batch, is the chunk's own; only the number of chunks under way is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.stages.borders import Border, border
from tandem.engine.stages.hooks import StagedStart
from tandem.engine.step.batch import moved
from tandem.engine.step.prefill import InFlight
from tandem.models.batch import ForwardBatch
from tandem.models.passing import States
from tandem.models.staged import StagedModel, StagedPass


class CountsStages(Protocol):
    """Counts who is chosen, stage by stage."""

    def begin_part(self, number: int, rows: int) -> None: ...


class Pipeline:
    """One prompt at a time. Batches are in host memory, and stay as they are until the device has read them."""

    def __init__(
        self, model: StagedModel, states: States, start: StagedStart, usage: CountsStages | None, rows: int
    ) -> None:
        """rows: of a chunk, at most. usage: None where nobody counts."""
        self._model, self._states, self._start, self._usage = model, states, start, usage
        devices = [stage.device for stage in model.stages]
        self._borders: list[Border] = [border(*each, rows) for each in pairwise(devices)]
        self._under_way = InFlight(devices[-1])
        self._num_passed = 0  # borders, by the chunk that is given

    def wait_for_room(self) -> None:
        """Until each stage has a chunk at most, so that the first one is never without."""
        self._under_way.wait_for_room(len(self._model.stages) + 1)

    def give(self, batch: ForwardBatch) -> Tensor:
        """Gives the next chunk to all stages; its logits are there when the last stage has computed it."""
        self._num_passed, p = 0, self._begun(batch)
        for number in range(1, len(self._model.stages)):
            self._crossed(p, number, batch)
        with self._model.stages[-1].current():
            logits = self._model.logits(p, self._states)
            self._pass_before(len(self._borders))
            self._under_way.mark()
        return logits

    def _begun(self, batch: ForwardBatch) -> StagedPass:
        first = self._model.stages[0]
        with first.current():
            self._prepare(0, batch)
            p = self._model.begin(moved(batch, first.device))
            self._model.run_stage(p, self._states)
        return p

    def _crossed(self, p: StagedPass, number: int, batch: ForwardBatch) -> None:
        """The pass on this stage, from the one before."""
        stage = self._model.stages[number]
        with stage.current():
            own_batch = moved(batch, stage.device)
            with self._borders[number - 1].crossing() as carry:
                p.carry(number, own_batch, carry)
            if self._borders[number - 1].leaves:  # what came over borders before is carried on as it is elsewhere
                self._pass_before(number - 1)
            self._prepare(number, batch)
            self._model.run_stage(p, self._states)

    def _pass_before(self, end: int) -> None:
        """The chunk's rows that came over the first `end` borders are read by nothing that is given later."""
        for each in self._borders[self._num_passed : end]:
            each.passed()
        self._num_passed = end

    def _prepare(self, number: int, batch: ForwardBatch) -> None:
        self._start.of_stage(number, batch)
        if self._usage is not None:
            self._usage.begin_part(number, len(batch.input_ids))


def joined(logits: Rows[Tensor]) -> Tensor:
    """Logits of all chunks, one behind the other: [rows, vocab]."""
    return logits[0] if len(logits) == 1 else torch.cat(list(logits))
