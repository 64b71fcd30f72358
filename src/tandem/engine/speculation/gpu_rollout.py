"""`GpuRollouts`: a draft layer's tokens on a GPU: the first pass is a CUDA graph, each later one another's replay.

What a pass leaves for the next one stays on the GPU. So the host waits once, when the last one was given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.engine.graphs.decode_graphs import nothing_collected
from tandem.engine.sampling.logits import StepEnd
from tandem.engine.speculation.draft_batch import DraftRows, parted
from tandem.engine.speculation.rollout import BlockRollouts, DraftingModel, Pass, Rollouts, StepwiseRollouts
from tandem.engine.speculation.rollout_inputs import RolloutInputs, RolloutShape
from tandem.engine.step.batch import moved
from tandem.engine.step.hooks import BeginStep
from tandem.experts.handoff import Handoff
from tandem.models.batch import ForwardBatch

WARM_UPS = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuDrafts:
    """A draft layer on a GPU. begin_step: as `GpuRunner` has it. at_once: all draft tokens of so many sequences are
    made together, at most; 0: one draft token is made after the other. ranked: other ranks make the same recordings,
    and none may do without."""

    model: DraftingModel
    states: Rows[tuple[Tensor, ...]]
    handoff: Handoff
    begin_step: BeginStep
    at_once: int = 0
    ranked: bool = False

    def run(self, hidden: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """A pass of a batch on the device."""
        return self.model.draft(hidden, batch, self.states)

    def single_pass(self) -> Pass:
        """Pass of a batch in host memory. Its experts are those of few rows, so none of them is streamed."""

        def run(hidden: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
            self.begin_step(batch, True)
            return self.run(hidden, moved(batch, self.handoff.device))

        return run


class BlockRollout:
    """A function of no arguments that makes all draft tokens of a block, and what it leaves in host memory."""

    def __init__(self, drafts: GpuDrafts, shape: RolloutShape) -> None:
        self._drafts, device = drafts, drafts.handoff.device
        self.inputs, pinned = RolloutInputs(shape, device), device.type == "cuda"
        sizes = shape.draft_tokens, shape.sequences
        self.tokens = torch.zeros(sizes, dtype=torch.int64, pin_memory=pinned)
        self.confidences = torch.zeros(sizes, pin_memory=pinned)
        self.next: Callable[[], None] | None = None

    def first(self) -> None:
        self.inputs.send()
        proposed = self._drafts.run(None, self.inputs.first())
        for source, to in zip(proposed, (self.tokens, self.confidences), strict=True):
            to.copy_(source[:, : len(to)].T.contiguous(), non_blocking=True)


class Rollout:
    """Two functions of no arguments, and what they leave on the device. Both may be recorded."""

    def __init__(self, drafts: GpuDrafts, shape: RolloutShape) -> None:
        self._drafts, device = drafts, drafts.handoff.device
        self.inputs = RolloutInputs(shape, device)
        self._pass = torch.zeros(1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(shape.draft_tokens, shape.sequences, dtype=torch.int64, device=device)
        self._ids, self._positions, self._owners = (torch.zeros_like(self._tokens[0]) for _ in range(3))
        self._hidden: Tensor | None = None
        pinned = device.type == "cuda"
        self.tokens = torch.zeros(self._tokens.shape, dtype=torch.int64, pin_memory=pinned)  # [draft tokens, sequences]
        self.confidences: Tensor | None = None

    def first(self) -> None:
        """From the inputs, which it fetches."""
        self.inputs.send()
        batch = self.inputs.first()
        tokens, x = self._drafts.run(None, batch)
        if self._hidden is None:
            self._hidden = torch.empty_like(x)
        self._pass.zero_()
        self._positions.copy_(batch.positions[batch.logits_rows])
        self._owners.copy_(self.inputs.each)
        self._leave(tokens, x)

    def next(self) -> None:
        """From what the pass before has left."""
        assert self._hidden is not None, "the first pass comes first"
        self._pass.add_(1)
        whose = self.inputs.order.index_select(0, self._pass)[0]
        owners, positions = self._owners[whose], self._positions[whose] + 1
        batch = self.inputs.next(self._ids[whose], positions, owners)
        tokens, x = self._drafts.run(self._hidden[whose], batch)
        self._positions.copy_(positions)
        self._owners.copy_(owners)
        self._leave(tokens, x)

    def _leave(self, tokens: Tensor, x: Tensor) -> None:
        assert self._hidden is not None
        self._ids.copy_(tokens)
        self._hidden.copy_(x)
        self._tokens.index_copy_(0, self._pass, tokens[None])
        self.tokens.copy_(self._tokens, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _RecordedRollout:
    """replay: of a function; posts: hand-offs to the CPU's experts in it."""

    replay: Callable[[], None]
    posts: int


class GpuRollouts:
    """`Rollouts`. Rows of a prompt are more than a recording has: a pass makes all but the last, and drafts nothing.
    Where more sequences are wanted than a recording has, all runs pass by pass."""

    def __init__(self, drafts: GpuDrafts, shapes: Rows[RolloutShape], page_size: int) -> None:
        """shapes: to record, by their sequences, ascending."""
        self._drafts, self._handoff = drafts, drafts.handoff
        draft_pass, most = drafts.single_pass(), drafts.at_once
        self._unrecorded: Rollouts = (
            BlockRollouts(draft_pass, page_size, most) if most else StepwiseRollouts(draft_pass, page_size)
        )
        self._end, self.unusual = StepEnd(self._handoff.device), False
        self.confidences: Rows[Rows[float]] = ()
        self._recorded: list[tuple[Rollout | BlockRollout, _RecordedRollout, _RecordedRollout]] = []
        try:
            self._record(shapes)
        except Exception as error:  # too little memory, most of all; draft tokens are drawn without them, too
            if drafts.ranked:
                raise
            self._recorded = []
            _log.warning("draft tokens are drawn pass by pass: %s", error)

    def _record(self, shapes: Rows[RolloutShape]) -> None:
        pool: Any = None
        with torch.inference_mode(), nothing_collected():
            for shape in reversed(shapes):  # the largest first: the smaller ones fit into its memory
                chain, pool = self._captured(shape, pool)
                self._recorded.insert(0, chain)
        if shapes:
            _log.info("captured draft CUDA graphs for %s sequences", ", ".join(str(s.sequences) for s in shapes))

    def chains(self, runs: list[DraftRows], widths: Rows[int]) -> list[list[int]]:
        count = sum(run.wanted for run in runs)
        with torch.inference_mode():
            for recorded in self._recorded:
                if 0 < count <= recorded[0].inputs.shape.sequences:
                    return self._replayed(recorded, self._last_rows(runs, recorded[0].inputs.shape.rows), widths)
            self.unusual = bool(self._recorded)
            draft_tokens = self._unrecorded.chains(runs, widths)
        self.confidences = self._unrecorded.confidences
        self._handoff.check()
        return draft_tokens

    def _last_rows(self, runs: list[DraftRows], most: int) -> list[DraftRows]:
        """Rows of the runs that are wanted, at most `most` of each, once all rows before them are made."""
        before, last = parted(runs, most)
        self.unusual = bool(before)
        if before:
            self._unrecorded.chains(before, [])
        return last

    def _replayed(
        self,
        recorded: tuple[Rollout | BlockRollout, _RecordedRollout, _RecordedRollout],
        runs: list[DraftRows],
        widths: Rows[int],
    ) -> list[list[int]]:
        chain, first, later = recorded
        chain.inputs.fill(runs, widths)
        self._replay((first, *[later] * (0 if chain.next is None else max(widths) - 1)))
        self._end.mark()
        self._end.wait()
        self._handoff.check()
        draft_tokens = chain.tokens.T.tolist()
        self.confidences = () if chain.confidences is None else chain.confidences.T.tolist()
        return [tokens[:width] for tokens, width in zip(draft_tokens, widths, strict=False)]

    def _replay(self, passes: Rows[_RecordedRollout]) -> None:
        """One after the other: what a pass needs of the one before is on the device."""
        try:
            self._handoff.begin(sum(one.posts for one in passes))
            for one in passes:
                one.replay()
            self._handoff.finish()
        except BaseException:
            self._handoff.cancel()
            raise

    def _captured(
        self, shape: RolloutShape, pool: Any
    ) -> tuple[tuple[Rollout | BlockRollout, _RecordedRollout, _RecordedRollout], Any]:
        chain = BlockRollout(self._drafts, shape) if self._drafts.at_once else Rollout(self._drafts, shape)
        self._drafts.begin_step(chain.inputs.first(), True)
        with self._handoff.rehearsing():
            for _ in range(WARM_UPS):
                chain.first()
                for _ in range(1, shape.draft_tokens if chain.next else 1):
                    (chain.next or chain.first)()
        if self._handoff.device.type != "cuda":
            return (chain, _RecordedRollout(chain.first, 0), _RecordedRollout(chain.next or chain.first, 0)), None
        first, pool = self._graph(chain.first, pool)
        goes_on = chain.next is not None and shape.draft_tokens > 1
        later, pool = self._graph(chain.next, pool) if chain.next and goes_on else (first, pool)
        return (chain, first, later), pool

    def _graph(self, function: Callable[[], None], pool: Any) -> tuple[_RecordedRollout, Any]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            self._handoff.recording() as posts,
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            function()
        return _RecordedRollout(graph.replay, len(posts)), pool or graph.pool()
